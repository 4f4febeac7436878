"""The part of a model that one rank holds: its pipeline stage's layers, its share of every matrix and expert.

What comes out is a ModelSpec like any other, so every term counts one rank's tensors as it counts a whole
model's. Rules read in megatron-core 0.20 (core/tensor_parallel/layers.py, core/transformer/moe/experts.py,
core/models/gpt/gpt_layer_specs.py), torchtitan (models/llama3/infra/parallelize.py) and transformers 5.19
(base_model_tp_plan, integrations/tensor_parallel.py): linears into a block are divided by their outputs,
those out of it by their inputs with the bias whole; norms, routers and latent down-projections are whole.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from planner.errors import UnsupportedError
from planner.mixers.registry import mixer_of
from planner.models.spec import (
    LINEARS,
    LayerSpec,
    MlpKind,
    ModelSpec,
    ModuleKind,
    ModuleSpec,
)

WHOLE = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "gate", "router", "shared_expert_gate", "wk"})
"""Linears that every rank holds all of."""
INPUT_SPLIT = frozenset(
    "o_proj down_proj out_proj dense dense_4h_to_h c_proj fc2 w2 wo".split()  # noqa: SIM905
)
"""Linears divided over their inputs, the bias whole."""
FUSED_QKV = frozenset({"qkv_proj", "query_key_value", "c_attn", "Wqkv", "W_pack"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Cuts:
    """Over how many ranks a model's matrices are divided, and where."""

    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    vocab_padding: int = 1
    """Rows of the vocabulary are padded to a multiple of this times `tensor` before they are divided."""
    whole_embedding: bool = False
    """Every rank holds the whole input embedding (transformers' tp_plan names none)."""
    whole_logits: bool = False
    """The head's output is gathered: logits are as wide as the vocabulary on every rank."""


def stage_part(model: ModelSpec, layers: Sequence[int], *, first: bool, last: bool) -> ModelSpec:
    """Return the given layers (places in the model), with the embeddings if `first`, the head if `last`.

    A tied head on another stage than the embedding is a copy of its own there.
    """
    chosen = [model.layer_order[place] for place in layers]
    counts = Counter(chosen)
    used = sorted(counts)
    return replace(
        model,
        layers=tuple(replace(model.layers[old], count=counts[old]) for old in used),
        layer_order=tuple(used.index(old) for old in chosen),
        embeddings=model.embeddings if first else (),
        final=model.final if last else (),
        head=model.head if last else None,
        vocab=model.vocab if first or last else 1,
        tied=model.tied and first,
        towers=model.towers if first else (),
        embedding_dropout=model.embedding_dropout if first else 0.0,
    )


def tensor_part(model: ModelSpec, cuts: Cuts) -> ModelSpec:
    """Return one rank's share of every layer, embedding and head."""
    if cuts == Cuts():
        return model
    for layer in model.layers:
        for mixer in layer.mixers:
            if cuts.tensor > 1 and not mixer_of(mixer).divides:
                raise UnsupportedError(
                    f"parallel.tensor: {cuts.tensor} ranks over {mixer.kind.value} layers is not planned"
                )
    rows = padded_vocab(model.vocab, cuts)
    head = model.head
    if head is not None:
        head = _vocabulary(head, model.vocab, rows // cuts.tensor)
    own = [
        module if cuts.whole_embedding else _vocabulary(module, model.vocab, rows // cuts.tensor)
        for module in model.embeddings
    ]
    return replace(
        model,
        layers=tuple(_layer(layer, cuts) for layer in model.layers),
        embeddings=tuple(own),
        head=head,
        vocab=model.vocab if cuts.whole_logits or model.vocab == 1 else rows // cuts.tensor,
    )


def padded_vocab(vocab: int, cuts: Cuts) -> int:
    """Return the rows of the vocabulary over all ranks."""
    step = cuts.vocab_padding * cuts.tensor
    return -(-vocab // step) * step


def _vocabulary(module: ModuleSpec, vocab: int, rows: int) -> ModuleSpec:
    """Return an embedding or head with `rows` of its vocabulary; tables of positions stay whole."""
    first, *rest = module.shapes
    if first[0] != vocab:
        return module
    biases = ((rows, *shape[1:]) if shape[0] == vocab else shape for shape in rest)
    return replace(module, shapes=((rows, *first[1:]), *biases))


def _layer(layer: LayerSpec, cuts: Cuts) -> LayerSpec:
    mixer, mlp, ranks = layer.mixer, layer.mlp, cuts.tensor
    heads = mixer.num_kv_heads or mixer.num_heads
    if mixer.num_heads:
        mixer = replace(
            mixer,
            num_heads=-(-mixer.num_heads // ranks),
            num_kv_heads=-(-heads // ranks) if mixer.num_kv_heads else 0,
        )
    inner = cuts.expert_tensor if mlp.kind is MlpKind.MOE else ranks
    return replace(
        layer,
        mixer=mixer,
        mlp=replace(
            mlp,
            intermediate=-(-mlp.intermediate // inner),
            shared_intermediate=-(-mlp.shared_intermediate // ranks),
        ),
        modules=tuple(_module(layer, module, cuts) for module in layer.modules),
    )


def _module(layer: LayerSpec, module: ModuleSpec, cuts: Cuts) -> ModuleSpec:
    if module.kind is ModuleKind.EXPERTS:
        return replace(module, shapes=_expert_shapes(layer, module, cuts))
    if module.leaf in WHOLE or module.kind not in LINEARS:
        return module
    return _linear(layer, module, cuts.tensor)


def _linear(layer: LayerSpec, module: ModuleSpec, ranks: int) -> ModuleSpec:
    weight, *biases = module.shapes
    turned = module.kind is ModuleKind.CONV1D
    by_inputs = module.leaf in INPUT_SPLIT
    side = len(weight) - 1 if by_inputs is not turned else len(weight) - 2
    kept, of = (1, ranks) if by_inputs else _share(layer, module, ranks)
    cut = tuple(-(-size * kept // of) if at == side else size for at, size in enumerate(weight))
    if not by_inputs:
        biases = [tuple(-(-size * kept // of) for size in shape) for shape in biases]
    return replace(module, shapes=(cut, *biases))


def _share(layer: LayerSpec, module: ModuleSpec, ranks: int) -> tuple[int, int]:
    """Return the part of a linear's outputs that a rank keeps, as a fraction: key heads are copied if few."""
    heads = layer.mixer.num_heads
    groups = layer.mixer.num_kv_heads or heads
    if layer.mixer.kv_lora_rank or not heads:
        return 1, ranks
    kept = -(-groups // ranks)
    if module.leaf in ("k_proj", "v_proj"):
        return kept, groups
    if module.leaf in FUSED_QKV:
        return heads // ranks + 2 * kept, heads + 2 * groups
    return 1, ranks


def _expert_shapes(layer: LayerSpec, module: ModuleSpec, cuts: Cuts) -> tuple[tuple[int, ...], ...]:
    """Return [E, out, in] of one rank: whole experts, or their widths divided among expert-tensor ranks."""
    return tuple(
        (shape[0] // cuts.expert, *_one_cut(shape[1:], layer.mlp.intermediate, cuts.expert_tensor))
        for shape in module.shapes
    )


def _one_cut(shape: tuple[int, ...], inner: int, ranks: int) -> tuple[int, ...]:
    """Return a shape with the one side divided that is an expert's width, or twice that."""
    side = next((at for at, size in enumerate(shape) if size in (inner, 2 * inner)), None)
    return tuple(-(-size // ranks) if at == side else size for at, size in enumerate(shape))


def parameters_by_kind(model: ModelSpec) -> tuple[int, int]:
    """Return the parameters outside routed experts, and theirs: two groups of optimizer states."""
    routed = sum(
        layer.count * module.count * sum(prod(shape) for shape in module.shapes)
        for layer in model.layers
        for module in layer.modules
        if module.kind is ModuleKind.EXPERTS
    )
    return model.parameters - routed, routed
