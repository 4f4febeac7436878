"""Where CUDA allocates or saves differently from the CPU that the trace runs on.

The trace's tensors say "cpu", because a CPU build of torch has no CUDA autograd queue. These cases
would follow the CPU; `CudaBehaviour` (a torch function mode) turns each to CUDA's:

* `F.scaled_dot_product_attention`: CUDA's choice of backend and what it saves (cuda_attention).
* dropout: one fused kernel that keeps a 1-byte mask (ATen/native/Dropout.cpp), not a mask in
  the input's dtype.
* autocast: `torch.autocast("cuda")` runs as the CPU's, whose half-precision list is the same for
  every op a transformer uses; CUDA's longer fp32 list (ATen/autocast_mode.h, AT_FORALL_FP32 and
  AT_FORALL_FP32_SET_OPT_DTYPE) is applied here.
* softmax in fp32 of fp16 scores reads them as they are; the CPU makes an fp32 copy first.
* `F.rms_norm`: CUDA has one fused kernel that saves the input and 1/rms.
* optimizers: foreach is CUDA's default, not the CPU's; subjects pass `foreach=True` or `fused=True`.
* values: fake tensors have none. Traced batches are unpacked and full (or, asked for, padded), so a mask
  check that asks `all(...)` is answered, the largest position is the length less one, and a loss or norm that
  is read back is 1.0; any other branch on a value ends the trace with a message.
* placement: `.cpu()`, `.to("cpu")` and pinned memory copy to the host, where they do not count as
  device memory; `.to("cuda")` or `.to(device)` brings a fresh device copy.

`workspaces()` states what kernels take inside themselves.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from planner.terms.embedding import backward_blocks
from profiler import cuda_attention, cuda_linear
from profiler.storages import HOST, StorageTracker, Workspace

_F = torch.nn.functional
_FP32_FUNCTIONS: frozenset[Any] = frozenset(
    getattr(owner, name)
    for owner, names in (
        (
            torch,
            "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow layer_norm "
            "rms_norm group_norm cosine_similarity kl_div dist renorm logsumexp prod log_softmax "
            "cumprod cumsum sum norm",
        ),
        (
            torch.Tensor,
            "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ "
            "logsumexp prod log_softmax cumprod cumsum sum norm",
        ),
        (
            _F,
            "softplus layer_norm rms_norm group_norm cosine_similarity nll_loss cross_entropy l1_loss smooth_l1_loss "
            "huber_loss mse_loss binary_cross_entropy_with_logits kl_div",
        ),
        (torch.linalg, "vector_norm matrix_norm"),
    )
    for name in names.split()
)
_CPU_DEVICES = ("cpu", torch.device("cpu"))


def _is_cuda(device: Any) -> bool:
    return device is not None and str(device).split(":")[0] == "cuda"


class CudaBehaviour(TorchFunctionMode):
    """Make what runs inside allocate as on CUDA; `tracker` learns what goes to the host.

    Without `kernels` a CPU's own run: all the rest stands.
    """

    def __init__(
        self, tracker: StorageTracker, *, padded: bool = False, kernels: bool = True
    ) -> None:
        super().__init__()
        self._tracker = tracker
        self._padded = padded
        self._saved: list[tuple[Any, str, Any]] = []
        self._special: dict[Any, Callable[..., Any]] = {
            **(_KERNELS if kernels else {}),
            torch.Tensor.cpu: self._to_host,
            torch.Tensor.cuda: self._to_device,
            torch.Tensor.pin_memory: self._to_host,
            torch.Tensor.to: self._to,
            torch.Tensor.all: partial(_yes, torch.Tensor.all),
            torch.all: partial(_yes, torch.all),
            torch.max: _max,
            torch.Tensor.max: _max,
            torch.Tensor.item: partial(_number, torch.Tensor.item),
            torch.Tensor.__float__: partial(_number, torch.Tensor.__float__),
            torch.Tensor.__bool__: _truth,
        }

    def __enter__(self) -> Any:
        """Also answer "is autocast on?" as CUDA would: code asks without naming a device."""
        asked, run = torch.is_autocast_enabled, torch.autograd._engine_run_backward
        for owner, name, value in (
            (torch, "is_autocast_enabled", lambda *_: asked("cpu")),
            (torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cpu")),
            (torch.autograd, "_engine_run_backward", partial(self._engine, run)),
            *_masking(padded=self._padded),
            *cuda_linear.replacements(),
        ):
            self._saved.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """Restore torch's own answers."""
        while self._saved:
            setattr(*self._saved.pop())
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call CUDA's counterpart of `func`."""
        kwargs = kwargs or {}
        if kwargs:
            if kwargs.get("pin_memory"):
                with self._tracker.on_host():
                    return func(*args, **{**kwargs, "pin_memory": False})
            if func is not torch.Tensor.to and _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": "cpu"}
        if func in _FP32_FUNCTIONS and torch.is_autocast_enabled("cpu"):
            args = tuple(_as_fp32(argument) for argument in args)
        special = self._special.get(func)
        return (special or func)(*args, **kwargs)

    def _engine(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A mode is off inside its own handler, but checkpoints run forward code in backward.
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            return run(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        target = kwargs.get("device", args[0] if args else None)
        if isinstance(target, torch.device) and self._tracker.moves_to_host is not None:
            target = HOST if self._tracker.moves_to_host else torch.device("cuda")
        elif isinstance(target, torch.Tensor):
            target = self._place(target)
        elif target in _CPU_DEVICES:
            # Modules that ask for "their" device say cpu here; only a literal copy asks for a string.
            target = HOST if isinstance(target, str) else self._place(tensor)
        if target == HOST:
            return self._to_host(tensor)
        if _is_cuda(target):
            rest = {name: value for name, value in kwargs.items() if name != "device"}
            moved = self._to_device(tensor)
            return moved.to(*args[1:], **rest) if args[1:] or rest else moved
        return tensor.to(*args, **kwargs)

    def _place(self, tensor: torch.Tensor) -> str:
        block = self._tracker.block_of(tensor)
        return block.place if block is not None else ""

    def _to_host(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if self._place(tensor) == HOST:
            return tensor
        with self._tracker.on_host():
            return tensor.clone()

    def _to_device(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor.clone() if self._place(tensor) == HOST else tensor


def _as_fp32(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor) and argument.dtype in (torch.bfloat16, torch.float16):
        return argument.float()
    return argument


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]


def _functional_softmax(
    input: torch.Tensor,
    dim: int = -1,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    return _softmax(input, dim, dtype)


def _softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """CUDA's autocast gives it fp32 results, and its kernel reads fp16 for them without a copy.

    aten/src/ATen/native/SoftMax.cpp, softmax: half_to_float for fp16 on CUDA, anything else is cast first.
    """
    if dtype is None and torch.is_autocast_enabled("cpu") and input.is_floating_point():
        dtype = torch.float32
    if dtype is torch.float32 and input.dtype is torch.float16:
        result: torch.Tensor = HalfSoftmax.apply(input, dim)  # type: ignore[no-untyped-call]
        return result
    return torch.softmax(input, dim, dtype=dtype)


class HalfSoftmax(torch.autograd.Function):
    """fp16 scores -> fp32 probabilities in one kernel; its gradient is fp16 again, in one kernel."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, dim: int) -> torch.Tensor:
        """Allocate the result, which is saved."""
        ctx.dim = dim
        result = torch.empty_like(scores, dtype=torch.float32)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Allocate gradient * result in passing, and the fp16 gradient."""
        (result,) = ctx.saved_tensors
        gradient = torch.empty_like(result, dtype=torch.float16)
        product = torch.empty_like(result)
        del product
        return gradient, None


def _rms_norm(
    input: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    normed: torch.Tensor
    normed, _ = torch.ops.aten._fused_rms_norm(input, list(normalized_shape), weight, eps)
    return normed


def _masking(*, padded: bool) -> tuple[tuple[Any, str, Any], ...]:
    """Let transformers decide about masks as in a real run: it takes fake tensors for an export."""
    module = sys.modules.get("transformers.masking_utils")
    if module is None:
        return ()
    all_ones = partial(_answered, module.fast_all, answer=not padded)
    return (module, "is_tracing", lambda *_: False), (module, "fast_all", all_ones)


def _yes(check: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    return _answered(check, *args, answer=True, **kwargs)


def _answered(
    check: Callable[..., torch.Tensor], *args: Any, answer: bool, **kwargs: Any
) -> torch.Tensor:
    result = check(*args, **kwargs)
    result._answer = answer  # type: ignore[attr-defined]
    return result


def _max(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Answer how far the positions of a batch reach: long-context rotary code branches on it."""
    result = torch.Tensor.max(input, *args, **kwargs)
    if args or kwargs or input.dtype != torch.int64 or not isinstance(input, FakeTensor):
        return result
    return torch.tensor(input.shape[-1] - 1)


def _number(read: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    """Losses and norms are read back as 1.0: finite, so the step goes on; integers stay unknown."""
    known = not isinstance(tensor, FakeTensor) or tensor.constant is not None
    return read(tensor) if known or not tensor.dtype.is_floating_point else 1.0


def _truth(tensor: torch.Tensor) -> bool:
    """Answer what `_answered` knows: one sequence a row, and a mask of ones unless rows are padded."""
    answer: bool | None = getattr(tensor, "_answer", None)
    return torch.Tensor.__bool__(tensor) if answer is None else answer


def workspaces() -> dict[str, Workspace]:
    """Return, by op, the temporaries its CUDA kernel allocates and frees inside itself."""
    return {
        "aten.embedding_dense_backward.default": _embedding_backward,
        "aten._softmax_backward_data.default": _softmax_backward,
        "bitsandbytes.gemm_4bit.default": _gemm_4bit,
        "bitsandbytes.dequantize_4bit.default": lambda args, kwargs, result: (),
    }


def _embedding_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor
) -> tuple[int, ...]:
    """Return what CUDA's kernel allocates to sort many tokens."""
    return backward_blocks(args[1].numel(), result.shape[0], result.shape[1])


def _softmax_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor
) -> tuple[int, ...]:
    """Return gradient * result (aten/native/cuda/SoftMax.cu, softmax_backward_cuda_out); the CPU has none."""
    gradient, output = args[:2]
    width = torch.promote_types(gradient.dtype, output.dtype).itemsize
    return (width * output.numel(),)


def _gemm_4bit(
    args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor
) -> tuple[int, ...]:
    """With more than 1,536 rows bitsandbytes dequantises the weight, then calls F.linear.

    bitsandbytes/backends/cuda/ops.py: the weight [N, K] in the input's dtype and, double quantised,
    its fp32 block maxima (one for 64 weights).
    """
    activations, _, (rows, columns) = args[:3]
    elements = rows * columns
    nested = kwargs.get("absmax_8bit") is not None
    return elements * activations.element_size(), 4 * elements // 64 if nested else 0


_KERNELS: dict[Any, Callable[..., Any]] = {
    _F.scaled_dot_product_attention: cuda_attention.attention,
    _F.dropout: _dropout,
    _F.softmax: _functional_softmax,
    torch.softmax: _softmax,
    torch.Tensor.softmax: _softmax,
    _F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
}
"""Functions whose CUDA kernels keep or make other tensors than a CPU's."""
