"""EngineLaw: what one range of vLLM releases does with memory; data/frameworks/vllm*.json set it.

The defaults are vLLM 0.32's, read in its own sources; an older release's file states what differs.
"""

from typing import Annotated, Literal

from pydantic import Field

from planner.run.recipe import Section
from planner.units import GiB

Flag = Annotated[bool, Field(strict=True)]
Number = Annotated[int, Field(ge=0, strict=True)]
Sampler = Literal["sort", "select", "none"]


class BatchDefaults(Section):
    """Batch sizes of a card when nobody states them (engine/arg_utils.get_batch_defaults)."""

    from_gib: Number
    """Cards with at least this much memory ..."""
    not_named: str = ""
    """... whose name does not contain this."""
    served_tokens: Number
    """max_num_batched_tokens of `vllm serve`."""
    offline_tokens: Number
    """The same of LLM()."""
    sequences: Number
    """max_num_seqs."""


class EngineLaw(Section):
    """What one range of vLLM releases does with memory."""

    before_ampere: str = ""
    """The law that runs instead on cards of compute capability below 8 (V1 falls back to V0)."""

    # batches
    batches: tuple[BatchDefaults, ...] = (
        BatchDefaults(from_gib=160, served_tokens=16384, offline_tokens=16384, sequences=1024),
        BatchDefaults(
            from_gib=70,
            not_named="a100",
            served_tokens=8192,
            offline_tokens=16384,
            sequences=1024,
        ),
        BatchDefaults(from_gib=0, served_tokens=2048, offline_tokens=8192, sequences=256),
    )
    """Largest cards first; the first that matches counts."""
    whole_prompts_up_to: Number = 0
    """V0: a model no longer than this is not chunked, so the profile's batch holds whole prompts."""
    latent_whole_prompts: Flag = False
    """Models with latent attention are never chunked, so the profile's batch holds a whole prompt."""
    multimodal_tokens: Number = 0
    """V0: the least batch of a model with a vision or audio tower."""
    sequences_by_room: tuple[tuple[Number, Number], ...] = ()
    """max_num_seqs by what the weights leave of the budget, (GiB at most, sequences); the last is for
    any room. Unsloth starts its engines so."""
    multimodal_sequences: Number = 0
    """max_num_seqs of a model with a tower; 0 = as any."""
    utilization: Annotated[float, Field(gt=0, le=1)] = 0.92

    # the profile run
    compiled: Flag = True
    """Layers run as compiled pieces: between them only the attention's output and the residual live."""
    sampler: Sampler = "none"
    """The profile's sampler. sort: top-k and top-p by torch.sort; select: by a kernel that writes in
    place; none: the dummy batch asks for neither, so only the 16-bit logits exist."""
    keeps_hidden: Flag = True
    """The hidden states of all tokens are still bound while the sampler runs."""
    shares_expert_buffers: Flag = True
    """The first and third buffer of fused experts are one allocation."""
    expert_chunk_tokens: Number = 0
    """Tokens that pass the fused experts at once; 0 = all."""
    latent_context_tokens: Number = 65536
    """The profile makes the up-projected context of MLA's chunked prefill, this many tokens at most."""

    # what else is in the budget
    context_in_budget: Flag = False
    """Everything outside torch is taken off, the CUDA context too, not only what grew since start."""
    communicators_in_budget: Flag = False
    """Memory is read before NCCL starts, so its buffers are taken off the KV pool."""
    graphs_in_budget: Flag = True
    """CUDA graphs are estimated and taken off before the KV pool is sized."""

    # CUDA graphs
    graph_sizes: Literal["sequences", "twice", "fixed"] = "twice"
    """Captured up to max_num_seqs (V0), twice that or `graph_limit`, which the first two keep to."""
    graph_limit: Number = 512
    """0 = none."""
    graph_step_above: Number = 256
    """Sizes go by 8 up to here, by 16 above; 0 = by 8 throughout."""
    graph_piece: str = "graph_piece_bytes"
    """The constant of data/calibration/vllm.json that says what a captured piece holds."""
    graph_estimate: str = "graph_piece_bytes"
    """The one that says what the start-up takes it for, where the budget holds the graphs: the newer
    runner captures every piece once to measure them, the older one takes two of each mode for all."""
    piecewise: Flag = True
    """One graph a piece between attentions and size, not one a size."""

    # weights
    absorbs: Literal["views", "products"] = "views"
    """MLA: W_UK and W_UV are kept apart from kv_b_proj only where that is quantised (views), or
    multiplied into copies of the query and output projections (products)."""
    adapters_in_weights: Flag = True
    """Adapter slots are part of the printed weights and of the budget."""
    mxfp4_padding: tuple[Number, Number] = (1, 64)
    """Multiples that hidden and expert width are rounded up to for MXFP4 experts: Triton's on Hopper;
    Marlin, which older releases take without the triton_kernels package, needs (256, 128)."""
    lora_extra_vocab: Number = 0
    """Rows added to vocabulary and head for adapters' own tokens."""

    # KV pages
    hybrid_groups: Flag = True
    """Layers of different kinds draw from one pool in groups; else all are paged as full attention."""
    expands_multi_query: Flag = False
    """One shared key head is cached once for every query head."""
    prints: Literal["concurrency", "groups"] = "concurrency"
    """`GPU KV cache size`: concurrency x length, or blocks / groups x block size."""
    prefix_caching: Flag = True
    """Prefixes are cached unless somebody says no; V0 did so only when asked."""
    in_flight_batches: Number = 2
    """Batches scheduled at once: a sliding window keeps that many batches' tokens more."""
    latent_row: Number = 0
    """MLA's cached row is padded to this many elements; 0 = not padded."""
    swap_bytes: Number = 0
    """Host memory for swapped blocks a GPU (V0's swap_space)."""

    def batch(
        self,
        *,
        vram_bytes: int,
        name: str,
        offline: bool,
        max_len: int,
        multimodal: bool,
        latent: bool = False,
    ) -> tuple[int, int]:
        """Return (max_num_batched_tokens, max_num_seqs) when neither is stated."""
        found = next(
            row
            for row in self.batches
            if vram_bytes >= row.from_gib * GiB
            and not (row.not_named and row.not_named in name.lower())
        )
        tokens = found.offline_tokens if offline else found.served_tokens
        if self.whole_prompts_up_to and (multimodal or max_len <= self.whole_prompts_up_to):
            tokens = max(tokens, max_len)
        if latent and self.latent_whole_prompts:
            tokens = max(tokens, max_len)
        if multimodal:
            tokens = max(tokens, self.multimodal_tokens)
        if not self.whole_prompts_up_to:
            tokens = min(tokens, found.sequences * max_len)
        return tokens, min(found.sequences, tokens)

    def sequences_in(self, room_bytes: int, *, multimodal: bool) -> int:
        """Return max_num_seqs where it follows from what the weights leave."""
        if multimodal and self.multimodal_sequences:
            return self.multimodal_sequences
        table = self.sequences_by_room
        return next((count for gib, count in table if room_bytes <= gib * GiB), table[-1][1])


CURRENT = EngineLaw()
"""The newest release that was read."""
