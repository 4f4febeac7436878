"""Follows every storage a step allocates: which op made it, in which module and phase, and when it died.

A `StorageTracker` is a torch dispatch mode. It sees each operator below autograd, so forward,
backward, recomputation and optimizer ops alike, with real or with fake tensors. A storage is an
event when it first appears in an output, and another when torch drops it: no reference is held.
What a kernel allocates inside itself is invisible here; `profiler.cuda_behaviour` states it.
"""

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from planner.errors import VramwiseError
from profiler.dtensors import is_wrapper, local

HOST = "host"
DEVICE = "device"


class TraceTimeoutError(VramwiseError):
    """The trace ran past its time limit."""


@dataclass(slots=True, eq=False)
class Block:
    """One storage: what it is, and who asked for it."""

    number: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    op: str
    module: str
    phase: str
    place: str = DEVICE
    term: str = ""
    """Set when its role is known for sure (parameter, gradient, optimizer state)."""
    stream: int = 0
    """0: the stream that computes; 1 and on: FSDP2's own, whose blocks serve no other."""


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """A block came (`alloc`) or went, in `phase`, while `op` of `module` ran."""

    alloc: bool
    block: Block
    phase: str
    op: str
    module: str


_aten = torch.ops.aten
_IN_PLACE: dict[str, Any] = {
    "aten.add.Tensor": _aten.add_.Tensor,
    "aten.scatter_add.default": _aten.scatter_add_.default,
    "aten.scatter.src": _aten.scatter_.src,
    "aten.scatter.value": _aten.scatter_.value,
    "aten.index_put.default": _aten.index_put_.default,
    "aten.index_add.default": _aten.index_add_.default,
    "aten.masked_fill.Scalar": _aten.masked_fill_.Scalar,
}
_LONE_TENSOR, _LONE_STORAGE = 4, 2
"""References to a tensor that one C++ variable of autograd holds, while a mode looks at it (a tensor
held from Python has one less, one held twice one more); to its storage: the tensor, the Python
storage."""


def _dense(tensor: torch.Tensor) -> bool:
    """Whether the strides cover the storage without gaps or overlap."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda p: p[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


Workspace = Callable[[tuple[Any, ...], dict[str, Any], Any], Sequence[int]]
"""(args, kwargs, result) -> bytes of each temporary the CUDA kernel allocates and frees."""


class StorageTracker(TorchDispatchMode):
    """Record allocations and frees while active; `events` is the result.

    `workspaces` maps an op name ("aten.mm.default") to the temporaries its CUDA kernel makes.
    `in_place=False` counts autograd's accumulations out of place, as torch runs them under any
    dispatch mode (torch's MemTracker, for one): figures published from such runs are higher.
    Raises TraceTimeoutError when `deadline_s` (time.monotonic) passes.
    """

    def __init__(
        self,
        *,
        workspaces: dict[str, Workspace] | None = None,
        deadline_s: float | None = None,
        in_place: bool = True,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[BlockEvent] = []
        self.phase = "load"
        self.ops = 0
        self.last_op = ""
        self._workspaces = workspaces or {}
        self._deadline_s = deadline_s
        self._in_place = _IN_PLACE if in_place else {}
        self.on_op: Callable[[int, str], None] | None = None
        """Called now and then with the operators so far and the phase, for a progress bar."""
        self._live: dict[int, tuple[Block, weakref.ref[Any]]] = {}
        self._modules: list[tuple[int, str]] = []
        self._module_of_node: dict[int, str] = {}
        self._names: dict[Any, str] = {}
        self._count = 0
        self._stopped = False
        self._host_next = 0
        self._unseen = 0
        self._streams = [torch.cpu.current_stream()]
        self._purpose = ""
        self.moves_to_host: bool | None = None
        """Where a `.to(device)` leads, if it is FSDP2's: see `moving`."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the op, then account for the storages in its result."""
        kwargs = kwargs or {}
        if self._unseen:
            return func(*args, **kwargs)
        if any(map(is_wrapper, types)):
            return NotImplemented  # it comes back as the operator of this rank's part
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = str(func)
        if name == "prim.device.default":  # C++ asks where it must not see an exception: no op
            return func(*args, **kwargs)
        self.ops += 1
        self.last_op = name
        if not self.ops & 255:
            self._check_time()
        in_place = self._reused(name, args)
        result = (in_place or func)(*args, **kwargs)
        self._see(result, name)
        workspace = self._workspaces.get(name)
        if workspace is not None:
            self.temporary(workspace(args, kwargs, result), op=name)
        return result

    @contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        """Attribute what happens inside to phase `name`."""
        before, self.phase = self.phase, name
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Storages first seen inside live in host memory, not on the device."""
        self._host_next += 1
        try:
            yield
        finally:
            self._host_next -= 1

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Take no notice of what happens inside: nothing of it is allocated in a real run."""
        self._unseen += 1
        try:
            yield
        finally:
            self._unseen -= 1

    @contextmanager
    def allocating(self, term: str) -> Iterator[None]:
        """Storages first seen inside belong to `term`."""
        before, self._purpose = self._purpose, term
        try:
            yield
        finally:
            self._purpose = before

    @contextmanager
    def moving(self, *, to_host: bool) -> Iterator[None]:
        """Inside, `.to(device)` is FSDP2's: it leaves a gradient on the host, or fetches a shard from it."""
        before, self.moves_to_host = self.moves_to_host, to_host
        try:
            yield
        finally:
            self.moves_to_host = before

    def resized(self, storage: Any, size: int, *, term: str) -> None:
        """Record a storage that was given `size` bytes in place; 0 gives its memory back."""
        key = storage._cdata
        entry = self._live.get(key)
        if self._unseen or (entry is not None and entry[0].bytes == size):
            return
        if entry is not None:
            self._forget(key, op="resize")
        if size:
            block = Block(
                self._next(), size, (size,), "byte", "resize", self.where(), self.phase, term=term
            )
            self._hold(storage, block)

    @contextmanager
    def module_names(self, model: torch.nn.Module) -> Iterator[None]:
        """Attribute ops to the modules of `model` while active, also in backward."""
        names = {id(module): name for name, module in model.named_modules()}

        def enter(module: torch.nn.Module, _inputs: Any) -> None:
            name = names.get(id(module))
            if name is not None:
                self._modules.append((id(module), name))

        def leave(module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
            # Non-reentrant checkpointing leaves modules by an exception, so pop to the module.
            for depth in range(len(self._modules) - 1, -1, -1):
                if self._modules[depth][0] == id(module):
                    del self._modules[depth:]
                    return

        hooks = (
            torch.nn.modules.module.register_module_forward_pre_hook(enter),
            torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def adopt(self, tensor: torch.Tensor, *, term: str, module: str, op: str = "load") -> None:
        """Give a known tensor (parameter, gradient, state) its term; record it if it is new."""
        block = self.block_of(tensor)
        if block is None:
            block = self._add(tensor, op)
        if block is not None:
            block.term = term
            block.module = module

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """Return the block behind `tensor`, if it was seen."""
        entry = self._live.get(local(tensor).untyped_storage()._cdata)
        return entry[0] if entry else None

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` was seen in host memory."""
        block = self.block_of(tensor)
        return block is not None and block.place == HOST

    def temporary(self, sizes: Sequence[int], *, op: str) -> None:
        """Record memory that a kernel takes and gives back before it returns."""
        module = self.where()
        blocks = [
            Block(self._next(), size, (size,), "byte", op, module, self.phase)
            for size in sizes
            if size
        ]
        for alloc in (True, False):
            self.events.extend(BlockEvent(alloc, block, self.phase, op, module) for block in blocks)

    def standing(self, size: int, *, op: str, term: str) -> None:
        """Record memory that torch takes once and keeps, if any: a cuBLAS workspace."""
        if not size:
            return
        block = Block(self._next(), size, (size,), "byte", op, "", self.phase, term=term)
        self.events.append(BlockEvent(True, block, self.phase, op, ""))

    def stop(self) -> None:
        """Record no more: what dies from here on is Python tearing the run down."""
        self._stopped = True

    def live_blocks(self) -> list[Block]:
        """Return the blocks alive now."""
        return [block for block, _ in self._live.values()]

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _check_time(self) -> None:
        if self.on_op is not None:
            self.on_op(self.ops, self.phase)
        if self._deadline_s is not None and time.monotonic() > self._deadline_s:
            raise TraceTimeoutError(
                f"the trace ran out of time in phase {self.phase}, module {self.where() or '?'}, "
                f"after {self.ops} operators",
                hint="raise --time-limit, or trace fewer layers with --layers",
            )

    def where(self) -> str:
        """Return the module whose op runs: from the stack, or from the node being differentiated."""
        if self._modules:
            return self._modules[-1][1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        return self._module_of_node.get(node._sequence_nr(), "")

    def _reused(self, name: str, args: tuple[Any, ...]) -> Any:
        """Return the in-place form of an op that autograd runs in place when no mode is active.

        The engine adds a gradient into its buffer, and a backward formula scatters into fresh
        zeros, in place if nobody else holds the target (autograd/input_buffer.cpp,
        can_accumulate_inplace; FunctionsManual.cpp, areAnyTensorSubclassLike). Under a dispatch
        mode torch takes the out-of-place branch: memory that no real run allocates.
        """
        in_place = self._in_place.get(name)
        if (
            in_place is None
            or self._modules
            or torch.is_grad_enabled()
            or torch._C._current_graph_task_id() == -1
        ):
            return None
        target = args[0]
        storage = target.untyped_storage()
        alone = (
            target._use_count() == _LONE_TENSOR
            and torch._C._storage_Use_Count(storage._cdata) == _LONE_STORAGE
        )
        return in_place if alone and _dense(target) else None

    def _see(self, result: Any, name: str) -> None:
        if isinstance(result, torch.Tensor):
            self._add(result, name)
        elif isinstance(result, (tuple, list)):
            for item in result:
                if isinstance(item, torch.Tensor):
                    self._add(item, name)
        if self._modules:
            self._module_of_node[torch.autograd._get_sequence_nr() - 1] = self._modules[-1][1]

    def _add(self, tensor: torch.Tensor, op: str) -> Block | None:
        tensor = local(tensor)
        if tensor.device.type == "meta":
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        entry = self._live.get(key)
        size = storage.nbytes()
        if entry is not None:
            block = entry[0]
            if block.bytes == size:
                return block
            self._forget(key, op="resize")
        if not size:
            return None
        block = Block(
            self._next(),
            size,
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            op,
            self.where(),
            self.phase,
            HOST if self._host_next else DEVICE,
            self._purpose,
            self._stream(),
        )
        self._hold(storage, block)
        return block

    def _stream(self) -> int:
        """Return the number of the stream that is current: a CPU's streams only have names for the code."""
        current = torch.cpu.current_stream()
        if current is self._streams[0]:
            return 0
        if current not in self._streams:
            self._streams.append(current)
        return self._streams.index(current)

    def _hold(self, storage: Any, block: Block) -> None:
        key = storage._cdata
        self._live[key] = (block, weakref.ref(storage, lambda _: self._forget(key)))
        self.events.append(BlockEvent(True, block, self.phase, block.op, block.module))

    def _forget(self, key: int, *, op: str = "") -> None:
        entry = self._live.pop(key, None)
        if entry is not None and not self._stopped:
            self.events.append(
                BlockEvent(False, entry[0], self.phase, op or self.last_op, entry[0].module)
            )
