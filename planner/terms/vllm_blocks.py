"""How vLLM cuts its KV pool into blocks: what `GPU KV cache size: N tokens` will say.

Layers of one kind share a block table. Where kinds differ (sliding windows, mamba, linear
attention), vLLM splits them into groups of equally many layers, makes all pages the same size, and
lets every group draw block numbers from one pool. So one block costs group_size x page bytes, and a
sequence costs the sum of all groups' blocks. Source: vLLM's v1/core/kv_cache_utils, checked against vLLM 0.32's
own token counts in benchmarks/kv_tokens.py.
"""

from dataclasses import dataclass, replace
from typing import Literal

from planner.dtypes import ELEMENT_BYTES, normal_dtype
from planner.errors import UsageError
from planner.mixers.full import as_full
from planner.mixers.mla import INDEXER_PAGES, index_key_bytes
from planner.mixers.registry import MIXERS, mixer_of
from planner.models.spec import LayerSpec, MixerKind, ModelSpec
from planner.run.engine_law import CURRENT, EngineLaw
from planner.terms.kv_cache import layer_bytes_per_token

KERNEL_BLOCK_TOKENS = 16
"""Smallest block of FlashAttention's paged kernels; the CPU build's is 32."""


@dataclass(frozen=True, slots=True)
class Page:
    """The cache of one layer for one block of tokens; equal pages share a group."""

    kind: MixerKind
    window: int
    block_tokens: int
    bytes: int
    state_blocks: int = 0
    """Blocks of a recurrent state one sequence holds, however long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmKv:
    """A KV pool as vLLM sees it."""

    num_blocks: int
    bytes_per_block: int
    """Of all layers of one group."""
    blocks_per_sequence: int
    """At max_model_len, all groups together."""
    max_model_len: int
    groups: int = 1
    """Groups of layers that draw from the pool."""
    block_tokens: int = 16
    """Tokens of the smallest block."""
    prints: Literal["concurrency", "groups"] = "concurrency"
    """Which of its two ways of counting tokens a release has (EngineLaw.prints)."""

    @property
    def concurrency(self) -> float:
        """Sequences of max_model_len that fit at once."""
        if self.prints == "groups" and self.groups == 1:
            return self.tokens / self.max_model_len
        return self.num_blocks / self.blocks_per_sequence

    @property
    def tokens(self) -> int:
        """What vLLM prints as the KV cache size."""
        if self.prints == "groups":
            return self.num_blocks // self.groups * self.block_tokens
        return int(self.num_blocks / self.blocks_per_sequence * self.max_model_len)

    def of_blocks(self, blocks: int) -> "VllmKv":
        """Return a pool of this many blocks cut the same way."""
        return replace(self, num_blocks=blocks)

    def of_tokens(self, tokens: int) -> "VllmKv":
        """Return the pool whose printed size is `tokens`."""
        if self.prints == "groups":
            return self.of_blocks(tokens // self.block_tokens * self.groups)
        return self.of_blocks(round(tokens / self.max_model_len * self.blocks_per_sequence))

    @property
    def bytes_per_sequence(self) -> int:
        """KV bytes that one sequence of max_model_len takes."""
        return self.blocks_per_sequence * self.bytes_per_block


_Cut = tuple[ModelSpec, ModelSpec, int, list[tuple[Page, int]]]
_STORE: dict[tuple[int, object], _Cut] = {}
"""Of every model seen: itself, as it is paged, bytes of a block, its groups."""


def vllm_kv(
    model: ModelSpec,
    *,
    kv_bytes: int,
    max_model_len: int,
    kv_dtype: str = "bf16",
    block_size: int = 16,
    in_flight_tokens: int = 8192,
    kernel_block: int = KERNEL_BLOCK_TOKENS,
    prefix_caching: bool = True,
    law: EngineLaw = CURRENT,
    ranks: int = 1,
    stages: int = 1,
) -> VllmKv:
    """Return blocks and tokens of a pool of `kv_bytes` on one of `ranks` x `stages` GPUs.

    `in_flight_tokens`: max_num_batched_tokens x concurrent batches (2 with async scheduling, the
    default on CUDA): a sliding window keeps that much more while a prompt is read in chunks.
    `prefix_caching`: recurrent layers then keep states at block ends beside the running one.
    Raises UsageError when not even one sequence fits or the model keeps no cache.
    """
    key = (
        *(kv_dtype, block_size, kernel_block, prefix_caching),
        *(law.hybrid_groups, law.expands_multi_query),
    )
    stored = _STORE.get((id(model), key))
    if stored is None:
        paged = _as_paged(model, law)
        pages = _pages(paged, kv_dtype, block_size, kernel_block, prefix_caching)
        if not pages:
            raise UsageError(f"{model.name}: keeps no KV cache, so vLLM reports no tokens")
        stored = _STORE[id(model), key] = (model, paged, *_groups(pages))
    _, paged, bytes_per_block, groups = stored
    padded = _latent_padding(paged, law.latent_row)
    share = kv_ranks(paged, ranks) * stages
    per_sequence = sum(
        number * _blocks(page, max_model_len, in_flight_tokens) for page, number in groups
    )
    return VllmKv(
        num_blocks=int(kv_bytes * share / (bytes_per_block * padded)),
        bytes_per_block=int(bytes_per_block * padded / share),
        blocks_per_sequence=per_sequence,
        max_model_len=max_model_len,
        groups=sum(number for _, number in groups),
        block_tokens=min(page.block_tokens for page, _ in groups),
        prints=law.prints,
    )


def kv_ranks(model: ModelSpec, ranks: int) -> int:
    """Return over how many tensor-parallel ranks the cache is split; MLA and spare ranks copy it."""
    if not all(mixer_of(layer.mixer).pages.divided for layer in model.layers):
        return 1
    heads = max(
        (layer.mixer.num_kv_heads or layer.mixer.num_heads for layer in model.layers), default=0
    )
    return min(ranks, max(1, heads))


def _as_paged(model: ModelSpec, law: EngineLaw) -> ModelSpec:
    """Return the model as releases see it that page every attention layer alike."""
    if law.hybrid_groups and not law.expands_multi_query:
        return model

    def seen(layer: LayerSpec) -> LayerSpec:
        mixer = layer.mixer
        if not law.hybrid_groups and mixer_of(mixer).pages.own_group:
            mixer = as_full(mixer)
        if law.expands_multi_query and mixer.num_kv_heads == 1:
            mixer = replace(mixer, num_kv_heads=mixer.num_heads)
        return replace(layer, mixer=mixer)

    return replace(model, layers=tuple(seen(layer) for layer in model.layers))


def _latent_padding(model: ModelSpec, row: int) -> float:
    """Return how much larger a padded row of MLA is than its latent."""
    for layer in model.layers:
        if row and layer.mixer.kv_lora_rank:
            return row / (layer.mixer.kv_lora_rank + layer.mixer.qk_rope_head_dim)
    return 1.0


def _pages(
    model: ModelSpec, kv_dtype: str, block_size: int, kernel_block: int, prefix_caching: bool
) -> dict[Page, int]:
    """Return how many layers cache each page, sizes not yet made equal between kinds."""
    element = ELEMENT_BYTES[normal_dtype(kv_dtype, field="kv_dtype")]
    states = [_state_page_bytes(layer, element) for layer in model.layers]
    per_token = [layer_bytes_per_token(_without_indexer(layer), element) for layer in model.layers]
    if any(states) and any(per_token):
        # attention blocks grow until one holds a whole state; the state's page is padded to it
        step, widest = max(kernel_block, block_size), max(per_token)
        block_size = step * int(-(-max(states) // (step * widest)))
        states = [int(block_size * widest) if size else 0 for size in states]
    pages: dict[Page, int] = {}

    def add(page: Page, count: int) -> None:
        pages[page] = pages.get(page, 0) + count

    for layer, state, token in zip(model.layers, states, per_token, strict=True):
        if state:
            mixer = next(m for m in layer.mixers if mixer_of(m).cache.state(m, element))
            blocks = mixer_of(mixer).pages.states(mixer) if prefix_caching else 1
            add(Page(mixer.kind, 0, block_size, state, blocks), layer.count)
        if token:
            kind = mixer_of(layer.mixer).pages.kind(layer.mixer)
            window = layer.mixer.window if MIXERS[kind].pages.own_group else 0
            add(Page(kind, window, block_size, int(block_size * token)), layer.count)
        if size := index_key_bytes(layer.mixer):
            add(Page(INDEXER_PAGES, 0, block_size, block_size * size), layer.count)
    return pages


def _without_indexer(layer: LayerSpec) -> LayerSpec:
    """Return the layer without its sparse indexer, whose keys vLLM pages apart from the latent."""
    return replace(layer, mixer=replace(layer.mixer, index_head_dim=0))


def _state_page_bytes(layer: LayerSpec, element: float) -> int:
    """Return conv and recurrent state of one sequence in one layer (0 without a recurrent mixer)."""
    return int(sum(mixer_of(mixer).cache.state(mixer, element) for mixer in layer.mixers))


def _groups(pages: dict[Page, int]) -> tuple[int, list[tuple[Page, int]]]:
    """Split layers into groups that share a block table: (bytes per block, [(page, groups)])."""
    if len({(page.kind, page.window) for page in pages}) == 1:
        # one kind: one group, whatever the page sizes
        total = sum(page.bytes * count for page, count in pages.items())
        return total, [(next(iter(pages)), 1)]
    largest = max(page.bytes for page in pages)
    layers: dict[Page, int] = {}
    for page, count in pages.items():
        grown = _grown(page, largest)
        layers[grown] = layers.get(grown, 0) + count
    fewest, most = min(layers.values()), max(layers.values())
    # equally many layers a group: the rarest kind's count, unless all are about as many
    size = most if most < 1.5 * fewest else fewest
    return size * largest, [(page, -(-count // size)) for page, count in layers.items()]


def _grown(page: Page, largest: int) -> Page:
    """Make a page as large as the largest: more tokens where that divides, padding where not."""
    if page.bytes == largest:
        return page
    if page.state_blocks or largest % page.bytes:
        return replace(page, bytes=largest)
    return replace(page, bytes=largest, block_tokens=page.block_tokens * (largest // page.bytes))


def _blocks(page: Page, max_model_len: int, in_flight_tokens: int) -> int:
    """Return the blocks one sequence holds in a group, at most."""
    if page.state_blocks:
        return page.state_blocks
    longest = MIXERS[page.kind].pages.longest
    tokens, extra = longest(page.window, max_model_len, in_flight_tokens)
    return -(-tokens // page.block_tokens) + extra
