"""ModelSpec: what an architecture's config says about memory, exact to the last parameter.

A ModelSpec is plain frozen data. `planner.families` builds it from a Hugging Face config;
every term of the plan reads it. It lists modules as transformers names them, so that
PEFT's target names, bitsandbytes' skip lists and parameter counts all come from one place.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from math import prod

from planner.models.vision_spec import AudioSpec, VisionSpec


class ModuleKind(StrEnum):
    """What sort of module holds the parameters; decides LoRA and quantisation."""

    LINEAR = "linear"
    """nn.Linear: PEFT adapts it and bitsandbytes quantises it."""
    CONV1D = "conv1d"
    """transformers' Conv1D (GPT-2): weight [in, out]; PEFT adapts it."""
    EMBEDDING = "embedding"
    NORM = "norm"
    EXPERTS = "experts"
    """Fused 3-D expert weights [E, out, in] held as bare parameters."""
    CONV = "conv"
    """nn.Conv1d/2d/3d of mamba, linear attention and vision towers."""
    PARAMETER = "parameter"
    """A bare nn.Parameter: A_log, sinks, layer scalars, a mixture's router weight."""
    BUFFER = "buffer"
    """A persistent buffer: in the checkpoint and on the GPU, never trained (router correction bias)."""


LINEARS = (ModuleKind.LINEAR, ModuleKind.CONV1D)
"""Matrices that a token is multiplied with; experts are a kind of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleSpec:
    """One leaf module (or `count` equal ones)."""

    name: str
    """Dotted path inside its layer (or inside the model), for example "self_attn.q_proj"."""
    kind: ModuleKind
    shapes: tuple[tuple[int, ...], ...]
    """Shape of every parameter, weight first: ((out, in), (out,)) for a linear with bias."""
    count: int = 1
    """How many such modules one layer has (a ModuleList of experts, for example)."""

    @property
    def leaf(self) -> str:
        """The name PEFT matches targets against: the last path component."""
        return self.name.rsplit(".", 1)[-1]

    @property
    def parameters(self) -> int:
        """Parameters of all `count` modules."""
        return self.count * sum(prod(shape) for shape in self.shapes)

    @property
    def weight_parameters(self) -> int:
        """Parameters of the weight tensors alone (no bias), all `count` modules."""
        if self.kind is ModuleKind.EXPERTS:
            return self.count * sum(prod(shape) for shape in self.shapes if len(shape) == 3)
        return self.count * prod(self.shapes[0])

    @property
    def out_features(self) -> int:
        """Rows of a linear's weight."""
        return self.shapes[0][1] if self.kind is ModuleKind.CONV1D else self.shapes[0][-2]

    @property
    def in_features(self) -> int:
        """Columns of a linear's weight."""
        return self.shapes[0][0] if self.kind is ModuleKind.CONV1D else self.shapes[0][-1]


class MixerKind(StrEnum):
    """How a layer mixes tokens, which decides its cache and its saved activations."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    MLA = "mla"
    LINEAR = "linear"
    """Gated delta net, KDA, lightning attention: a fixed-size state."""
    MAMBA = "mamba"
    CROSS = "cross"
    """Attends to image states, not to the text: no cache that grows with the text (Llama 3.2 Vision)."""
    NONE = "none"
    """An MLP-only layer (Nemotron-H)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerSpec:
    """The token mixer of one layer: attention of any kind, or a recurrent one. Unused fields are 0."""

    kind: MixerKind
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    """Width of one query/key head (MLA: qk_nope + qk_rope)."""
    v_head_dim: int = 0
    window: int = 0
    """Tokens a sliding or chunked layer sees; 0 = all."""
    qk_norm: bool = False
    softcap: float = 0.0
    bias: bool = False
    gated_output: bool = False
    """The attention output is multiplied by a gate from the query projection (Qwen3-Next)."""
    kv_shared: bool = False
    """Reuses an earlier layer's keys and values (Gemma 3n, Gemma 4): no projections' cache of its own."""
    k_is_v: bool = False
    """Keys double as values: one projection, two cached tensors unless `shares_storage`."""
    shares_storage: bool = False
    """Keys and values are one cached tensor (DeepSeek-V4)."""
    # MLA
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    qk_nope_head_dim: int = 0
    index_heads: int = 0
    index_head_dim: int = 0
    """Sparse indexer of DeepSeek-V3.2: its own key cache, one head of this width."""
    compress_ratio: int = 0
    """Beyond the window, one cached entry (and one indexer key) for every so many tokens (DeepSeek-V4)."""
    # recurrent mixers
    state_shapes: tuple[tuple[int, ...], ...] = ()
    """Shape of every state tensor per sequence: conv state [channels, kernel - 1] first (as vLLM
    keeps it; transformers keeps `kernel` columns), recurrent/ssm state last."""
    state_fp32: bool = False
    """The last state tensor is kept in fp32 whatever the cache dtype."""
    inner_dim: int = 0
    """Width of the mixer's inner projection (mamba intermediate, linear attention value dim)."""
    key_dim: int = 0
    """Linear attention: total key width."""
    conv_kernel: int = 0
    chunk_size: int = 0


class MlpKind(StrEnum):
    """How the channel mixer works."""

    GATED = "gated"
    PLAIN = "plain"
    MOE = "moe"
    NONE = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpSpec:
    """The channel mixer of one layer."""

    kind: MlpKind
    intermediate: int = 0
    """Width of a dense MLP, or of one expert."""
    activation: str = "silu"
    num_experts: int = 0
    top_k: int = 0
    shared_intermediate: int = 0
    """Total width of the always-on shared experts."""
    expert_gated: bool = True
    routing_fp32: bool = False
    """The router's weights stay fp32, and what they multiply becomes fp32 (DeepSeek, GLM-4.5, Mixtral)."""
    router_fp32: bool = False
    """The router multiplies in fp32, of copies of the tokens and its weight (DeepSeek, GLM-4.5, Kimi)."""
    fused_gate_up: bool = False
    """gate and up come from one linear (Phi-3, GLM-4); of a mixture: in its shared expert."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One kind of decoder layer and how many of it there are."""

    count: int
    mixer: MixerSpec
    mlp: MlpSpec
    modules: tuple[ModuleSpec, ...]
    num_norms: int = 2
    """Norms over the full hidden width in the residual path (Gemma-2: 4)."""
    parallel: bool = False
    """Attention and MLP read the same input (Falcon, GPT-J, GPT-NeoX, Phi-2)."""
    scaled: bool = False
    """What a block adds to the stream is multiplied by a vector of its own (InternVL's tower)."""
    side_mixer: MixerSpec | None = None
    """A second mixer beside `mixer` on the same input: Falcon-H1 has attention and Mamba2."""

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        """Every mixer of the layer: all of them keep a cache or a state."""
        return (self.mixer,) if self.side_mixer is None else (self.mixer, self.side_mixer)

    @property
    def parameters(self) -> int:
        """Parameters of one layer of this kind."""
        return sum(module.parameters for module in self.modules)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything a plan needs to know about a model."""

    name: str
    hub_id: str = ""
    model_type: str
    architecture: str = ""
    """The transformers class, for example "LlamaForCausalLM"."""
    hidden: int
    vocab: int
    tied: bool
    """lm_head shares the input embedding."""
    max_position: int
    """max_position_embeddings as the config says; 0 = none."""
    rope_scaled_position: int = 0
    """Positions with the config's rope scaling; 0 = it changes nothing."""
    rope_first_position: int = 0
    """Positions before a long rope's second set of factors (Phi-3); 0 = there is one set."""
    yarn: bool = False
    """The scaling is YaRN's, which vLLM takes as counted into max_position already."""
    layers: tuple[LayerSpec, ...]
    """Distinct layer kinds, each with a count."""
    layer_order: tuple[int, ...]
    """For every decoder layer, in order, its index in `layers`."""
    embeddings: tuple[ModuleSpec, ...]
    """Token, position and per-layer embeddings before the first layer."""
    final: tuple[ModuleSpec, ...]
    """Modules after the last layer but the head: final norm, output projections."""
    head: ModuleSpec | None
    """lm_head as a module of its own; None only if the model has no head. Counted once if tied."""
    towers: tuple[ModuleSpec, ...] = ()
    """Vision/audio towers and projectors, flat."""
    vision: VisionSpec | None = None
    """The tower as images meet it; None: no tower, or one whose images are not planned."""
    audio: AudioSpec | None = None
    """The encoder as sounds meet it; None: none, or one whose sounds are not planned."""
    extra: tuple[ModuleSpec, ...] = ()
    """In the checkpoint but not loaded by AutoModelForCausalLM: MTP blocks."""
    norm: str = "rmsnorm"
    """rmsnorm (computed in fp32), rmsnorm_gemma, layernorm."""
    softcap: float = 0.0
    """Final logit soft-cap; 0 = none."""
    logit_scale: float = 1.0
    checkpoint_dtype: str = "bf16"
    """dtype of the published weights as the config says (a planner.dtypes name)."""
    checkpoint_quantization: str = ""
    """"" or the published quantisation: fp8-block, mxfp4, gptq, awq, bnb-nf4, compressed-int4 ..."""
    quantization_config: dict[str, object] = field(default_factory=dict)
    embedding_scale_copy: bool = False
    """Embeddings are multiplied by a factor, one extra [tokens, hidden] tensor (Gemma, Granite)."""
    norm_first: bool = False
    """A layer norm before the first layer, which answers in fp32 under autocast: the stream stays so
    (the towers of CLIP and Llama 3.2 Vision)."""
    idle_window: int = 0
    """The config's sliding_window where it says that no layer uses it (Qwen2); 0 = none."""
    router_loss: bool = False
    """Its config has a loss that balances its experts, and its forward gives their logits."""
    residual_streams: int = 1
    """Copies of the residual stream between layers (DeepSeek-V4's hyper-connections)."""
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    embedding_dropout: float = 0.0
    source: str = ""
    """Where the config came from: catalogue, file path, hub id and revision."""

    @cached_property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layer_order)

    @property
    def longest(self) -> int:
        """Positions the model was made for, its rope scaling counted in; 0 = no limit is known."""
        return self.rope_scaled_position or self.max_position

    @property
    def multimodal(self) -> bool:
        """True when images or sounds can come in, whether their towers are known or not."""
        return bool(self.towers) or self.architecture.endswith("ForConditionalGeneration")

    @property
    def learned_positions(self) -> bool:
        """True when every position has a row of a table: beyond it there is nothing (GPT-2, OPT)."""
        return any("pos" in module.name or module.leaf == "wpe" for module in self.embeddings)

    @cached_property
    def parameters(self) -> int:
        """Parameters AutoModelForCausalLM (or the VLM's class) holds; a tied head once."""
        return sum(self.parameters_by_module.values())

    @cached_property
    def parameters_by_module(self) -> dict[str, int]:
        """Parameters by module path; layers summed as "layers.*.self_attn.q_proj"."""
        counts: dict[str, int] = {}

        def add(name: str, amount: int) -> None:
            counts[name] = counts.get(name, 0) + amount

        for module in self.embeddings:
            add(module.name, module.parameters)
        for layer in self.layers:
            for module in layer.modules:
                add(f"layers.*.{module.name}", layer.count * module.parameters)
        for module in (*self.final, *self.towers):
            add(module.name, module.parameters)
        if self.head is not None:
            bias_only = sum(prod(shape) for shape in self.head.shapes[1:])
            add(self.head.name, bias_only if self.tied else self.head.parameters)
        return {name: amount for name, amount in counts.items() if amount}

    @cached_property
    def text_parameters(self) -> int:
        """Parameters without towers."""
        return self.parameters - sum(module.parameters for module in self.towers)

    @cached_property
    def active_parameters(self) -> int:
        """Text parameters one token passes through: of routed experts only the top-k."""
        idle = 0
        for layer in self.layers:
            mlp = layer.mlp
            if mlp.kind is MlpKind.MOE and mlp.num_experts:
                routed = sum(m.parameters for m in layer.modules if m.kind is ModuleKind.EXPERTS)
                share = mlp.num_experts - min(mlp.top_k, mlp.num_experts)
                idle += layer.count * routed * share // mlp.num_experts
        return self.text_parameters - idle
