"""Where a model's weights are, by the names that skip lists know them by."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from planner.models.spec import ModelSpec, ModuleKind, ModuleSpec

LAYER_ROOTS = {
    "gpt2": "transformer.h",
    "gptj": "transformer.h",
    "gpt_bigcode": "transformer.h",
    "bloom": "transformer.h",
    "falcon": "transformer.h",
    "gpt_neox": "gpt_neox.layers",
    "opt": "model.decoder.layers",
    "mamba": "backbone.layers",
    "mamba2": "backbone.layers",
    "falcon_mamba": "backbone.layers",
}
"""Where transformers 5.19 keeps the decoder layers, if not in model.layers."""
MULTIMODAL_ROOTS = (
    "model.language_model.layers",
    "language_model.model.layers",
    "model.layers",
    "language_model.layers",
)
"""transformers 5's name, and those of files written by 4.x: skip lists keep the name of their time."""
EXPERT_WORDS = ("", ".0.up_proj", ".0.down_proj", ".0.gate_proj")
"""transformers 5 fuses experts; the libraries that made the files saw one linear each."""


@dataclass(frozen=True, slots=True)
class Site:
    """One weight of a model."""

    names: tuple[str, ...]
    """Every path that a list may call it by; the first is transformers 5's."""
    kind: ModuleKind
    role: str
    """layer, tower, final, head or embedding."""

    @property
    def linear(self) -> bool:
        """True for nn.Linear."""
        return self.kind is ModuleKind.LINEAR

    @property
    def block(self) -> str:
        """The name inside its layer, for GPTQ's modules_in_block_to_quantize and HQQ's tags."""
        return ".".join(
            part for part in self.names[0].split(".") if part != "layers" and not part.isdigit()
        ).removeprefix("model.")


def layer_sites(model: ModelSpec) -> Iterator[tuple[int, ModuleSpec, Site]]:
    """Yield every module of every decoder layer with the layer's number."""
    roots: tuple[str, ...] = MULTIMODAL_ROOTS
    if not model.towers:
        root = LAYER_ROOTS.get(model.model_type, "model.layers")
        roots = tuple({root: None, "model.layers": None})
    for number, index in enumerate(model.layer_order):
        for module in model.layers[index].modules:
            ends = EXPERT_WORDS if module.kind is ModuleKind.EXPERTS else ("",)
            names = tuple(f"{root}.{number}.{module.name}{end}" for root in roots for end in ends)
            yield number, module, Site(names, module.kind, "layer")


def outside_sites(model: ModelSpec) -> Iterator[tuple[ModuleSpec, Site]]:
    """Yield the modules outside the layers, once for every copy of a repeated one."""
    for module in model.embeddings:
        names = (f"model.{module.name}", f"model.language_model.{module.name}", module.name)
        yield module, Site(names, module.kind, "embedding")
    for module in model.final:
        yield module, Site((f"model.{module.name}", module.name), module.kind, "final")
    for module in model.towers:
        for number in range(module.count):
            yield module, Site(_tower_names(module.name, number), module.kind, "tower")
    if model.head is not None and not model.tied:
        names = (model.head.name, f"language_model.{model.head.name}", "embed_out")
        yield model.head, Site(names, model.head.kind, "head")


@lru_cache(maxsize=8192)
def _tower_names(name: str, number: int) -> tuple[str, ...]:
    path = name.replace("*", str(number), 1)
    names = [f"model.{path}", path]
    if path.startswith(("vision_tower.encoder", "vision_tower.embeddings", "vision_tower.post")):
        inside = path.removeprefix("vision_tower.")
        names += [
            f"vision_tower.vision_model.{inside}",
            f"model.vision_tower.vision_model.{inside}",
        ]
    return tuple(names)


def other_names(model: ModelSpec) -> Iterator[str]:
    """Yield names that lists hold beside weights: a tied head, whole stacks and projectors."""
    if model.head is not None:
        yield model.head.name
    for module in (*model.embeddings, *model.final, *model.towers):
        yield module.name
