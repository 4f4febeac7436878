"""NEFTune (arXiv 2310.05914): uniform noise on the embeddings while training.

Of magnitude alpha / sqrt(T * H) for a sample of T tokens and hidden size H. TRL's (transformers'
integrations/neftune.py) takes T from the padded batch; here it is the sample's own length, so that the
noise does not depend on how a step is cut into micro-batches. For a sample by itself they are the same.
"""

from typing import Any

import torch
from torch import Tensor

from trainer.batching import MicroBatch


class EmbeddingNoise:
    """Adds the noise to what a model's embedding layer returns, in training mode alone."""

    def __init__(self, model: Any, alpha: float) -> None:
        self.alpha = alpha
        self._lengths: Tensor | None = None
        model.get_input_embeddings().register_forward_hook(self._add)

    def aim(self, batch: MicroBatch) -> None:
        """Take the samples' lengths from the micro-batch that runs next."""
        starts = (batch.position_ids == 0).flatten()
        # padding on the right has position 0 throughout: each of it is a sample of one token
        owner = starts.cumsum(0) - 1
        counts = torch.zeros_like(owner).scatter_add_(0, owner, torch.ones_like(owner))
        self._lengths = counts[owner].reshape(batch.position_ids.shape)

    def _add(self, module: torch.nn.Module, _inputs: Any, output: Tensor) -> Tensor | None:
        if not module.training or self._lengths is None:
            return None
        magnitude = self.alpha / (self._lengths * output.shape[-1]).sqrt()
        noise = torch.zeros_like(output).uniform_(-1, 1)
        return output + noise * magnitude[..., None].to(output.dtype)
