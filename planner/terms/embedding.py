"""The backward of an embedding on CUDA: beyond a few thousand tokens it sorts them."""

SORTED_ABOVE_TOKENS = 3072
"""aten/src/ATen/native/cuda/Embedding.cu, embedding_dense_backward_cuda: up to here a kernel without sorting."""
ROWS_PER_PARTIAL = 10
"""aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu, NROWS_PER_THREAD."""


def backward_blocks(tokens: int, vocab: int, hidden: int) -> tuple[int, ...]:
    """Return the bytes of each temporary that is alive while an embedding's gradient is summed.

    EmbeddingBackwardKernel.cu: int64 indices (the sorted tokens, where they were, where a token's run
    begins; for each run its partial sums, twice; where each partial sum begins), and the fp32 partial
    sums: one row for every ten tokens and one more for every different token there can be.
    """
    if tokens <= SORTED_ABOVE_TOKENS:
        return ()
    runs = min(tokens, vocab)
    rows = tokens // ROWS_PER_PARTIAL + runs
    return (*(8 * tokens,) * 3, *(8 * runs,) * 2, 8 * rows, 4 * rows * hidden)
