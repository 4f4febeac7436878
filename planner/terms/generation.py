"""What `model.generate` needs beside weights and cache: of one new token, and of the prompts before it."""

from planner.dtypes import ELEMENT_BYTES, normal_dtype
from planner.layer.costs import no_grad_costs
from planner.layer.tape import largest
from planner.models.spec import ModelSpec
from planner.run.recipe import EngineKind, Task
from planner.run.resolved import Resolved
from planner.terms.activations import op_settings
from planner.terms.counts import base_weights
from planner.terms.kv_cache import (
    has_window,
    layer_bytes_per_token,
    rollout_sequences,
    sequence_bytes,
    tokens_held,
)
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


def gathered_to_generate(model: ModelSpec, r: Resolved, whole: Term) -> Term:
    """Return the weights that are whole while transformers generate; `whole`: as a forward has them."""
    if not (r.placement.window and r.switches.generates_gathered):
        return whole
    size, ranks = base_weights(model, r).total, r.placement.weight_shards
    text = "all of the model, gathered of {0} ranks to generate {1:,} B"
    return Term("weights", size, text, (ranks, size), "TRL unwrap_model_for_generation")


def rolling(model: ModelSpec, r: Resolved, *, prompts: int = 0) -> Term:
    """Return what a rollout by transformers needs beside its cache at full length.

    Two moments: the prompts' forward, when the cache is as long as they are, and the last token, when every
    layer's keys (and then its values) are copied to one token more (cache_utils.py, DynamicLayer.update). Where
    they are written in place, a layer's prompts are beside it while its rows are made of them. `prompts`: how many different ones, where it is not a group's one.
    """
    if r.engine is not EngineKind.TRANSFORMERS or r.task is not Task.GRPO:
        return Term("activations", 0)
    rows, chunk = rollout_sequences(r), r.switches.prefill_tokens
    full = rows * sequence_bytes(model, r.seq_tokens, r.kv_dtype)
    # our engine reads each prompt once, so many tokens at a time; generate repeats it for every completion
    different = (prompts or -(-rows // max(1, r.num_generations))) if chunk else rows
    tokens = different * r.prompt_tokens
    cache = different * sequence_bytes(model, r.prompt_tokens, r.kv_dtype)
    tokens = min(tokens, chunk) if chunk else tokens
    settings = op_settings(model, r)
    # the forward holds the embeddings' output beside the layer at work
    prefill = cache + tokens * model.hidden * settings.residual + _one_layer(model, r, tokens)
    in_place = r.switches.generates_in_place
    spread = cache // model.num_layers if in_place and different < rows else 0
    longer = rows * _window_copy(model, r) if in_place else full // (2 * model.num_layers)
    # no weight is dequantised while keys are copied
    token = max(longer + _one_layer(model, r, rows, constants=False), _one_layer(model, r, rows))
    size = max(prefill, full + spread, full + token) - full
    if size == token:
        text = "a layer's keys copied {0:,} B + one layer of a forward of {1:,} new tokens"
        if not longer:
            text = "one layer of a forward of {1:,} new tokens"
        return Term("activations", size, text, (longer, rows), "transformers cache_utils.py")
    if size == spread:
        text = "a layer's prompts {0:,} B, of which {1:,} rows are made"
        return Term("activations", size, text, (spread, rows), "trainer/engines/cache.py")
    text = "a forward of {0:,} prompt tokens {1:,} B, above what the cache grows by {2:,} B"
    args = (tokens, prefill - cache, full - cache)
    return Term("activations", size, text, args, "transformers generation/utils.py")


def _window_copy(model: ModelSpec, r: Resolved) -> int:
    """Return what a sequence's keys of a layer with a window take, which are copied for every token."""
    element = ELEMENT_BYTES[normal_dtype(r.kv_dtype, field="kv_dtype")]
    windows = (
        int(tokens_held(layer, r.seq_tokens) * layer_bytes_per_token(layer, element)) // 2
        for layer in model.layers
        if has_window(layer)
    )
    return max(windows, default=0)


def _one_layer(model: ModelSpec, r: Resolved, tokens: int, *, constants: bool = True) -> int:
    """Return what a layer holds at most for `tokens`; without `constants`, nothing that no token is in."""
    settings = op_settings(model, r, tokens)
    points = (
        largest(no_grad_costs(layer, model.hidden, settings), tokens) for layer in model.layers
    )
    return max(point.at(tokens) if constants else int(point.per_token * tokens) for point in points)
