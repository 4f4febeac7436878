"""What makes a server start, or gives it more room: each change planned with the change made.

A change is the mildest of its kind: the least utilisation, the longest request, the fewest GPUs. One that
does not start by itself is tried with those that cost less, and never shown where it does not start.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, islice
from typing import Any

from planner.answers.advise import largest
from planner.errors import VramwiseError
from planner.machines.machine import MAX_GPUS, Machine
from planner.models.spec import ModelSpec
from planner.plan import Plan, plan
from planner.run.recipe import Recipe
from planner.units import GiB

LEAST = 256
"""Tokens of a request that is worth serving."""
MOST_UTILIZATION = 0.97
"""Above it a driver's own needs are not left."""
HUNDREDTHS = 100
TENSOR_PARALLEL = (2, 4, 8, 16)
BATCHED_TOKENS = (4096, 2048, 1024, 512)
SEQUENCES = (512, 256, 128, 64, 32, 16)
OFFLOADED_GIB = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
MOST_TOGETHER = 3
FITS = frozenset(("fits",))


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing to set otherwise."""

    words: str
    """As `vllm serve` takes it."""
    flag: str
    """As `vramwise plan` takes it."""
    update: dict[str, Any]
    """Fields of the recipe; "engine.kv_dtype" reaches into a section."""
    price: str
    gpus: int = 1
    """GPUs that the server then needs."""


Ask = Callable[[Setting], Plan | None]
"""The plan with a setting, None unless it starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescue:
    """Settings with which the server starts, and what it then holds."""

    words: str
    flags: str
    update: dict[str, Any]
    price: str
    gpus: int
    kv_tokens: int
    max_model_len: int
    at_once: float
    """Requests of max_model_len."""
    p_refused: float

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "change": self.words,
            "flags": self.flags,
            "price": self.price,
            "gpus": self.gpus,
            "starts": True,
            "kv_tokens": self.kv_tokens,
            "max_model_len": self.max_model_len,
            "max_concurrency": round(self.at_once, 4),
            "p_refused": round(self.p_refused, 4),
        }


def changed(recipe: Recipe, update: dict[str, Any]) -> Recipe:
    """Return the recipe with some fields set; "engine.kv_dtype" reaches into a section."""
    fields = recipe.model_dump(by_alias=True)
    for path, value in update.items():
        section, _, name = path.rpartition(".")
        (fields[section] if section else fields)[name] = value
    return Recipe.model_validate(fields)


def rescues(model: ModelSpec, recipe: Recipe, machine: Machine, base: Plan) -> list[Rescue]:
    """Return what makes the server start, the cheapest first; where it starts, what gives more room."""
    ask = partial(_planned, model, recipe, machine)
    kinds = _kinds(base, machine)
    if base.fits:
        tries = [kind[-1] if "utilization" in kind[-1].words else kind[0] for kind in kinds]
        found = [_rescue(each, result) for each in tries if (result := ask(each)) is not None]
        now = base.serving.kv_tokens if base.serving else 0
        return [each for each in found if each.kv_tokens > now]
    found = [_rescue(*pair) for kind in kinds if (pair := _mildest(ask, kind))]
    here = [each for each in found if each.gpus <= machine.num_gpus]
    if not here:
        here = list(islice(_together(ask, kinds, machine), 1))
        found = here + found
    shorter = list(_shorter(ask, kinds, base, alone=bool(here)))
    slow = _mildest(ask, _offloads(base)) if not here else None
    return [*found, *shorter, *([_rescue(*slow)] if slow else [])]


def _planned(model: ModelSpec, recipe: Recipe, machine: Machine, setting: Setting) -> Plan | None:
    """Return the plan with a setting, None unless it starts."""
    gpus = max(machine.num_gpus, setting.gpus)
    nodes = machine.nodes if gpus == machine.num_gpus else 0
    try:
        wider = replace(machine, num_gpus=gpus, nodes=nodes)
        result = plan(model, changed(recipe, setting.update), wider)
    except VramwiseError:
        return None
    return result if result.fits else None


def _rescue(setting: Setting, result: Plan) -> Rescue:
    serving = result.serving
    return Rescue(
        words=setting.words,
        flags=setting.flag,
        update=setting.update,
        price=setting.price,
        gpus=setting.gpus,
        kv_tokens=serving.kv_tokens if serving else 0,
        max_model_len=serving.max_model_len if serving else 0,
        at_once=serving.max_concurrency if serving else 0.0,
        p_refused=result.risk.p_oom,
    )


def _mildest(ask: Ask, kind: list[Setting]) -> tuple[Setting, Plan] | None:
    """Return the first setting of a kind with which the server starts."""
    return next(((each, result) for each in kind if (result := ask(each)) is not None), None)


def _kinds(base: Plan, machine: Machine) -> list[list[Setting]]:
    """Return the settings of each kind, the mildest first; the kinds by their price."""
    r = base.resolved
    used = round(HUNDREDTHS * r.utilization)
    shares = range(used + 1, round(HUNDREDTHS * MOST_UTILIZATION) + 1) if used else range(0)
    slots = range(r.max_loras - 1, 0, -1)
    divided = _divided(base)
    kinds = [
        [each for each in divided if each.gpus <= machine.num_gpus],  # GPUs that are there
        [_utilization(share / HUNDREDTHS) for share in shares],
        [_batched(tokens) for tokens in BATCHED_TOKENS if tokens < r.max_num_batched_tokens],
        [_sequences(count) for count in SEQUENCES if count < r.max_num_seqs],
        [_slots(count) for count in slots],
        [EAGER] if r.cuda_graphs else [],
        [] if r.kv_dtype.startswith("fp8") else [FP8_CACHE],
        [] if r.quantization else [FP8_WEIGHTS],
        [] if r.quantization else [FOUR_BIT],
        [each for each in divided if each.gpus > machine.num_gpus],
    ]
    return [kind for kind in kinds if kind]


def _offloads(base: Plan) -> list[Setting]:
    now = base.resolved.engine_offload_bytes / GiB
    return [_offload(size) for size in OFFLOADED_GIB if size > now]


def _divided(base: Plan) -> list[Setting]:
    r = base.resolved
    rest = r.pipeline_parallel * r.data_parallel
    degrees = [degree for degree in TENSOR_PARALLEL if degree > r.tensor_parallel]
    return [_tensor(degree, degree * rest) for degree in degrees if degree * rest <= MAX_GPUS]


def _together(ask: Ask, kinds: list[list[Setting]], machine: Machine) -> Iterator[Rescue]:
    """Yield combinations of settings that start on the GPUs at hand, few and cheap ones first."""
    furthest = [kind[-1] for kind in kinds if kind[-1].gpus <= machine.num_gpus]
    for count in range(2, MOST_TOGETHER + 1):
        for places in sorted(combinations(range(len(furthest)), count), key=sum):
            group = [furthest[place] for place in places]
            fields = [path for setting in group for path in setting.update]
            joined = _joined(group)
            if len(set(fields)) == len(fields) and (result := ask(joined)) is not None:
                yield _rescue(joined, result)


def _joined(group: list[Setting]) -> Setting:
    update: dict[str, Any] = {}
    for setting in group:
        update |= setting.update
    return Setting(
        " ".join(setting.words for setting in group),
        " ".join(setting.flag for setting in group),
        update,
        "; ".join(setting.price for setting in group),
        max(setting.gpus for setting in group),
    )


def _shorter(ask: Ask, kinds: list[list[Setting]], base: Plan, *, alone: bool) -> Iterator[Rescue]:
    """Yield the longest request that starts as it is, or else with one more setting."""
    asked = base.resolved.seq_tokens

    def shorter(*settings: Setting) -> Rescue | None:
        def verdict(tokens: int) -> str:
            return "no" if ask(_joined([_length(tokens), *settings])) is None else "fits"

        tokens = largest(verdict, limit=asked, accepted=FITS)
        if not LEAST <= tokens < asked:
            return None
        joined = _joined([_length(tokens), *settings])
        result = ask(joined)
        return _rescue(joined, result) if result else None

    first = shorter()
    if first is not None:
        yield first
        return
    found = list(filter(None, (shorter(kind[-1]) for kind in kinds)))
    # beside what holds the asked length, the longest of them is enough
    yield from [max(found, key=lambda each: each.max_model_len)] if alone and found else found


def _length(tokens: int) -> Setting:
    lengths = {"context": tokens, "prompt_length": None, "completion_length": None}
    words = f"--max-model-len {tokens}"
    return Setting(words, words, lengths, "longer requests are refused")


def _utilization(share: float) -> Setting:
    words = f"--gpu-memory-utilization {share:g}"
    return Setting(
        words, words, {"engine.gpu_memory_utilization": share}, "less left for other processes"
    )


def _batched(tokens: int) -> Setting:
    words = f"--max-num-batched-tokens {tokens}"
    price = "prompts are read in smaller steps: later first tokens"
    return Setting(words, words, {"engine.max_num_batched_tokens": tokens}, price)


def _sequences(count: int) -> Setting:
    words = f"--max-num-seqs {count}"
    return Setting(
        words, words, {"engine.max_num_seqs": count}, "no more requests than this at once"
    )


def _slots(count: int) -> Setting:
    words = f"--max-loras {count}"
    return Setting(words, words, {"engine.max_loras": count}, "fewer adapters in one batch")


def _offload(size: int) -> Setting:
    return Setting(
        f"--cpu-offload-gb {size}",
        f"--cpu-offload-gb {size}",
        {"engine.cpu_offload_gib": float(size)},
        "every step waits for weights from host memory: many times slower",
    )


def _tensor(degree: int, gpus: int) -> Setting:
    return Setting(
        f"--tensor-parallel-size {degree}",
        f"--tensor-parallel {degree} --gpus {gpus}",
        {"engine.tensor_parallel": degree},
        f"{gpus} GPUs",
        gpus,
    )


EAGER = Setting(
    "--enforce-eager", "--no-cuda-graphs", {"engine.cuda_graphs": False}, "slower decoding"
)
FP8_CACHE = Setting(
    "--kv-cache-dtype fp8",
    "--kv-dtype fp8",
    {"engine.kv_dtype": "fp8"},
    "slightly different answers",
)
FP8_WEIGHTS = Setting(
    "--quantization fp8", "--quantization fp8", {"quantization": "fp8"}, "a small loss of quality"
)
FOUR_BIT = Setting(
    "--quantization awq",
    "--quantization awq-4bit",
    {"quantization": "awq-4bit"},
    "an AWQ checkpoint: some loss of quality",
)
