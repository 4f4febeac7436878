"""Which tensor a request was: every shape of the model and the run that prints the same size."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from planner.allocator.pool import LARGE_BUFFER
from planner.doctor.context import Context
from planner.doctor.framework import framework_of
from planner.doctor.sizes import (
    PLAIN,
    allocator_of,
    parse_size,
    printed,
    printed_window,
    segment_bytes,
)
from planner.models.spec import ModuleKind
from planner.run.framework import pick
from planner.units import MiB

PHASE_KINDS: dict[str, tuple[str, ...]] = {
    "vocab": ("logits",),
    "load": ("weight", "model"),
    "module_to": ("weight", "model"),
    "optimizer_temp": ("weight", "partition"),
    "optimizer_states": ("weight", "partition"),
    "optimizer_init": ("partition", "weight"),
    "save": ("weight", "layer"),
    "gather": ("layer", "weight"),
    "attention": ("attention",),
    "sampler_warmup": ("sampler",),
    "prompt_logprobs": ("logits", "sampler"),
    "backward": ("weight", "logits", "activation", "layer"),
    "forward": ("logits", "layer", "weight", "activation", "attention"),
}
VOCABULARIES = (
    32000,
    50257,
    64000,
    100352,
    128256,
    129280,
    151936,
    152064,
    200064,
    201088,
    248320,
    250880,
    256000,
    262144,
)
"""Heads worth trying when the model is not known."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A tensor whose allocation prints the size in the message."""

    kind: str
    """logits, weight, layer, partition, attention, activation, sampler, model."""
    name: str
    formula: str
    bytes: int
    likelihood: float
    """Share among all candidates, 0..1."""
    free_parameter: str = ""
    """What had to be assumed for the match ("tokens", "rows"); "" = every number was given."""


@dataclass(frozen=True, slots=True)
class _Shape:
    kind: str
    name: str
    factors: tuple[int, ...]
    itemsize: int
    free: str = ""
    tried: int = 1
    """How many values of the free parameter were tried: more tries, less proof."""

    @property
    def bytes(self) -> int:
        return prod(self.factors) * self.itemsize

    @property
    def formula(self) -> str:
        factors = " * ".join(f"{factor:,}" for factor in self.factors)
        return f"{factors} * {self.itemsize} B = {self.bytes:,} B"


def find_candidates(
    tried: str, context: Context, phases: tuple[str, ...], *, rounded: bool = True
) -> list[Candidate]:
    """Return the tensors that print as `tried`, most likely first; [] for a tiny request.

    `rounded`: the native allocator printed its segment size; cudaMallocAsync prints the
    request itself.
    """
    size = parse_size(tried)
    if size is None or size <= LARGE_BUFFER:
        return []
    window = printed_window(tried) + (2 * MiB if rounded else 0)
    divisions = pick(framework_of(context).name).switches.roundup_power2
    allocators = (PLAIN, allocator_of(divisions)) if divisions else (PLAIN,)
    weights: list[tuple[float, _Shape, int]] = []
    seen: set[tuple[str, int]] = set()
    for shape in _shapes(context, size):
        requests = (
            [segment_bytes(shape.bytes, allocator) for allocator in allocators]
            if rounded
            else [shape.bytes]
        )
        request = next((size for size in requests if printed(size) == tried), None)
        if request is None or (shape.name, shape.bytes) in seen:
            continue
        seen.add((shape.name, shape.bytes))
        chance = min(1.0, shape.tried * window / size)
        weights.append((_prior(shape.kind, phases) / (chance + 0.002), shape, request))
    whole = sum(weight for weight, _, _ in weights)
    ranked = sorted(weights, key=lambda row: -row[0])
    return [
        Candidate(
            kind=shape.kind,
            name=shape.name,
            formula=f"{shape.formula}, printed as {printed(request)}",
            bytes=shape.bytes,
            likelihood=round(weight / whole, 3),
            free_parameter=shape.free,
        )
        for weight, shape, request in ranked
    ]


def implied_tokens(size: int, vocab: int) -> dict[str, int]:
    """Return how many tokens of logits a size holds, by dtype."""
    return {"fp32": round(size / (4 * vocab)), "bf16": round(size / (2 * vocab))}


def _prior(kind: str, phases: tuple[str, ...]) -> float:
    for rank, phase in enumerate(phases[:3]):
        kinds = PHASE_KINDS.get(phase, ())
        if kind in kinds:
            return 8.0 / (1 + rank) / (1 + kinds.index(kind) / 2)
    return 0.5


def _shapes(context: Context, size: int) -> Iterator[_Shape]:
    yield from _vocab_shapes(context)
    yield from _weight_shapes(context)
    yield from _run_shapes(context)


def _rows(context: Context) -> list[tuple[str, tuple[int, ...], str, int]]:
    """Return (name, factors, free parameter, values tried) for token counts the run implies."""
    number = context.number
    batch = number("batch")
    lengths: dict[int, str] = {}
    for key in ("length", "prompt", "completion"):
        if value := number(key):
            lengths.setdefault(value, key)
            lengths.setdefault(value - 1, f"{key} - 1")
    prompt, completion = number("prompt"), number("completion")
    if prompt and completion:
        lengths.setdefault(prompt + completion, "prompt + completion")
    found: list[tuple[str, tuple[int, ...], str, int]] = []
    if tokens := number("tokens"):
        found.append((f"{tokens:,} tokens", (tokens,), "", 1))
    pairs = (1, 2) if context.task in ("dpo", "") else (1,)
    for length, name in lengths.items():
        if batch:
            found += [
                (f"{batch * pair} rows of {length} ({name})", (batch * pair, length), "", 1)
                for pair in pairs
            ]
        if generations := number("generations"):
            found.append(
                (f"{generations} generations of {length} ({name})", (generations, length), "", 1)
            )
        found += [
            (f"{n} rows of {length} ({name})", (n, length), "rows", 64)
            for n in range(1, 65)
            if n != batch
        ]
    return found


def _vocab_shapes(context: Context) -> Iterator[_Shape]:
    vocab = context.vocab
    if not vocab:
        return
    tp = context.number("tp") or 1
    heads = {vocab: "vocabulary"}
    if tp > 1 and vocab % tp == 0 and "vocab" not in context.numbers:
        heads[vocab // tp] = f"vocabulary / {tp}"
    for head, head_name in heads.items():
        for name, factors, free, tries in _rows(context):
            for itemsize, dtype in ((4, "fp32"), (2, "16-bit")):
                yield _Shape(
                    "logits",
                    f"{dtype} logits, {name} x {head_name}",
                    (*factors, head),
                    itemsize,
                    free,
                    tries,
                )
    known = context.number("max_num_seqs")
    for rows, free, tries in (
        ((known, "", 1),)
        if known
        else ((256, "max_num_seqs", 3), (1024, "max_num_seqs", 3), (128, "max_num_seqs", 3))
    ):
        for itemsize, name in (
            (12, "sort scratch"),
            (8, "sort indices"),
            (4, "fp32 logits"),
            (2, "16-bit logits"),
        ):
            yield _Shape(
                "sampler",
                f"sampler {name}, {rows} sequences",
                (rows or 1, vocab),
                itemsize,
                free,
                tries,
            )
    for chunk in (1024, 2048, 8192):
        yield _Shape(
            "logits", f"prompt log-probs, a chunk of {chunk}", (chunk, vocab), 2, "chunk", 3
        )


def _weight_shapes(context: Context) -> Iterator[_Shape]:
    model = context.model
    if model is None:
        hidden, ffn = context.number("hidden"), context.number("ffn")
        if hidden and ffn:
            for itemsize, dtype in ((2, "16-bit"), (4, "fp32")):
                yield _Shape("weight", f"{dtype} MLP matrix", (hidden, ffn), itemsize)
                yield _Shape(
                    "layer",
                    f"{dtype} whole layer (gathered)",
                    (4 * hidden * hidden + 3 * hidden * ffn + 2 * hidden,),
                    itemsize,
                )
        return
    dtypes = ((2, "16-bit"), (4, "fp32"), (1, "8-bit"))
    matrices: dict[tuple[int, ...], str] = {}
    for layer in model.layers:
        for module in layer.modules:
            if module.kind in (ModuleKind.LINEAR, ModuleKind.CONV1D, ModuleKind.EXPERTS):
                matrices.setdefault(tuple(module.shapes[0]), module.name)
    for shape, name in matrices.items():
        for itemsize, dtype in dtypes:
            yield _Shape("weight", f"{dtype} {name}", shape, itemsize)
    rows = context.number("vocab") or model.vocab
    for itemsize, dtype in dtypes[:2]:
        yield _Shape("weight", f"{dtype} lm_head / embedding", (rows, model.hidden), itemsize)
        for layer in model.layers:
            yield _Shape("layer", f"{dtype} whole layer (gathered)", (layer.parameters,), itemsize)
    head = model.vocab * model.hidden
    for itemsize, dtype in ((4, "fp32"), (2, "16-bit")):
        yield _Shape(
            "partition",
            f"flat {dtype} copy of all parameters on one rank",
            (model.parameters,),
            itemsize,
        )
    for ranks in {context.gpus, 8} - {1}:
        free = "" if ranks == context.gpus else "ranks"
        for count, name in (
            (model.parameters, "all parameters"),
            (model.parameters - head, "parameters without lm_head"),
        ):
            for itemsize in (4, 2):
                yield _Shape(
                    "partition",
                    f"partition of {name} over {ranks} ranks",
                    (count // ranks,),
                    itemsize,
                    free,
                    4,
                )


def _run_shapes(context: Context) -> Iterator[_Shape]:
    model = context.model
    if model is None:
        return
    batch = context.number("batch")
    lengths = {value for key in ("length", "prompt") if (value := context.number(key))}
    heads = max((layer.mixer.num_heads for layer in model.layers), default=0)
    ffn = max((layer.mlp.intermediate for layer in model.layers), default=0)
    if not lengths and heads:
        yield from _free_attention(heads, batch, model.max_position)
    for length in lengths:
        for rows in (batch,) if batch else (1, 2, 4, 8, 16):
            free, tries = ("", 1) if batch else ("batch", 5)
            for itemsize, dtype in ((2, "16-bit"), (4, "fp32")):
                if heads:
                    yield _Shape(
                        "attention",
                        f"{dtype} attention scores",
                        (rows, heads, length, length),
                        itemsize,
                        free,
                        tries,
                    )
                for width, name in ((model.hidden, "hidden states"), (ffn, "MLP activations")):
                    if width:
                        yield _Shape(
                            "activation",
                            f"{dtype} {name}",
                            (rows, length, width),
                            itemsize,
                            free,
                            tries,
                        )


def _free_attention(heads: int, batch: int | None, longest: int) -> Iterator[_Shape]:
    """Yield attention scores at the usual lengths, when the run's is not known."""
    lengths = {2**power for power in range(10, 18)} | ({longest} if longest else set())
    batches = (batch,) if batch else (1, 2, 4, 8, 16)
    for length in sorted(lengths):
        for rows in batches:
            for itemsize, dtype in ((2, "16-bit"), (4, "fp32")):
                yield _Shape(
                    "attention",
                    f"{dtype} attention scores at {length:,} tokens",
                    (rows, heads, length, length),
                    itemsize,
                    "length",
                    2 * len(lengths) * len(batches),
                )
