"""What older releases of transformers, TRL and bitsandbytes kept alive, where it differs from today's.

Read in their sources; `StepOptions.transformers` and its neighbours switch them on:

* transformers < 4.46, `ForCausalLM.forward`: the logits are upcast inside forward (the 16-bit ones
  die), a contiguous shifted fp32 copy goes to the cross-entropy: 12 bytes a logit.
* transformers 4.46 to 4.48, `loss_utils.ForCausalLMLoss`: forward holds the 16-bit logits while the
  loss upcasts, shifts and copies: 14 bytes a logit. 4.49 shifts the labels instead (pull 35646).
* GPTBigCode < 4.49 computes its own loss: a shifted copy in the logits' dtype, no upcast.
* transformers < 4.54, `sdpa_attention_forward`: keys and values are repeated for every query head.
* transformers < 5 checkpoints reentrantly: no early stop in the recomputation.
* bitsandbytes 0.43, `MatMul4Bit`: the input waits on the node until the graph is freed.
* TRL 0.11 to 0.13, `peft_module_casting_to_bf16`: only norms stay in fp32 after k-bit preparation.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from profiler.subjects.options import StepOptions

UPCAST_IN_FORWARD = (4, 46)
LABELS_SHIFTED = (4, 49)


def release(text: str) -> tuple[int, int]:
    """Return (major, minor) of a version; '' is the installed release, newer than any named here."""
    if not text:
        return (99, 0)
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def use_loss_of(model: Any, options: StepOptions) -> None:
    """Give `model` the loss of the release that `options.transformers` names."""
    version = release(options.transformers)
    if version >= LABELS_SHIFTED:
        return
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if base.config.model_type == "gpt_bigcode":
        base.loss_function = shifted_loss
        return
    base.loss_function = upcast_shifted_loss
    if version < UPCAST_IN_FORWARD:
        base.get_output_embeddings().register_forward_hook(_upcast_output)


def _upcast_output(_module: Any, _inputs: Any, logits: torch.Tensor) -> torch.Tensor:
    return logits.float()


def upcast_shifted_loss(
    logits: torch.Tensor, labels: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    """logits [B, T, V], labels [B, T] -> mean cross-entropy of the fp32 logits, shifted and copied."""
    logits = logits.float()
    return shifted_loss(logits, labels)


def shifted_loss(logits: torch.Tensor, labels: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """logits [B, T, V], labels [B, T] -> mean cross-entropy of a contiguous shifted copy."""
    shifted = logits[..., :-1, :].contiguous()
    targets = labels[..., 1:].contiguous()
    return torch.nn.functional.cross_entropy(
        shifted.view(-1, shifted.shape[-1]), targets.view(-1), ignore_index=-100
    )


def cast_all_but_norms(model: torch.nn.Module) -> None:
    """Cast embeddings and head back to bf16 after k-bit preparation; norms stay in fp32."""
    for name, module in model.named_modules():
        if "norm" in name or isinstance(module, torch.nn.LayerNorm):
            module.float()
        elif any(word in name for word in ("lm_head", "embed_tokens", "wte", "wpe")):
            weight = getattr(module, "weight", None)
            if weight is not None and weight.dtype == torch.float32:
                module.to(torch.bfloat16)


@contextlib.contextmanager
def matmul_keeps_input(*, on: bool) -> Iterator[None]:
    """Let 4-bit matmuls hold their input on the node, as bitsandbytes 0.43 did."""
    if not on:
        yield
        return
    from bitsandbytes.autograd._functions import MatMul4Bit

    function: Any = MatMul4Bit
    plain = function.forward

    def keeping(ctx: Any, inputs: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        result: torch.Tensor = plain(ctx, inputs, *arguments, **named)
        if ctx.needs_input_grad[0]:
            ctx.kept_input = inputs
        return result

    function.forward = staticmethod(keeping)
    try:
        yield
    finally:
        function.forward = staticmethod(plain)


@contextlib.contextmanager
def sdpa_repeats_kv(*, on: bool) -> Iterator[None]:
    """Hand SDPA keys and values repeated for every query head, as transformers did before 4.54."""
    if not on:
        yield
        return
    from transformers.integrations import sdpa_attention

    module: Any = sdpa_attention
    plain = module.use_gqa_in_sdpa
    module.use_gqa_in_sdpa = lambda *_, **__: False
    try:
        yield
    finally:
        module.use_gqa_in_sdpa = plain
