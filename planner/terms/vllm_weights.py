"""What vLLM loads on one rank: every module as its own layers shard, absorb and pad it.

Read in vllm/model_executor (layers/linear.py, vocab_parallel_embedding.py, fused_moe/layer.py,
rotary_embedding.py, attention/mla, lora/layers) of 0.7.3, 0.10.2 and 0.32:
linears are split over their outputs (q, k, v, gate, up) or inputs (o, down); key and value heads
are copied when there are more ranks than heads; latent down-projections, routers and norms are
whole on every rank; vocabularies are padded to a multiple of 64.
"""

from math import prod
from typing import NamedTuple

from planner.dtypes import GGUF_BYTES, element_bytes
from planner.models.rank_part import FUSED_QKV, INPUT_SPLIT, WHOLE
from planner.models.spec import LINEARS, LayerSpec, MixerSpec, ModelSpec, ModuleKind, ModuleSpec
from planner.quant.schemes import Scheme, quantized_bytes
from planner.quant.table import Table, scheme_table, weight_bytes
from planner.run.resolved import Resolved
from planner.terms.term import Term

VOCAB_PADDING = 64
"""DEFAULT_VOCAB_PADDING_SIZE."""
SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The adapter ranks vLLM allocates for."""
ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
EMBEDDED_ADAPTERS = frozenset(
    "llama mistral mixtral granite granitemoe granitemoeshared cohere exaone gpt_bigcode bamba jamba "  # noqa: SIM905
    "minicpm nemotron phimoe solar".split()
)
"""Model types whose vLLM class takes adapters on embeddings (embedding_modules, 0.8.5)."""
IMAGE_POSITIONS = frozenset(
    "qwen2_vl qwen2_5_vl qwen2_5_omni qwen3_vl qwen3_vl_moe glm4v glm4v_moe".split()  # noqa: SIM905
)
"""Model types whose rotary table is four times as long (MRotaryEmbedding: video positions)."""


class VllmWeights(NamedTuple):
    """Bytes on one rank."""

    modules: int
    """Layers, embeddings, head and towers."""
    latent: int
    """What MLA keeps beside kv_b_proj for its absorbed decode."""
    rotary: int
    """The cosine and sine table."""
    adapters: int
    """Adapter slots."""

    @property
    def total(self) -> int:
        """All of it: `Loading model weights took ...`."""
        return sum(self)


_STORE: dict[tuple[int, object], tuple[ModelSpec, VllmWeights]] = {}


def vllm_weights(model: ModelSpec, r: Resolved) -> VllmWeights:
    """Return what one rank holds after loading."""
    key = (
        *(r.dtype, r.quantization, r.double_quant, r.framework.name),
        *(r.tensor_parallel, r.pipeline_parallel, r.data_parallel, r.expert_parallel),
        *(r.max_loras, r.max_lora_rank),
    )
    stored = _STORE.get((id(model), key))
    if stored is None:
        stored = _STORE[id(model), key] = (model, _loaded(model, r))
    return stored[1]


def _loaded(model: ModelSpec, r: Resolved) -> VllmWeights:
    ranks = r.tensor_parallel
    if r.quantization in GGUF_BYTES:
        modules = int(model.parameters * GGUF_BYTES[r.quantization]) // (
            ranks * r.pipeline_parallel
        )
        return VllmWeights(modules, 0, _rotary(model), adapter_slot_bytes(model, r))
    table = scheme_table(model, r.quantization, double_quant=r.double_quant)
    layers = sum(
        count * _module(model, layer, module, scheme, r)
        for index, layer in enumerate(model.layers)
        for module in layer.modules
        for scheme, count in table.of_kind(index, module)
    )
    latent = sum(
        layer.count * _latent(model, index, table, r) for index, layer in enumerate(model.layers)
    )
    width = element_bytes(r.dtype)
    ends = sum(_vocabulary(module, r) for module in model.embeddings)
    if model.head is not None and not model.tied:
        ends += _head(model.head, table.outside.get(model.head.name), r)
    ends += width * sum(module.parameters for module in model.final)
    towers = sum(
        part.count * _tower(model, part.module, part.scheme, r)
        for part in table.parts
        if part.layer is None and any(part.module is module for module in model.towers)
    )
    # a stage has its share of the layers; embeddings and head are on the first and last
    stages = r.pipeline_parallel
    modules = -(-layers // stages) + -(-ends // min(stages, 2)) + -(-towers // ranks)
    return VllmWeights(
        modules, -(-latent // stages), _rotary(model), adapter_slot_bytes(model, r) // stages
    )


def expert_bytes(model: ModelSpec, r: Resolved) -> int:
    """Return what one rank holds of routed experts, of all its layers; part of `vllm_weights`' modules."""
    if r.quantization in GGUF_BYTES:
        routed = sum(
            layer.count * module.parameters
            for layer in model.layers
            for module in layer.modules
            if module.kind is ModuleKind.EXPERTS
        )
        return int(routed * GGUF_BYTES[r.quantization]) // (r.tensor_parallel * r.pipeline_parallel)
    table = scheme_table(model, r.quantization, double_quant=r.double_quant)
    held = sum(
        count * _module(model, layer, module, scheme, r)
        for index, layer in enumerate(model.layers)
        for module in layer.modules
        if module.kind is ModuleKind.EXPERTS
        for scheme, count in table.of_kind(index, module)
    )
    return -(-held // r.pipeline_parallel)


def vllm_weights_term(model: ModelSpec, r: Resolved) -> Term:
    """Return the weights of one rank as a term."""
    parts = vllm_weights(model, r)
    return Term(
        "weights",
        parts.total,
        "one of {0} tensor x {1} pipeline x {2} data ranks: modules {3:,} B + absorbed latent matrices "
        "{4:,} B + rotary table {5:,} B + adapter slots {6:,} B",
        (r.tensor_parallel, r.pipeline_parallel, r.data_parallel, *parts),
        "vLLM's parallel layers, module by module: planner/terms/vllm_weights.py",
    )


def _tower(model: ModelSpec, module: ModuleSpec, scheme: Scheme | None, r: Resolved) -> int:
    """Return one module of a tower: as the checkpoint has it, or quantised while loading."""
    if r.quantization == "fp8" and not model.checkpoint_quantization and module.kind in LINEARS:
        return module.parameters // module.count
    return weight_bytes(module, scheme, element_bytes(r.dtype))


def _head(head: ModuleSpec, scheme: Scheme | None, r: Resolved) -> int:
    """Return an untied head's part of a rank."""
    if scheme is None:
        return _vocabulary(head, r)
    return -(-weight_bytes(head, scheme, element_bytes(r.dtype)) // r.tensor_parallel)


def _vocabulary(module: ModuleSpec, r: Resolved) -> int:
    """Return an embedding's or head's part: rows padded, then divided among the ranks."""
    rows, width = module.shapes[0][0], element_bytes(r.dtype)
    rest = sum(prod(shape) for shape in module.shapes[1:])
    if "pos" in module.name or module.leaf == "wpe" or len(module.shapes[0]) < 2:
        return width * module.parameters  # positions are looked up whole
    if r.max_loras:
        rows += r.framework.engine.lora_extra_vocab
    padded = -(-rows // VOCAB_PADDING) * VOCAB_PADDING
    shard = -(-padded // r.tensor_parallel)
    return width * module.count * (shard * prod(module.shapes[0][1:]) + rest)


def _module(
    model: ModelSpec, layer: LayerSpec, module: ModuleSpec, scheme: Scheme | None, r: Resolved
) -> int:
    """Return one module's bytes on a rank."""
    width, ranks = element_bytes(r.dtype), r.tensor_parallel
    if module.kind is ModuleKind.NORM:
        return width * module.parameters
    if module.kind is ModuleKind.BUFFER:
        return 4 * module.parameters  # the router's correction is fp32
    if module.leaf in ROUTERS:
        scheme = None  # routers are built without the quantisation
    if module.kind is ModuleKind.EXPERTS and scheme is not None and scheme.name == "mxfp4":
        return module.count * _padded_experts(model, layer, module, r)
    whole = module.count * weight_bytes(module, scheme, width)
    if module.kind is ModuleKind.EXPERTS:  # by width or whole, over data parallel ranks too
        return whole // (ranks * r.data_parallel)
    if module.leaf in WHOLE or (module.kind is ModuleKind.PARAMETER and "gate" in module.name):
        return whole
    if module.kind not in LINEARS:
        return -(-width * module.parameters // ranks)
    kept, of = _share(layer.mixer, module, ranks)
    bias = width * module.count * sum(prod(shape) for shape in module.shapes[1:])
    weight = (whole - bias) * kept // of
    return weight + (bias if module.leaf in INPUT_SPLIT else bias * kept // of)


def _padded_experts(model: ModelSpec, layer: LayerSpec, module: ModuleSpec, r: Resolved) -> int:
    """Return a rank's MXFP4 experts: both widths are rounded up to what the kernel's tiles need."""
    wide, deep = r.framework.engine.mxfp4_padding
    experts, inner = layer.mlp.num_experts, layer.mlp.intermediate
    ranks = r.tensor_parallel * r.data_parallel
    if r.expert_parallel:
        experts = -(-experts // ranks)
    else:
        inner = -(-inner // ranks)
    hidden, inner = -(-model.hidden // wide) * wide, -(-inner // deep) * deep
    weights = quantized_bytes(
        3 * experts * hidden * inner, "mxfp4", double_quant=False, columns=hidden
    )
    biases = 2 * experts * (2 * inner + hidden) if len(module.shapes) > 2 else 0
    return weights + biases


def _share(mixer: MixerSpec, module: ModuleSpec, ranks: int) -> tuple[int, int]:
    """Return the part of a linear that a rank keeps: a fraction."""
    heads, groups = mixer.num_heads, mixer.num_kv_heads or mixer.num_heads
    if mixer.kv_lora_rank or not heads:
        return 1, ranks
    kept_groups = -(-groups // ranks)
    if module.leaf in ("k_proj", "v_proj"):
        return kept_groups, groups
    if module.leaf in FUSED_QKV:
        return heads // ranks + 2 * kept_groups, heads + 2 * groups
    return 1, ranks


def _latent(model: ModelSpec, index: int, table: Table, r: Resolved) -> int:
    """Return the matrices MLA absorbs, beside the kv_b_proj it keeps for prefill."""
    layer, law = model.layers[index], r.framework.engine
    mixer = layer.mixer
    if not mixer.kv_lora_rank:
        return 0
    width = element_bytes(r.dtype)
    heads, rank = mixer.num_heads // r.tensor_parallel, mixer.kv_lora_rank
    up = next(module for module in layer.modules if module.leaf == "kv_b_proj")
    scheme = next(scheme for scheme, _ in table.of_kind(index, up))
    # W_UK and W_UV, taken out of a dequantised kv_b_proj; else they are views of it
    copies = width * heads * rank * (mixer.qk_nope_head_dim + mixer.v_head_dim) if scheme else 0
    if law.absorbs == "views":
        return copies
    queries = mixer.q_lora_rank or model.hidden
    element = 1 if scheme and scheme.name.startswith("fp8") else width
    products = element * heads * rank * (queries + model.hidden)
    return copies + products + width * heads * queries * mixer.qk_rope_head_dim


def _rotary(model: ModelSpec) -> int:
    """Return the table all layers share: 16-bit, positions x rotated width; 4 x for image positions."""
    mixers = [model.layers[index].mixer for index in model.layer_order]
    turned = [m.qk_rope_head_dim or m.head_dim for m in mixers if m.num_kv_heads or m.kv_lora_rank]
    positions = model.max_position * (4 if model.model_type in IMAGE_POSITIONS else 1)
    return 2 * positions * turned[-1] if turned else 0


def slot_rank(rank: int) -> int:
    """Return the next rank vLLM has kernels for."""
    return next((size for size in SLOT_RANKS if size >= rank), rank)


def adapter_slot_bytes(model: ModelSpec, r: Resolved) -> int:
    """Return the preallocated adapter slots of one rank, 16-bit, for every linear of the layers.

    A is whole and B divided where outputs are split; A divided and B whole where inputs are; both
    are whole at the vocabulary. Every slice of a fused linear has its own A.
    """
    rank, slots = slot_rank(r.max_lora_rank), r.max_loras
    if not slots:
        return 0
    width = 0
    for layer in model.layers:
        for module in layer.modules:
            if module.kind in LINEARS and module.leaf not in ("gate", "router"):
                width += layer.count * module.count * _slot_width(layer.mixer, module, r)
    extra = r.framework.engine.lora_extra_vocab
    rows = model.vocab + extra
    # the head's A, B and new rows
    width += model.hidden + rows
    plain = extra * model.hidden
    if model.model_type in EMBEDDED_ADAPTERS:
        # a tied head is the same module under a second name, and gets a slot of its own
        copies = 2 if model.tied else 1
        width += copies * (rows + model.hidden)
        plain += copies * extra * model.hidden
    return 2 * slots * (rank * width + plain)


def _slot_width(mixer: MixerSpec, module: ModuleSpec, r: Resolved) -> int:
    ranks, inputs, outputs = r.tensor_parallel, module.in_features, module.out_features
    if module.leaf in WHOLE:
        return inputs + outputs
    if module.leaf in INPUT_SPLIT:
        return inputs // ranks + outputs
    kept, of = _share(mixer, module, ranks)
    slices = 3 if module.leaf in FUSED_QKV else 2 if "gate_up" in module.leaf else 1
    return slices * inputs + outputs * kept // of
