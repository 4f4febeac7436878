"""What torch.compile saves of a decoder layer and of a loss, beside what the planner's tape says: no GPU.

torch's own partitioner cuts the joint graph (AOT autograd, inductor's decompositions, fake tensors); its
saved set is printed by operation, shape and dtype, weights apart, and held against
planner/layer/compiled.py. `python benchmarks/laws/compiled_layers.py [CASE ...]`; all take some minutes.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from planner.families import model_spec_from_config
from planner.layer.blocks import run_layer
from planner.layer.compiled import CompiledTape
from planner.layer.program import OpSettings, Program
from planner.models.spec import ModelSpec

BATCH, LENGTH, VOCAB = 2, 192, 1000
TOKENS = BATCH * LENGTH
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VIEWS = frozenset({"view", "reshape", "transpose", "permute", "t", "unsqueeze", "squeeze", "expand",
                   "detach", "alias", "slice", "select", "_unsafe_view", "split"})  # fmt: skip
ALL = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})


@dataclass(frozen=True)
class Saved:
    """One tensor that the backward is given."""

    operation: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


def partitioned(run: Callable[[Any], None]) -> list[list[Saved]]:
    """Return the saved set of every graph that `run(backend)` compiles."""
    found: list[list[Saved]] = []

    def partition(joint: Any, inputs: Any, **options: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
        found.append(list(_saved(forward, options["num_fwd_outputs"])))
        return forward, backward

    def as_it_is(graph: Any, inputs: Any) -> Any:
        from functorch.compile import make_boxed_func

        return make_boxed_func(graph)

    torch._dynamo.reset()
    run(
        aot_autograd(
            fw_compiler=as_it_is,
            bw_compiler=as_it_is,
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )
    )
    return found


def _saved(forward: Any, outputs: int) -> Iterable[Saved]:
    """Yield the tensors of as many elements as a multiple of the tokens; a view is what it views."""
    seen = set()
    (end,) = (node for node in forward.graph.nodes if node.op == "output")
    for node in end.args[0][outputs:]:
        root = _root(node)
        value = root.meta.get("val") if root is not None else None
        if root in seen or not isinstance(value, torch.Tensor):
            continue
        seen.add(root)
        shape = tuple(int(n) for n in value.shape)
        scaled = shape[:1] == (TOKENS,) or shape[:2] == (BATCH, LENGTH) or shape[:1] == (BATCH,)
        if not scaled:
            continue
        name = "input" if root.op == "placeholder" else str(root.target)
        yield Saved(name, str(value.dtype)[6:], shape, value.numel() * value.dtype.itemsize)


def _root(node: Any) -> Any:
    if not hasattr(node, "meta"):
        return None
    while node.op == "call_function" and _name(node) in VIEWS and hasattr(node.args[0], "meta"):
        node = node.args[0]
    return node


def _name(node: Any) -> str:
    return str(getattr(node.target, "__name__", node.target)).split(".")[0]


@dataclass(frozen=True)
class Case:
    """One layer: how it is built, and how the planner is told of it."""

    kind: str
    settings: dict[str, Any]
    autocast: bool = False
    adapted: frozenset[str] = frozenset()
    adapter_dtype: torch.dtype = torch.bfloat16
    again: str = ""


CASES = {
    "llama": Case("llama", {"full": True}),
    "qwen3": Case("qwen3", {"full": True}),
    "gemma2": Case("gemma2", {"full": True}),
    "gemma3": Case("gemma3_text", {"full": True}),
    "phi3": Case("phi3", {"full": True}),
    "llama-autocast": Case(
        "llama", {"full": True, "residual": 4, "weight": 4, "grad": 4, "autocast": True}, True
    ),
    "llama-lora": Case("llama", {"adapted": ALL, "rank": 16, "adapter": 2}, adapted=ALL),
    "llama-lora-qv": Case(
        "llama",
        {"adapted": frozenset({"q_proj", "v_proj"}), "rank": 16, "adapter": 2},
        adapted=frozenset({"q_proj", "v_proj"}),
    ),
    "llama-lora-autocast": Case(
        "llama",
        {"adapted": ALL, "rank": 16, "adapter": 4, "residual": 4, "autocast": True},
        True,
        ALL,
        torch.float32,
    ),
    "llama-selective": Case("llama", {"full": True, "again": "ops"}, again="ops"),
}


def layer_saved(case: Case) -> list[Saved]:
    """Return what the partitioner saves of one layer of transformers' own code."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(case.kind, **SIZES)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    layer = model.model.layers[0]
    wide = case.autocast and not case.adapted
    layer.to(torch.float32 if wide else torch.bfloat16)
    if case.adapted:
        layer = _adapted(model, case)
    dtype = torch.float32 if case.autocast else torch.bfloat16
    x = torch.randn(BATCH, LENGTH, SIZES["hidden_size"], dtype=dtype, requires_grad=True)
    rotary = (torch.randn(1, LENGTH, SIZES["head_dim"], dtype=dtype),) * 2

    def run(backend: Any) -> None:
        def forward(hidden: torch.Tensor) -> Any:
            return layer(hidden, position_embeddings=rotary, attention_mask=None)

        body = _selective(forward) if case.again else forward
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.autocast):
            torch.compile(body, backend=backend, fullgraph=True)(x)

    (saved,) = partitioned(run)
    return saved


def _adapted(model: Any, case: Case) -> Any:
    from peft import LoraConfig, get_peft_model

    peft = get_peft_model(
        model.to(torch.bfloat16),
        LoraConfig(r=16, target_modules=sorted(case.adapted)),
        autocast_adapter_dtype=case.adapter_dtype is torch.float32,
    )
    return peft.base_model.model.model.layers[0]


def _selective(forward: Callable[..., Any]) -> Callable[..., Any]:
    from torch.utils.checkpoint import checkpoint

    from profiler.subjects.selective import contexts

    def run(x: torch.Tensor) -> Any:
        return checkpoint(forward, x, use_reentrant=False, context_fn=contexts)

    return run


def planned(case: Case) -> float:
    """Return the bytes per token that the planner's tape saves of the layer."""
    spec = layer_spec(case.kind)
    settings = OpSettings(norm=spec.norm, compiled="layer", **case.settings)
    tape = CompiledTape(again=settings.again)
    x = tape.value(spec.hidden * settings.residual)
    out = run_layer(Program(tape, settings), x, spec.layers[0], spec.hidden)
    tape.drop(x, out)
    return tape.live


def layer_spec(kind: str) -> ModelSpec:
    """Return the planner's view of the small model."""
    config = {
        **SIZES,
        "model_type": kind,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
    }
    return model_spec_from_config(config, name=kind, source="compiled_layers")


def loss_saved() -> list[Saved]:
    """Return what is saved of a head and a cross-entropy on upcast logits, compiled together."""
    hidden = torch.randn(TOKENS, SIZES["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(VOCAB, SIZES["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, VOCAB, (TOKENS,))

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(x, w)
        return torch.nn.functional.cross_entropy(logits.float(), labels)

    (saved,) = partitioned(lambda backend: torch.compile(loss, backend=backend)(hidden, head))
    return saved


def main(names: list[str]) -> None:
    """Print every case."""
    for name in names or [*CASES, "loss"]:
        saved = loss_saved() if name == "loss" else layer_saved(CASES[name])
        print(f"== {name}")
        for each in saved:
            print(
                f"   {each.bytes / TOKENS:8.0f} B/token  {each.operation:34s} {each.dtype} {each.shape}"
            )
        total = sum(each.bytes for each in saved) / TOKENS
        beside = "" if name == "loss" else f", the planner's tape {planned(CASES[name]):.0f}"
        print(f"   {total:8.0f} B/token together{beside}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
