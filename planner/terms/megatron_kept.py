"""What Megatron-Core keeps in torch's pool beside the model: one buffer for good, and what a step leaves.

Read in NVIDIA/Megatron-LM d98e8a64 (megatron-core 0.20) and, where a version is named, at its tag.
"""

from planner.dtypes import element_bytes
from planner.models.spec import LayerSpec, ModelSpec
from planner.run.resolved import Resolved
from planner.terms.activations import op_settings
from planner.terms.term import Term

BUFFER = (
    "megatron-core 0.20 core/utils.py: GlobalMemoryBuffer; core/tensor_parallel/layers.py, "
    "core/transformer/dot_product_attention.py, core/transformer/moe/token_dispatcher.py"
)
NODES = (
    "megatron-core 0.20 core/pipeline_parallel/utils.py: ScheduleNode; "
    "core/transformer/moe/token_dispatcher.py: MoEAlltoAllTokenDispatcher.probs"
)
BATCHES = (
    "Megatron-LM core_v0.18.2 pretrain_gpt.py: get_batch moves the entries of the very dict that "
    "core/rerun_state_machine.py: RerunDataIterator has saved (copied since 0.19, pull request 5635)"
)
ENDS_BYTES, MIDDLE_BYTES = 2 * 8, 8 + 4
"""Of a token: what the first stage gets (tokens and positions), and the last (labels and loss mask)."""


def memory_buffer(model: ModelSpec, r: Resolved) -> Term:
    """Return the buffer that one process reuses for whatever asks for it, as large as the largest.

    All tokens' hidden states, gathered for Megatron-Core's own head under sequence parallelism; one layer's
    scores for baddbmm; and all ranks' hidden states before their experts, where those are gathered. The
    layers' linears are Transformer Engine's, which gather into tensors of their own.
    """
    switches, layout = r.switches, r.layout
    if switches.layers != "megatron":
        return Term("overhead", 0)
    width = element_bytes(r.compute_dtype)
    parts = layout.tensor if layout.sequence else 1
    asked: list[tuple[int, str]] = []
    if layout.sequence and model.head is not None:
        asked.append((r.tokens * model.hidden * width, "hidden states, gathered for the head"))
    if switches.kept_scores_buffer:
        heads = max(layer.mixer.num_heads for layer in model.layers)
        asked.append((heads * r.tokens * r.seq_tokens * width, "scores of one layer"))
    ranks = layout.expert * layout.expert_tensor
    if switches.gathers_to_experts and ranks > 1 and any(map(_routed, model.layers)):
        rows = r.tokens // parts * ranks
        asked.append((rows * model.hidden * width, f"hidden states of {ranks} experts' ranks"))
    if not asked:
        return Term("overhead", 0)
    size, what = max(asked)
    return Term("overhead", size, f"one buffer, kept: {what}: {{0:,}} B", (size,), BUFFER)


def left_by_overlap(model: ModelSpec, r: Resolved) -> Term:
    """Return what overlapped all-to-all leaves until the next forward of a layer.

    Each part of a layer has a graph of its own, which begins with a leaf. The dispatcher keeps the routing
    probabilities, whose graph holds that leaf, the layer's input, and its gradient.
    """
    if not r.switches.overlaps_experts or r.layout.expert == 1:
        return Term("activations", 0)
    count = sum(layer.count for layer in model.layers if _routed(layer))
    one = r.tokens * op_settings(model, r).stream(model.hidden)
    template = "{0} layers' inputs and their gradients, held by routing probabilities: 2 x {1:,} B"
    return Term("activations", 2 * count * one, template, (count, one), NODES)


def kept_batches(r: Resolved) -> Term:
    """Return a step's micro-batches with their masks, which wait on the GPU to be replayed.

    Of a tensor group only the first rank reads batches, of a pipeline only the first and last stage.
    """
    if not r.switches.keeps_batches or not (r.stage.first or r.stage.last):
        return Term("overhead", 0)
    alone = r.stage.stages == 1
    token = ENDS_BYTES + MIDDLE_BYTES if alone else ENDS_BYTES if r.stage.first else MIDDLE_BYTES
    keys = (
        r.seq_tokens * r.layout.context
    )  # the mask's rows are divided over the context, not its columns
    one, count = r.tokens * (keys + token), r.grad_accum
    template = "{0} micro-batches kept for a replay x {1:,} B: {2:,} x {3:,} mask, ids"
    return Term("overhead", count * one, template, (count, one, r.tokens, keys), BATCHES)


def _routed(layer: LayerSpec) -> bool:
    return bool(layer.mlp.num_experts)
