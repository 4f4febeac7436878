"""Mixtures of experts over ordinary attention: Mixtral, Qwen MoE, OLMoE, Granite MoE, gpt-oss, GLM-4.5, MiniMax-M2."""

from collections.abc import Callable
from dataclasses import replace

from planner.families import windows
from planner.families.blocks import buffer, experts, gated_mlp, linear, norm, parameter
from planner.families.decoder import LLAMA, MlpPart, Traits, build_decoder
from planner.families.fields import ConfigFields
from planner.models.spec import MlpKind, MlpSpec, ModelSpec, ModuleSpec

MoeBuilder = Callable[[ConfigFields, int], MlpPart]

_QWEN = Traits(
    qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="head", masks=windows.window_moe
)
TRAITS = {
    "mixtral": Traits(masks=windows.window_everywhere),
    "qwen2_moe": Traits(qkv_bias="qkv_bias", masks=windows.window_qwen2_moe),
    "qwen3_moe": _QWEN,
    "qwen3_vl_moe_text": replace(_QWEN, masks=windows.full_everywhere),
    "olmoe": Traits(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="hidden"),
    "granitemoe": LLAMA,
    "granitemoeshared": LLAMA,
    "gpt_oss": replace(LLAMA, sinks=True, masks=windows.window_even),
    "glm4_moe": Traits(qkv_bias="attention_bias", qk_norm="use_qk_norm"),
    "glm4v_moe_text": Traits(qkv_bias="attention_bias"),
    "minimax_m2": Traits(qk_norm="full"),
    "phimoe": Traits(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        norm="layernorm",
        masks=windows.window_everywhere,
        head_bias="lm_head_bias",
    ),
}


def moe_spec(
    fields: ConfigFields, intermediate: int, num_experts: int, *, shared: int = 0
) -> MlpSpec:
    """Return the spec of `num_experts` gated experts of width `intermediate`."""
    top_k = fields.optional("num_experts_per_tok")
    if top_k is not None and top_k > num_experts:
        raise fields.error("num_experts_per_tok", top_k, f"at most the {num_experts} experts")
    return MlpSpec(
        kind=MlpKind.MOE,
        intermediate=intermediate,
        activation=fields.text("hidden_act"),
        num_experts=num_experts,
        top_k=top_k or 1,
        shared_intermediate=shared,
    )


def fused_experts(name: str, num_experts: int, hidden: int, intermediate: int) -> ModuleSpec:
    """Return gate_up [E, 2I, H] and down [E, H, I] as transformers 5 fuses them."""
    return experts(
        name, (num_experts, 2 * intermediate, hidden), (num_experts, hidden, intermediate)
    )


def routed(
    fields: ConfigFields,
    hidden: int,
    *,
    width: str,
    number: str,
    prefix: str = "mlp",
    router: str = "gate",
) -> MlpPart:
    """Return experts and a bias-free router whose weight is a bare parameter [E, H]."""
    intermediate, num_experts = fields.integer(width), fields.integer(number)
    return moe_spec(fields, intermediate, num_experts), (
        fused_experts(f"{prefix}.experts", num_experts, hidden, intermediate),
        parameter(f"{prefix}.{router}", (num_experts, hidden)),
    )


def deepseek_moe(fields: ConfigFields, hidden: int, *, bias: bool = True) -> MlpPart:
    """Return DeepSeek's experts: routed, always-on shared ones and a router correction bias."""
    intermediate = fields.integer("moe_intermediate_size")
    num_experts = fields.integer("n_routed_experts")
    shared = intermediate * (fields.optional("n_shared_experts", least=0) or 0)
    modules: tuple[ModuleSpec, ...] = (
        fused_experts("mlp.experts", num_experts, hidden, intermediate),
        parameter("mlp.gate", (num_experts, hidden)),
    )
    if bias:
        modules += (buffer("mlp.gate.e_score_correction_bias", (num_experts,)),)
    if shared:
        modules += gated_mlp(
            hidden,
            shared,
            prefix="mlp.shared_experts",
            bias="mlp_bias" in fields.defaults
            and fields.model_type == "deepseek_v2"
            and fields.flag("mlp_bias"),
        )
    spec = moe_spec(fields, intermediate, num_experts, shared=shared)
    return replace(spec, routing_fp32=True, router_fp32=True), modules


def qwen_shared(fields: ConfigFields, hidden: int) -> MlpPart:
    """Return Qwen MoE: routed experts, a shared one and its sigmoid gate."""
    spec, modules = routed(fields, hidden, width="moe_intermediate_size", number="num_experts")
    shared = fields.integer("shared_expert_intermediate_size")
    return replace(spec, shared_intermediate=shared), (
        *modules,
        *gated_mlp(hidden, shared, prefix="mlp.shared_expert"),
        linear("mlp.shared_expert_gate", hidden, 1),
    )


def granite_moe(fields: ConfigFields, hidden: int) -> MlpPart:
    """Return Granite's experts, with the shared MLP where the config has one."""
    spec, modules = routed(
        fields,
        hidden,
        width="intermediate_size",
        number="num_local_experts",
        prefix="block_sparse_moe",
        router="router",
    )
    shared = (
        fields.optional("shared_intermediate_size", least=0) or 0
        if "shared_intermediate_size" in fields.defaults
        else 0
    )
    if shared:
        modules += (
            linear("shared_mlp.input_linear", hidden, 2 * shared),
            linear("shared_mlp.output_linear", shared, hidden),
        )
    return replace(spec, shared_intermediate=shared, fused_gate_up=bool(shared)), modules


def _gpt_oss(fields: ConfigFields, hidden: int) -> MlpPart:
    width, number = fields.integer("intermediate_size"), fields.integer("num_local_experts")
    spec = replace(moe_spec(fields, width, number), activation="clamped_swiglu")
    return spec, (
        experts(
            "mlp.experts",
            (number, hidden, 2 * width),
            (number, 2 * width),
            (number, width, hidden),
            (number, hidden),
        ),
        parameter("mlp.router", (number, hidden), (number,)),
    )


def _minimax(fields: ConfigFields, hidden: int) -> MlpPart:
    spec, modules = routed(fields, hidden, width="intermediate_size", number="num_local_experts")
    correction = buffer("mlp.e_score_correction_bias", (spec.num_experts,))
    return replace(spec, routing_fp32=True), (*modules, correction)


def _mixtral(fields: ConfigFields, hidden: int) -> MlpPart:
    spec, modules = routed(fields, hidden, width="intermediate_size", number="num_local_experts")
    return replace(spec, routing_fp32=True), modules


def _routed_as(width: str, number: str, router: str = "gate") -> MoeBuilder:
    return lambda fields, hidden: routed(fields, hidden, width=width, number=number, router=router)


_MOE: dict[str, MoeBuilder] = {
    "mixtral": _mixtral,
    "qwen2_moe": qwen_shared,
    "qwen3_moe": _routed_as("moe_intermediate_size", "num_experts"),
    "qwen3_vl_moe_text": _routed_as("moe_intermediate_size", "num_experts"),
    "olmoe": _routed_as("intermediate_size", "num_experts"),
    "granitemoe": granite_moe,
    "granitemoeshared": granite_moe,
    "gpt_oss": _gpt_oss,
    "glm4_moe": deepseek_moe,
    "glm4v_moe_text": deepseek_moe,
    "minimax_m2": _minimax,
    "phimoe": _routed_as("intermediate_size", "num_local_experts", "router"),
}


def qwen_sparse(fields: ConfigFields, num_layers: int) -> list[bool]:
    """Return which layers have experts by decoder_sparse_step and mlp_only_layers."""
    step = fields.integer("decoder_sparse_step")
    dense = set(fields.items("mlp_only_layers") or [])
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]


def sparse_layers(fields: ConfigFields, num_layers: int) -> list[bool]:
    """Return which layers have experts, for every family of this file."""
    if "decoder_sparse_step" in fields.defaults:
        return qwen_sparse(fields, num_layers)
    if fields.model_type in ("glm4_moe", "glm4v_moe_text"):
        dense = fields.integer("first_k_dense_replace", least=0)
        return [layer >= dense for layer in range(num_layers)]
    return [True] * num_layers


def mtp_block(
    spec: ModelSpec, modules: tuple[ModuleSpec, ...], *, copies: bool, count: int
) -> tuple[ModuleSpec, ...]:
    """Return DeepSeek's multi-token-prediction layer: in the checkpoint, not loaded.

    It is the last decoder layer (`modules`) with a projection of [2H, H], three norms and,
    where the checkpoint stores them, `copies` of embedding and head.
    """
    if not count:
        return ()
    hidden = spec.hidden
    block: tuple[ModuleSpec, ...] = (
        linear("mtp.eh_proj", 2 * hidden, hidden),
        norm("mtp.enorm", hidden),
        norm("mtp.hnorm", hidden),
        norm("mtp.shared_head.norm", hidden),
        *(replace(module, name=f"mtp.{module.name}") for module in modules),
    )
    if copies:
        block += (
            linear("mtp.shared_head.head", hidden, spec.vocab),
            replace(spec.embeddings[0], name="mtp.embed_tokens"),
        )
    return tuple(replace(module, count=module.count * count) for module in block)


def build(fields: ConfigFields) -> ModelSpec:
    """Return the ModelSpec of a mixture of experts with ordinary attention."""
    hidden = fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers")
    sparse = sparse_layers(fields, num_layers)
    moe = _MOE[fields.model_type](fields, hidden) if any(sparse) else None
    spec = build_decoder(fields, TRAITS[fields.model_type], moe=moe, sparse=sparse)
    if fields.model_type in ("granitemoe", "granitemoeshared"):
        return replace(
            spec,
            logit_scale=fields.number("logits_scaling"),
            embedding_scale_copy=fields.number("embedding_multiplier") != 1.0,
        )
    if fields.model_type == "glm4_moe":
        last = spec.layers[spec.layer_order[-1]].modules
        count = fields.integer("num_nextn_predict_layers", 0, least=0)
        return replace(spec, extra=mtp_block(spec, last, copies=True, count=count))
    return spec
