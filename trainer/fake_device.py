"""A device of any size, for a CPU: counts live storages and runs out of memory like a GPU would."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from planner.units import format_bytes


class FakeDevice(TorchDispatchMode):
    """Raise torch.OutOfMemoryError when tensors made inside, and those adopted, exceed `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self._window_bytes = 0
        self._sizes: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the op, then count what it made."""
        before = self.live_bytes
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, torch.Tensor):
                self.adopt(item)
        # only an allocation fails; what is over the limit already may be freed and looked at
        if self.live_bytes > max(before, self.limit_bytes):
            raise torch.OutOfMemoryError(
                f"{func}: {format_bytes(self.live_bytes)} of {format_bytes(self.limit_bytes)} in use"
            )
        return result

    def adopt(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, once."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        known = self._sizes.get(key)
        if known is not None:
            self.live_bytes += size - known[0]
        reference = weakref.ref(storage, lambda _: self._forget(key)) if known is None else known[1]
        self._sizes[key] = (size, reference)
        if known is None:
            self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._window_bytes = max(self._window_bytes, self.live_bytes)

    def take_peak(self) -> int:
        """Return the most that lived since the last call."""
        peak, self._window_bytes = self._window_bytes, self.live_bytes
        return peak

    def _forget(self, key: int) -> None:
        entry = self._sizes.pop(key, None)
        if entry is not None:
            self.live_bytes -= entry[0]
