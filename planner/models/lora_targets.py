"""Which modules PEFT adapts for given targets, and how many parameters each adapter has.

Follows PEFT 0.20/0.21 on transformers 5: `all-linear` is every nn.Linear and Conv1D but the
head, towers included. In the mixtures of experts listed below PEFT translates the old per-expert
names (and so `all-linear`) into adapters on the fused expert tensors and the router.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from planner.errors import UnsupportedError, UsageError
from planner.mixers.registry import mixer_of
from planner.models.lora_rest import NOTHING, Rest, is_saved, lora_rest
from planner.models.spec import LINEARS, LayerSpec, ModelSpec, ModuleKind, ModuleSpec

_MLP_ROOTS = {"mlp", "feed_forward", "block_sparse_moe", "shared_mlp", "fc1", "fc2", "mixer"}
"""Nemotron-H calls every block a mixer, its MLPs as well."""
_BY_PROJECTION = {"gate_proj": "gate_up", "up_proj": "gate_up", "down_proj": "down"}
_BY_NUMBER = {"w1": "gate_up", "w3": "gate_up", "w2": "down"}
_QWEN_LIKE = (
    "qwen3_moe",
    "qwen3_next",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "olmoe",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
)
EXPERT_NAMES: dict[str, dict[str, str]] = {
    **{kind: {"gate": "router", **_BY_PROJECTION} for kind in _QWEN_LIKE},
    **{kind: {"gate": "router", **_BY_NUMBER} for kind in ("mixtral", "minimax", "minimax_m2")},
}
"""model_type -> old name -> the fused tensor PEFT adapts for it."""
NO_MAMBA_OUT = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
"""PEFT refuses out_proj of these, and with it all-linear; our words leave it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedModule:
    """One kind of adapted module."""

    name: str
    layer: int | None
    """Index into ModelSpec.layers; None outside the decoder layers."""
    count: int
    """How many of them the whole model has."""
    in_features: int
    out_features: int
    rank: int
    """Columns of A times experts: PEFT doubles it where gate and up share one tensor."""
    tensors: tuple[int, ...]
    """Elements of A, B and, with DoRA, the magnitude, of one module."""

    @property
    def factored(self) -> tuple[int, ...]:
        """Rows and columns of its matrices, each with an element of Adafactor's; DoRA's vector whole."""
        sides = (self.rank, self.in_features, self.out_features, self.rank)
        return (*sides, *self.tensors[2:])

    @property
    def parameters(self) -> int:
        """Adapter parameters of all `count` modules."""
        return self.count * sum(self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraCounts:
    """What LoRA adds to a model."""

    adapted: tuple[AdaptedModule, ...]
    rest: Rest = NOTHING
    """What is trained beside adapters: modules_to_save and biases."""

    @property
    def parameters(self) -> int:
        """Adapter parameters."""
        return sum(module.parameters for module in self.adapted)

    @property
    def saved_parameters(self) -> int:
        """Parameters of modules_to_save."""
        return self.rest.saved_parameters

    @property
    def trainable(self) -> int:
        """Everything that gets a gradient."""
        return self.parameters + self.rest.parameters


def lora_counts(
    model: ModelSpec,
    targets: str | Iterable[str] = "all-linear",
    *,
    rank: int,
    dora: bool = False,
    modules_to_save: Iterable[str] = (),
    target_parameters: Iterable[str] = (),
    bias: str = "none",
    ties: bool = False,
) -> LoraCounts:
    """Return every adapted module of `model` for PEFT's `targets` and its parameter counts.

    `targets` is "all-linear", "attention", "mlp", or module names (a sequence, or one string
    separated by commas); `bias` and `ties` are lora_rest's. Raises UsageError where a name matches
    nothing that can be adapted.
    """
    saved = tuple(modules_to_save)
    names = _names(model, targets)
    modules, fused = _split(model, names)
    _refuse_mamba(model, modules)
    asked = tuple(target_parameters)
    found: set[str] = set()
    adapted: list[AdaptedModule] = []
    matched: set[str] = set()
    for layer, number, module in _walk(model):
        if module.kind is ModuleKind.BUFFER:
            continue
        hits = [name for name in modules if _is_named(module, name)]
        if hits and not is_saved(module, saved):
            adapted.append(_adapt(module, layer, number, rank, dora))
            matched.update(hits)
        explicit = {part: _named_by(asked, module, part) for part in _expert_parts(module)}
        found.update(*explicit.values())
        for part in sorted(part for part, names in explicit.items() if names or part in fused):
            # one rank each for gate and up, where PEFT translated their old names
            width = 2 if part == "gate_up" and part in fused else 1
            adapted.append(_adapt_expert(model, module, part, layer, number, rank * width, dora))
    if not adapted:
        raise UsageError(
            f"lora.targets: {_show(targets)} matches no layer of {model.name or model.model_type}",
            hint=f"all-linear, attention, mlp, or names such as {', '.join(linear_names(model)[:8])}",
        )
    if lost := [name for name in asked if name not in found]:
        there = sorted({n for _, _, m in _walk(model) for n in fused_parameters(m)})
        raise UsageError(
            f"lora.target_parameters: {lost[0]!r} names no fused tensor of "
            f"{model.name or model.model_type}",
            hint=f"it has {', '.join(there)}" if there else "it has none: its experts are linears",
        )
    if missing := sorted(modules - matched):
        raise UsageError(
            f"lora.targets: {model.name or model.model_type} has no module {missing[0]!r}",
            hint=f"its linear layers are {', '.join(linear_names(model))}",
        )
    leaves = frozenset(module.name.rsplit(".", 1)[-1] for module in adapted)
    rest = lora_rest(model, modules_to_save=saved, bias=bias, adapted=leaves, ties=ties)
    return LoraCounts(adapted=tuple(adapted), rest=rest)


def peft_targets(
    model: ModelSpec, targets: str | Iterable[str], target_parameters: Iterable[str] = ()
) -> str | list[str]:
    """Return what PEFT's LoraConfig is given as target_modules, so that it adapts what lora_counts counts.

    `all-linear` stays PEFT's own word, except where PEFT refuses it. Raises as lora_counts does.
    """
    lora_counts(model, targets, rank=1, target_parameters=target_parameters)
    if targets == "all-linear" and model.model_type not in NO_MAMBA_OUT:
        return "all-linear"
    return sorted(_names(model, targets))


ROLE_LEAVES = {
    "q": {"q_proj"},
    "k": {"k_proj"},
    "v": {"v_proj"},
    "o": {"o_proj", "out_proj", "dense", "c_proj"},
    "gate": {"gate_proj", "gate_up_proj", "w1"},
    "up": {"up_proj", "gate_up_proj", "w3", "fc1", "dense_h_to_4h", "c_fc"},
    "down": {"down_proj", "w2", "fc2", "dense_4h_to_h"},
}
"""What a projection is called, family by family."""
FUSED_QKV = {"qkv_proj", "query_key_value", "c_attn", "W_pack", "Wqkv", "wqkv"}


def leaves_of_roles(model: ModelSpec, roles: Iterable[str]) -> set[str]:
    """Return the model's linears that do what the roles (q, k, v, o, gate, up, down) name."""
    wanted = {leaf for role in roles for leaf in ROLE_LEAVES[role]}
    if {"q", "k", "v"} & set(roles):
        wanted |= FUSED_QKV
    return wanted & set(linear_names(model))


def linear_names(model: ModelSpec) -> list[str]:
    """Return the leaf names of the decoder layers' linears, sorted."""
    return sorted({m.leaf for layer in model.layers for m in layer.modules if m.kind in LINEARS})


def is_attention(module: ModuleSpec, layer: LayerSpec) -> bool:
    """Say whether a module belongs to the layer's token mixer."""
    return any(mixer_of(mixer).owns(module) for mixer in layer.mixers)


def is_mlp(module: ModuleSpec, layer: LayerSpec) -> bool:
    """Say whether a module belongs to the layer's channel mixer."""
    return module.name.split(".", 1)[0] in _MLP_ROOTS and not is_attention(module, layer)


def _walk(model: ModelSpec) -> Iterator[tuple[int | None, int, ModuleSpec]]:
    """Yield layer index, how many layers of it there are, and the module."""
    for index, layer in enumerate(model.layers):
        for module in layer.modules:
            yield index, layer.count, module
    outside = (*model.embeddings, *model.final, *model.towers)
    for module in (*outside, *((model.head,) if model.head else ())):
        yield None, 1, module


def _names(model: ModelSpec, targets: str | Iterable[str]) -> set[str]:
    """Return the names that the targets mean; in full where a leaf alone would catch too much."""
    if not isinstance(targets, str):
        return set(targets)
    if targets not in ("all-linear", "attention", "mlp"):
        return {name.strip() for name in targets.split(",") if name.strip()}
    if targets == "all-linear":
        found = {
            module.name
            for _, _, module in _walk(model)
            if module.kind in LINEARS
            and module is not model.head
            and not _is_refused(model, module.leaf)
        }
        translated = EXPERT_NAMES.get(model.model_type)
        if translated:
            # PEFT falls back to leaf names here, and adds the experts' and the router's
            return {name.rsplit(".", 1)[-1] for name in found} | set(translated)
        return found
    chosen = is_attention if targets == "attention" else is_mlp
    return {
        module.name
        for layer in model.layers
        for module in layer.modules
        if module.kind in LINEARS and chosen(module, layer) and not _is_refused(model, module.leaf)
    }


def _is_refused(model: ModelSpec, leaf: str) -> bool:
    return model.model_type in NO_MAMBA_OUT and leaf in ("out_proj", "conv1d")


def _refuse_mamba(model: ModelSpec, names: set[str]) -> None:
    for name in sorted(names):
        if _is_refused(model, name.rsplit(".", 1)[-1]):
            allowed = [leaf for leaf in linear_names(model) if not _is_refused(model, leaf)]
            raise UnsupportedError(
                f"lora.targets: PEFT does not adapt {name!r} of {model.model_type} models "
                "(their fused kernels would bypass the adapter)",
                hint=f"all-linear leaves it out; or name the others: {','.join(allowed)}",
            )


def _split(model: ModelSpec, names: set[str]) -> tuple[set[str], set[str]]:
    """Return the module names, and the fused expert tensors that PEFT makes of the others."""
    translated = EXPERT_NAMES.get(model.model_type, {})
    modules: set[str] = set()
    parts: dict[str, set[str]] = {}
    for name in names:
        leaf = name.rsplit(".", 1)[-1]
        if leaf in translated:
            parts.setdefault(translated[leaf], set()).add(leaf)
        else:
            modules.add(name)
    wanted = {old for old, part in translated.items() if part == "gate_up"}
    present = parts.get("gate_up", set())
    if present and present != wanted:
        missing = ", ".join(sorted(wanted - present))
        raise UsageError(
            f"lora.targets: {', '.join(sorted(present))} without {missing}: they are fused into "
            "one tensor here",
            hint=f"add {missing}, or leave both out",
        )
    return modules, set(parts)


ROUTERS = ("mlp.gate", "mlp.router", "block_sparse_moe.router", "feed_forward.router")
PART_LEAVES = {"gate_up": "gate_up_proj", "up": "up_proj", "down": "down_proj", "router": "weight"}
"""What transformers calls the parts of fused experts, and a router's matrix."""


def fused_parameters(module: ModuleSpec) -> list[str]:
    """Return the bare matrices of a module that lora.target_parameters can name."""
    return [f"{module.name}.{PART_LEAVES[part]}" for part in sorted(_expert_parts(module))]


def _named_by(asked: Iterable[str], module: ModuleSpec, part: str) -> set[str]:
    """Return the names that mean this tensor: its path's end (PEFT, _inject_parameters)."""
    path = f".{module.name}.{PART_LEAVES[part]}"
    return {name for name in asked if path.endswith(f".{name}")}


def _expert_parts(module: ModuleSpec) -> set[str]:
    if module.kind is ModuleKind.EXPERTS:
        into, out = (prod(shape) for shape in module.shapes if len(shape) == 3)
        return {"gate_up" if into == 2 * out else "up", "down"}
    is_router = module.kind is ModuleKind.PARAMETER and module.name in ROUTERS
    return {"router"} if is_router else set()


def _is_named(module: ModuleSpec, name: str) -> bool:
    return module.name == name or module.name.endswith(f".{name}")


def _adapt(
    module: ModuleSpec, layer: int | None, number: int, rank: int, dora: bool
) -> AdaptedModule:
    if module.kind is ModuleKind.EMBEDDING:
        in_features, out_features = module.shapes[0]
    elif module.kind in LINEARS:
        in_features, out_features = module.in_features, module.out_features
    else:
        raise UnsupportedError(
            f"lora.targets: {module.name} is a {module.kind.value}, which is not planned as a target",
            hint="target linear layers or embeddings",
        )
    return _make(
        module.name, layer, number * module.count, (in_features, out_features), rank, 1, dora
    )


def _adapt_expert(
    model: ModelSpec,
    module: ModuleSpec,
    part: str,
    layer: int | None,
    number: int,
    rank: int,
    dora: bool,
) -> AdaptedModule:
    if dora:
        raise UnsupportedError(
            "lora.dora: PEFT has no DoRA for fused experts",
            hint="name the attention projections as targets",
        )
    if part == "router":
        rows, columns = module.shapes[0]
        return _make(module.name, layer, number * module.count, (columns, rows), rank, 1, False)
    shapes = [shape for shape in module.shapes if len(shape) == 3]
    experts, first, second = shapes[1 if part == "down" else 0]
    sides = (first, second) if _is_transposed(model) else (second, first)
    leaf = {"gate_up": "gate_up_proj", "down": "down_proj", "up": "up_proj"}[part]
    return _make(f"{module.name}.{leaf}", layer, number * module.count, sides, rank, experts, False)


def _is_transposed(model: ModelSpec) -> bool:
    return model.model_type in ("gpt_oss", "llama4", "llama4_text")


def _make(
    name: str,
    layer: int | None,
    count: int,
    sides: tuple[int, int],
    rank: int,
    experts: int,
    dora: bool,
) -> AdaptedModule:
    width = rank * experts
    tensors = (width * sides[0], width * sides[1], *((sides[1],) if dora else ()))
    return AdaptedModule(
        name=name if layer is None else f"layers.*.{name}",
        layer=layer,
        count=count,
        in_features=sides[0],
        out_features=sides[1],
        rank=width,
        tensors=tensors,
    )


def _show(targets: str | Iterable[str]) -> str:
    return targets if isinstance(targets, str) else ", ".join(sorted(targets))
