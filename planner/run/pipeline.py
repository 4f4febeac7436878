"""A pipeline's stages: which layers each rank runs, and how many micro-batches it has begun at once.

Read in megatron-core 0.20, core/pipeline_parallel/schedules.py: forward_backward_pipelining_without_
interleaving (1F1B), with_interleaving and get_pp_rank_microbatches; core/transformer/transformer_layer.py:
get_transformer_layer_offset. torchtitan's stages are the same (distributed/pipeline_parallel.py).
"""

from typing import NamedTuple


class Stage(NamedTuple):
    """One rank's place in a pipeline."""

    stages: int = 1
    number: int = 0
    """From 0, the one with the embeddings."""
    chunks: int = 1
    """Parts of the model that the rank runs; 1 without interleaving."""
    micro_batches: int = 1
    """Of one step."""

    @property
    def first(self) -> bool:
        """It holds the embeddings."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """It holds the head and makes the loss."""
        return self.number == self.stages - 1

    @property
    def chunks_in_flight(self) -> int:
        """Forwards of one chunk whose backward has not begun, at their most.

        A stage first runs its warm-up forwards, then one forward before each backward. 1F1B: as many as
        there are stages behind it. Interleaved: two for each, and (chunks - 1) groups of as many
        micro-batches as there are stages.
        """
        if self.stages == 1:
            return 1
        behind = self.stages - self.number - 1
        if self.chunks > 1:
            behind = 2 * behind + (self.chunks - 1) * self.stages
        return min(behind + 1, self.chunks * self.micro_batches)


def layers_of(layers: int, stages: int, number: int, chunks: int) -> tuple[int, ...]:
    """Return the places of a stage's layers.

    Where the layers do not divide, embedding and head count as one each: Megatron-core's
    account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split.
    """
    parts = stages * chunks
    spare = 0 if layers % parts == 0 else 1
    each = (layers + 2 * spare) // parts
    found: list[int] = []
    for chunk in range(chunks):
        begin = (chunk * stages + number) * each - spare
        found += range(max(0, begin), min(layers, begin + each))
    return tuple(found)
