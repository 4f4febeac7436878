"""Every weight of a model with its scheme: the one place that decides what is quantised."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from planner.dtypes import GGUF_BYTES, QUANTIZATIONS
from planner.models.quantization import TEXT_ONLY
from planner.models.spec import LINEARS, ModelSpec, ModuleKind, ModuleSpec
from planner.quant.reading import read
from planner.quant.schemes import Scheme, chosen
from planner.quant.sites import layer_sites, other_names, outside_sites
from planner.quant.training import Training

BITSANDBYTES = ("nf4", "fp4", "int8")
EXPERTS_ONLY = "mxfp4"
"""Packs experts, and leaves linears and the head in 16 bit: transformers integrations/mxfp4.py
(replace_with_mxfp4_linear), vLLM 0.32 quantization/mxfp4.py (get_quant_method)."""
BOILERPLATE = frozenset(
    "lm_head multi_modal_projector merger modality_projection out_proj kv_proj embed_tokens "  # noqa: SIM905
    "model.embed_tokens visual vision_tower vision_model audio_tower".split()
)
"""Names that tools write into every list, whether the model has such modules or not."""


@dataclass(frozen=True, slots=True)
class Part:
    """Equal modules with one scheme."""

    module: ModuleSpec
    scheme: Scheme | None
    count: int
    """How many; a module's own `count` is in it."""
    layer: int | None
    """Index of the layer kind; None outside the layers."""


@dataclass(frozen=True)
class Table:
    """The schemes of a model's weights."""

    parts: tuple[Part, ...]
    by_layer: tuple[Mapping[str, Scheme | None], ...]
    """For every decoder layer, the scheme of each of its modules by name."""
    outside: Mapping[str, Scheme | None] = field(default_factory=dict)
    """Of the other modules; of repeated ones the first copy's."""
    training: Training | None = None
    notes: tuple[str, ...] = ()

    def of_kind(self, layer: int, module: ModuleSpec) -> Iterator[tuple[Scheme | None, int]]:
        """Yield the schemes of a module of one layer kind, with the number of layers that have it."""
        for part in self.parts:
            if part.layer == layer and part.module is module:
                yield part.scheme, part.count // module.count


def weight_bytes(module: ModuleSpec, scheme: Scheme | None, width: int) -> int:
    """Return one module's bytes: what is packed by the scheme, the rest `width` bytes an element."""
    size = 0
    for shape, packed in tensors(module, scheme):
        if scheme is None or not packed:
            size += prod(shape) * width
        else:
            size += packed_bytes(shape, scheme, module.kind)
    return size


def packed_bytes(shape: tuple[int, ...], scheme: Scheme, kind: ModuleKind) -> int:
    """Return a weight's bytes; each expert of a fused tensor is a weight of its own."""
    if len(shape) == 3:
        return shape[0] * scheme.bytes(shape[1], shape[2])
    rows, columns = (shape[1], shape[0]) if kind is ModuleKind.CONV1D else shape[-2:]
    return scheme.bytes(rows, columns)


def tensors(module: ModuleSpec, scheme: Scheme | None) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Yield every tensor of one module, and whether the scheme packs it."""
    for index, shape in enumerate(module.shapes):
        weight = len(shape) == 3 if module.kind is ModuleKind.EXPERTS else index == 0
        yield shape, scheme is not None and weight


def canonical(name: str) -> str:
    """Return a published quantisation under the name that recipes use."""
    return QUANTIZATIONS.get(name, name)


def is_published(model: ModelSpec, scheme: str) -> bool:
    """Say whether a recipe's scheme is that of the checkpoint itself."""
    return bool(scheme) and canonical(model.checkpoint_quantization) == scheme


_STORE: dict[tuple[int, object], tuple[ModelSpec, Table]] = {}


def scheme_table(
    model: ModelSpec,
    scheme: str,
    *,
    double_quant: bool = True,
    linear_experts: bool = False,
    quantized_head: bool = False,
) -> Table:
    """Return the schemes of a model as published, or as the recipe's `scheme` makes them."""
    key = (scheme, double_quant, linear_experts, quantized_head)
    stored = _STORE.get((id(model), key))
    if stored is None:
        if is_published(model, scheme):
            table = _published(model, scheme, linear_experts=linear_experts)
        else:
            made = chosen(scheme, double_quant=double_quant) if scheme else None
            table = _chosen(model, made, linear_experts, quantized_head)
        stored = _STORE[id(model), key] = (model, table)
    return stored[1]


def _chosen(
    model: ModelSpec, scheme: Scheme | None, linear_experts: bool, quantized_head: bool
) -> Table:
    """Return the table of a scheme for all linears or experts of the layers, and maybe the head."""

    def of(module: ModuleSpec) -> Scheme | None:
        if scheme is None or module.kind not in (*LINEARS, ModuleKind.EXPERTS):
            return None
        if module.kind is ModuleKind.EXPERTS and scheme.name in BITSANDBYTES:
            return scheme if linear_experts else None  # bitsandbytes replaces nn.Linear only
        if module.kind is not ModuleKind.EXPERTS and scheme.name == EXPERTS_ONLY:
            return None
        return scheme

    kinds = tuple({module.name: of(module) for module in layer.modules} for layer in model.layers)
    parts = [
        Part(module, kinds[index][module.name], layer.count * module.count, index)
        for index, layer in enumerate(model.layers)
        for module in layer.modules
    ]
    outside: dict[str, Scheme | None] = {}
    for module in (*model.embeddings, *model.final, *model.towers):
        parts.append(Part(module, None, module.count, None))
    if model.head is not None and not model.tied:
        wanted = quantized_head or (scheme is not None and scheme.name in GGUF_BYTES)
        outside[model.head.name] = of(model.head) if wanted else None
        parts.append(Part(model.head, outside[model.head.name], 1, None))
    by_layer = tuple(kinds[index] for index in model.layer_order)
    packs = any(part.scheme for part in parts)
    notes = () if packs or scheme is None else (f"{scheme.name} packs nothing in this model",)
    return Table(tuple(parts), by_layer, outside, notes=notes)


def _published(model: ModelSpec, scheme: str, *, linear_experts: bool) -> Table:
    """Return the table of the checkpoint's own config, module by module."""
    reading = read(model, scheme)
    by_layer: list[dict[str, Scheme | None]] = [{} for _ in model.layer_order]
    counts: Counter[tuple[int | None, int, Scheme | None]] = Counter()
    modules: dict[int, ModuleSpec] = {}
    names: set[str] = set(other_names(model))

    def of(site_scheme: Scheme | None, module: ModuleSpec) -> Scheme | None:
        fused = module.kind is ModuleKind.EXPERTS and not linear_experts
        if site_scheme is not None and fused and site_scheme.name in BITSANDBYTES:
            return None
        return site_scheme

    for number, module, site in layer_sites(model):
        found = of(reading.decide(site), module)
        names.update(site.names)
        by_layer[number][module.name] = found
        modules[id(module)] = module
        counts[model.layer_order[number], id(module), found] += module.count
    outside: dict[str, Scheme | None] = {}
    text_only = bool(model.quantization_config.get(TEXT_ONLY))
    for module, site in outside_sites(model):
        tower = site.role == "tower"
        found = None if tower and text_only else of(reading.decide(site), module)
        names.update(site.names)
        outside.setdefault(module.name, found)
        modules[id(module)] = module
        counts[None, id(module), found] += 1 if tower else module.count
    parts = tuple(
        Part(modules[identity], found, count, layer)
        for (layer, identity, found), count in counts.items()
    )
    return Table(
        parts,
        tuple(by_layer),
        outside,
        reading.training,
        _unmatched(reading.listed, names),
    )


def _unmatched(listed: tuple[tuple[str, object], ...], names: set[str]) -> tuple[str, ...]:
    """Return what to say of listed names that fit no module."""
    lost = [
        text
        for text, test in listed
        if text not in BOILERPLATE and callable(test) and not any(test(name) for name in names)
    ]
    real = [text for text, _ in listed if text not in BOILERPLATE]
    if not lost:
        return ()
    shown = ", ".join(text[:60] for text in lost[:3]) + (" ..." if len(lost) > 3 else "")
    if len(lost) == len(real):
        return (f"quantization_config: its list of names matches nothing in this model ({shown})",)
    return (
        f"quantization_config: {len(lost)} of {len(listed)} listed names match nothing in this "
        f"model ({shown})",
    )


def stored_bytes(model: ModelSpec, table: Table, width: int) -> int:
    """Return a model's bytes: every weight by its scheme, the rest `width` bytes an element."""
    total = sum(part.count * weight_bytes(part.module, part.scheme, width) for part in table.parts)
    if model.head is not None and model.tied:
        total += width * sum(prod(shape) for shape in model.head.shapes[1:])
    return total
