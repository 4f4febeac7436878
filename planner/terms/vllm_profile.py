"""vLLM's start-up profile: what the largest step allocates beside the weights.

The profile runs one batch of max_num_batched_tokens through the layers, then the sampler on
max_num_seqs rows. The layer's buffers are those of vllm/model_executor/models/llama.py and its
relatives; the sampler's those of v1/sample and model_executor/layers/sampler.py, and what CUDA's
sort takes beside its results (ATen/native/cuda/SortStable.cu, ATen/cuda/cub.cuh). Checked: 38 B a
logit is the slope of the table in unsloth_zoo/vllm_utils.py (1.45 to 11.11 GiB, 256 to 2,048 sequences).
"""

from typing import NamedTuple

from planner.dtypes import element_bytes
from planner.models.rank_part import INPUT_SPLIT
from planner.models.spec import LINEARS, LayerSpec, MlpKind, ModelSpec, ModuleKind
from planner.run.resolved import Resolved
from planner.terms.term import Term

SORT_SEGMENTS = 128
"""Rows from which CUDA sorts every row by itself; below, all rows are sorted at once (SortStable.cu)."""
SELECT_ROWS = 8
"""Rows from which top-k and top-p are selected in place by a Triton kernel."""
LATENT_CONTEXT_REQUESTS = 8
"""MLA's chunked context holds this many requests of the full length, if that is less."""


class Profile(NamedTuple):
    """Bytes of the largest step on one rank."""

    layers: int
    """While the largest layer runs."""
    sampler: int
    """While the sampler runs."""
    step_tokens: int
    step_width: float
    """Bytes a token of the largest layer."""
    logits: int
    """Sampled rows x vocabulary."""
    logit_width: float

    @property
    def peak(self) -> int:
        """Activations at the largest moment."""
        return max(self.layers, self.sampler)


def profile(model: ModelSpec, r: Resolved) -> Profile:
    """Return what the profile run allocates beside the weights."""
    law, width = r.framework.engine, element_bytes(r.dtype)
    tokens, rows = r.max_num_batched_tokens, min(r.max_num_seqs, r.max_num_batched_tokens)
    each = widest_layer(model, r) * width
    scratch = max((_latent_context(layer, r) for layer in model.layers), default=0)
    layers = max(tokens * each, scratch * width)
    layers += dequantised_bytes(model, r)
    logit = sum(size for _, size in sampler_buffers(r, rows, model.vocab))
    hidden = tokens * model.hidden if law.keeps_hidden else 0
    sampler = rows * model.vocab * logit + (hidden + rows * model.hidden) * width
    return Profile(int(layers), int(sampler), tokens, each, rows * model.vocab, logit)


def profile_term(found: Profile) -> Term:
    """Return the largest step as a term."""
    if found.layers >= found.sampler:
        template, args = (
            "largest step: {0:,} tokens x {1:,.10g} B of one layer",
            (found.step_tokens, found.step_width),
        )
    else:
        template, args = (
            "largest step: the sampler, {0:,} logits x {1:g} B and hidden states",
            (found.logits, found.logit_width),
        )
    return Term(
        "engine", found.peak, template, args, "vLLM start-up profile: planner/terms/vllm_profile.py"
    )


def sampler_buffers(r: Resolved, rows: int, vocab: int) -> tuple[tuple[str, int], ...]:
    """Return the sampler's buffers of [rows, vocabulary] alive at its largest moment: name, bytes."""
    law, width = r.framework.engine, element_bytes(r.dtype)
    logits: tuple[tuple[str, int], ...] = (("logits", width),)
    if law.sampler == "none":
        return logits
    if width < 4:
        logits = (*logits, ("fp32 logits", 4))
    if law.sampler == "select" and rows >= SELECT_ROWS:
        return (*logits, ("probabilities", 4), ("exponential noise", 4))
    results = (("sorted logits", 4), ("sorted indices", 8))
    if 1 < rows < SORT_SEGMENTS:
        return (
            *logits,
            *results,
            ("pairs of row and column", 8),
            ("sorted pairs", 8),
            ("sorted keys", 4),
            ("radix sort's other keys", 4),
            ("radix sort's other pairs", 8),
        )
    return (
        *logits,
        *results,
        ("unsorted indices", 8),
        ("radix sort's other keys", 4),
        ("radix sort's other indices", 8),
    )


_STORE: dict[tuple[int, object], tuple[ModelSpec, float]] = {}


def widest_layer(model: ModelSpec, r: Resolved) -> float:
    """Return elements a token alive at the largest layer's largest moment."""
    key = (
        *(r.dtype, r.quantization, r.framework.name, r.max_num_batched_tokens),
        *(r.tensor_parallel, r.data_parallel, r.expert_parallel),
    )
    stored = _STORE.get((id(model), key))
    if stored is None:
        widest = max((layer_width(model, layer, r) for layer in model.layers), default=0.0)
        stored = _STORE[id(model), key] = (model, widest)
    return stored[1]


def layer_width(model: ModelSpec, layer: LayerSpec, r: Resolved) -> float:
    """Return elements a token alive at one layer's largest moment."""
    law, hidden, ranks = r.framework.engine, model.hidden, r.tensor_parallel
    into, out = _mixer_widths(layer)
    # run line by line, the norm's output stays bound in the caller beside the residual; compiled,
    # the attention's output and the residual before and after it
    around = out / ranks + 2 * hidden if law.compiled else 3 * hidden
    mixing = 3 * hidden + (into + out) / ranks
    return max(mixing, around + _mlp_width(model, layer, r))


def _mixer_widths(layer: LayerSpec) -> tuple[int, int]:
    """Return what a mixer's linears put out before it mixes, and what it mixes into."""
    into = out = 0
    for module in layer.modules:
        path, _, _ = module.name.rpartition(".")
        if module.kind not in LINEARS or "mlp" in path or "feed_forward" in path:
            continue
        if module.leaf in INPUT_SPLIT and "fc" not in module.leaf:
            out = max(out, module.in_features)
        elif not module.leaf.startswith("fc"):
            into += module.out_features
    return into, out


def _mlp_width(model: ModelSpec, layer: LayerSpec, r: Resolved) -> float:
    """Return elements a token of the channel mixer's buffers."""
    mlp, ranks, law = layer.mlp, r.tensor_parallel, r.framework.engine
    if mlp.kind is MlpKind.NONE:
        return 0
    # gate and up in one buffer and their product, or one buffer and its activation
    dense = 3 if mlp.kind is MlpKind.GATED or mlp.kind is MlpKind.MOE else 2
    if mlp.kind is not MlpKind.MOE:
        copied = 1 if r.quantization in ("nf4", "fp4") and r.dtype == "fp16" else 0
        # bitsandbytes' method computes in bf16 and copies the result to fp16
        return (dense + copied) * mlp.intermediate / ranks
    # data parallel ranks bring their tokens together for the experts, and give the sums back
    together = r.data_parallel
    inner = mlp.intermediate if r.expert_parallel else mlp.intermediate / (ranks * together)
    first, third = 2 * inner, model.hidden
    buffers = max(first, third) if law.shares_expert_buffers else first + third
    share = 1.0
    if law.expert_chunk_tokens:
        share = min(1.0, law.expert_chunk_tokens / (r.max_num_batched_tokens * together))
    routed = together * mlp.top_k * (buffers + inner) * share
    if together > 1:  # gathered, and their sums before they are scattered
        routed += 2 * together * model.hidden
    shared = dense * mlp.shared_intermediate / ranks
    # the experts' sum; the shared expert ran before them and left its output
    return model.hidden + max(routed + (model.hidden if shared else 0), shared)


def _latent_context(layer: LayerSpec, r: Resolved) -> float:
    """Return elements of MLA's up-projected context, which the profile makes once."""
    mixer, law = layer.mixer, r.framework.engine
    if not mixer.kv_lora_rank or not law.latent_context_tokens:
        return 0
    tokens = min(law.latent_context_tokens, LATENT_CONTEXT_REQUESTS * r.seq_tokens)
    heads = mixer.num_heads / r.tensor_parallel
    return tokens * heads * (mixer.qk_nope_head_dim + mixer.v_head_dim)


def dequantised_bytes(model: ModelSpec, r: Resolved) -> int:
    """Return the 16-bit copy of one weight that bitsandbytes' matmul makes for a long batch."""
    if r.quantization not in ("nf4", "fp4"):
        return 0
    largest = max(
        (
            module.weight_parameters // module.count
            for layer in model.layers
            for module in layer.modules
            if module.kind is ModuleKind.LINEAR
        ),
        default=0,
    )
    return 2 * largest // r.tensor_parallel
