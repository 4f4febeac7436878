"""What `model.generate` needs beside weights and cache: the largest temporary of one new token."""

from planner.models.spec import ModelSpec
from planner.run.recipe import EngineKind
from planner.run.resolve import Resolved
from planner.terms.counts import base_weights
from planner.terms.term import Term

LOGIT_BYTES = 4
"""transformers' generate samples from fp32 logits of the last position (GenerationMixin._sample)."""
DEQUANTIZED_BYTES = 4
"""bitsandbytes returns a weight in the dtype it was quantised from; loaders of fp32 checkpoints
quantise from fp32 (functional.dequantize_4bit: quant_state.dtype)."""
AUTOCAST_BYTES = 2
"""torch.autocast keeps a 16-bit copy of every fp32 weight until its context ends (aten autocast_mode.cpp:
the cache holds leaves that require grad, as loaded weights do)."""


def generating(model: ModelSpec, r: Resolved) -> Term:
    """Return the temporaries of generation by transformers; nothing for other engines."""
    if r.engine is not EngineKind.TRANSFORMERS:
        return Term("activations", 0)
    base = base_weights(model, r)
    if base.quantized:
        size = DEQUANTIZED_BYTES * base.largest_quantized
        return Term("activations", size, "one dequantised weight {0:,} B", (size,), "bitsandbytes")
    if r.autocast and r.dtype == "fp32":
        size = AUTOCAST_BYTES * model.parameters
        return Term("activations", size, "autocast's 16-bit weights {0:,} B", (size,), "autocast")
    size = LOGIT_BYTES * model.vocab * r.sequences
    template = "{0} sequence(s) x {1:,} logits x {2} B"
    args = (r.sequences, model.vocab, LOGIT_BYTES)
    return Term("activations", size, template, args, "transformers generation/utils.py")
