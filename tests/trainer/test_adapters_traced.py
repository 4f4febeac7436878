"""The plan of every kind of adapter is its trace: the step as the trainer runs it, on fake tensors."""

import pytest
import torch

from planner.families import model_spec_from_config
from planner.machines.machine import Machine
from planner.models.lora_targets import lora_counts
from planner.plan import plan
from planner.run.runfile import make_recipe
from profiler.compare import compare
from profiler.trace import trace
from trainer.adapters import start_pissa
from trainer.dry_run import subject_for

CONFIG = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
KINDS = {
    "dora": ({"dora": True}, False),
    "bias": ({"bias": "all", "targets": "attention"}, False),
    "embedding and head": ({"modules_to_save": ["embed_tokens", "lm_head"]}, False),
    "tied embedding": ({"modules_to_save": ["embed_tokens"]}, True),
    "norms and a linear": ({"targets": "mlp", "modules_to_save": ["norm", "q_proj"]}, False),
}
SMALL = 512
"""What the trace rounds a tensor up to, as torch's allocator does."""


FAST = [("dora", "full"), ("embedding and head", "full")]
CASES = [
    pytest.param(kind, mode, marks=() if (kind, mode) in FAST else pytest.mark.slow)
    for kind in KINDS
    for mode in ("full", "none")
]


@pytest.mark.parametrize(("kind", "checkpointing"), CASES)
def test_plan_and_trace_agree(kind, checkpointing):
    lora, tied = KINDS[kind]
    config = CONFIG | {"tie_word_embeddings": tied}
    model = model_spec_from_config(config, name="tiny", source="test")
    recipe = make_recipe(
        method="lora", dtype="bf16", lora={"rank": 16} | lora, micro_batch_size=2, context=256,
        checkpointing=checkpointing,
    )  # fmt: skip
    planned = plan(model, recipe, Machine(vram_bytes=2**40))
    found = compare(planned, trace(subject_for(planned.resolved, recipe, config, steps=2)))
    totals = {cell.phase: cell.error for cell in found.totals}
    for phase in ("load", "forward", "backward"):
        assert abs(totals[phase]) < 0.01, (phase, totals)
    tensors = 200
    for cell in found.cells:
        standing = ("adapters", "gradients") if cell.phase == "step" else ("adapters",)
        if cell.term in standing or (cell.term, cell.phase) == ("optimizer", "forward"):
            off = abs((cell.planned_bytes or 0) - (cell.measured_bytes or 0))
            assert off <= max(0.01 * cell.measured_bytes, tensors * SMALL), cell
        if (cell.term, cell.phase) in (("activations", "forward"), ("activations", "backward")):
            assert cell.planned_bytes == pytest.approx(cell.measured_bytes, rel=0.02), cell


# a whole decomposition is planned with the solver's own copies, which no dispatcher sees
@pytest.mark.parametrize(("init", "slack"), [("pissa", 0.4), ("pissa_niter_2", 0.02)])
def test_pissas_start_needs_what_is_planned(init, slack):
    """Counted on real tensors: every storage that is alive while one weight is decomposed."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 64,
             "num_attention_heads": 4, "num_key_value_heads": 4}  # fmt: skip
    wrapped = get_peft_model(
        LlamaForCausalLM(LlamaConfig(**shape)).bfloat16(),
        LoraConfig(r=8, target_modules=["up_proj"]),
        autocast_adapter_dtype=False,
    )
    most = peak_bytes(lambda: start_pissa(wrapped, init))
    model = model_spec_from_config({"model_type": "llama", **shape}, name="tiny", source="test")
    (module,) = lora_counts(model, ["up_proj"], rank=8).adapted
    recipe = make_recipe(lora={"rank": 8, "targets": ["up_proj"], "init": init})
    (term,) = [
        term
        for term in plan(model, recipe, Machine(vram_bytes=2**40)).phase("load").terms
        if term.name == "overhead"
    ]
    assert module.in_features * module.out_features * 4 * 2 < most
    assert most <= term.bytes
    assert most == pytest.approx(term.bytes, rel=slack)


def peak_bytes(work) -> int:
    """Return the largest sum of storages that the operations of `work` made and that were alive at once."""
    import gc
    import weakref

    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    class Counting(TorchDispatchMode):
        alive: dict[int, int] = {}
        peak = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            before = {
                t.untyped_storage()._cdata for t in tree_iter(args) if isinstance(t, torch.Tensor)
            }
            out = func(*args, **(kwargs or {}))
            for made in tree_iter(out):
                if not isinstance(made, torch.Tensor):
                    continue
                storage = made.untyped_storage()
                if storage._cdata not in before and storage._cdata not in self.alive:
                    self.alive[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, storage._cdata, None)
            self.peak = max(self.peak, sum(self.alive.values()))
            return out

    gc.collect()
    mode = Counting()
    mode.alive = {}
    with mode:
        work()
    return mode.peak
