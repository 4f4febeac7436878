"""What is trained beside adapters: whole modules (modules_to_save) and the base's biases.

PEFT 0.21: a module belongs to modules_to_save when its full path *ends with* a name (so `norm` means
every `..._layernorm` too, utils/other.py: _set_trainable); it trains a deep copy, in the base's dtype.
`bias: all` trains every parameter with "bias" in its name, `lora_only` those of adapted modules.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from planner.errors import UsageError
from planner.models.spec import ModelSpec, ModuleKind, ModuleSpec

EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "embeddings")
"""What input embeddings are called, family by family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """Trained tensors that are no adapters, and where they are."""

    tensors: tuple[tuple[int, ...], ...] = ()
    """Shape of every one of them, modules' first."""
    saved_parameters: int = 0
    bias_parameters: int = 0
    bias_count: int = 0
    """How many of the tensors are biases: the last ones."""
    linears: frozenset[str] = frozenset()
    """Names, inside a layer, of linears that are trained whole."""
    norms: bool = False
    """Layers' norms are trained."""
    final_norm: bool = False
    embedding: bool = False
    """The input embedding is trained whole."""
    head: bool = False
    """The output head is; a tied one with the embedding it is tied to."""
    biases: frozenset[str] = frozenset()
    """Leaf names of the layers' modules whose biases are trained."""

    @property
    def parameters(self) -> int:
        """Parameters of all of them."""
        return self.saved_parameters + self.bias_parameters

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of every tensor."""
        return tuple(prod(shape) for shape in self.tensors)


NOTHING = Rest()


def is_saved(module: ModuleSpec, names: Iterable[str]) -> bool:
    """Say whether one of modules_to_save's names means the module, as PEFT matches them."""
    path = f"model.{module.name}"
    return any(path.endswith(name) for name in names)


def lora_rest(
    model: ModelSpec,
    *,
    modules_to_save: tuple[str, ...] = (),
    bias: str = "none",
    adapted: frozenset[str] = frozenset(),
    ties: bool = False,
) -> Rest:
    """Return what is trained beside the adapters.

    `adapted`: leaf names of the adapted modules. `ties`: a tied head stays tied to a trained
    embedding (PEFT's ensure_weight_tying), else each is a copy of its own. Raises UsageError for names
    without a module, and for biases of a model that has none.
    """
    tied = ties and model.tied and model.head is not None
    shapes: list[tuple[int, ...]] = []
    found: Counter[str] = Counter()
    saved: set[str] = set()
    linears: set[str] = set()
    norms = False
    for where, number, module in _modules(model):
        hits = [name for name in modules_to_save if is_saved(module, (name,))]
        if not hits or module.kind is ModuleKind.BUFFER:
            continue
        found.update(hits)
        saved.add(module.name)
        if where == "layer":
            linears.add(module.name)
            norms = norms or module.kind is ModuleKind.NORM
        elif where == "head" and tied:
            continue
        shapes += [shape for shape in module.shapes for _ in range(number * module.count)]
    _refuse_unknown(model, modules_to_save, found)
    embeddings = [module for module in model.embeddings if module.leaf in EMBEDDINGS]
    embedding = any(module.name in saved for module in embeddings)
    head = model.head is not None and model.head.name in saved
    if tied and head and not embedding and embeddings:
        shapes.append(embeddings[0].shapes[0])
    held = tied and (embedding or head)
    whole = sum(prod(shape) for shape in shapes)
    biases = _biases(model, bias, adapted, saved)
    shapes += [shape for shape, _ in biases]
    return Rest(
        tensors=tuple(shapes),
        saved_parameters=whole,
        bias_parameters=sum(prod(shape) for shape, _ in biases),
        bias_count=len(biases),
        linears=frozenset(linears),
        norms=norms,
        final_norm=any(module.name in saved for module in model.final),
        embedding=embedding or held,
        head=head or held,
        biases=frozenset(leaf for _, leaf in biases),
    )


def _modules(model: ModelSpec) -> Iterator[tuple[str, int, ModuleSpec]]:
    """Yield where a module is, how many layers have it, and the module."""
    for layer in model.layers:
        for module in layer.modules:
            yield "layer", layer.count, module
    for module in (*model.embeddings, *model.final, *model.towers):
        yield "outside", 1, module
    if model.head is not None:
        yield "head", 1, model.head


def _biases(
    model: ModelSpec, bias: str, adapted: frozenset[str], saved: set[str]
) -> list[tuple[tuple[int, ...], str]]:
    """Return shape and module leaf of every bias that is trained."""
    if bias == "none":
        return []
    vectors = [
        (shape, module.leaf)
        for _, number, module in _modules(model)
        if module.kind in (ModuleKind.LINEAR, ModuleKind.CONV1D, ModuleKind.NORM)
        and module.name not in saved
        and (bias == "all" or module.leaf in adapted)
        for shape in module.shapes[1:]
        for _ in range(number * module.count)
    ]
    if not vectors:
        raise UsageError(
            f"lora.bias: {bias}, but {model.name or model.model_type} has no bias "
            + ("at all" if bias == "all" else "in what is adapted"),
            hint="none",
        )
    return vectors


def _refuse_unknown(model: ModelSpec, names: tuple[str, ...], found: Counter[str]) -> None:
    for name in names:
        if not found[name]:
            raise UsageError(
                f"lora.modules_to_save: {model.name or model.model_type} has no module {name!r}",
                hint="for example embed_tokens, lm_head",
            )
