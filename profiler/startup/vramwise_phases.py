"""Phases of a training loop, told by torch's global module and optimizer hooks.

Standard library only at import, Python 3.9 or newer: it is loaded both by vramwise itself and,
by file path, inside any program that `profile run` starts. `torch` is handed in.

  rollout   inside generate()               (see `wrap_generate`)
  score     an outermost forward without gradients
  forward   an outermost forward with gradients
  loss      from the decoder's end: head and loss, forward and backward, where logits are alive.
            Without a decoder to be found: from the end of the forward until backward starts
  backward  the rest of torch.autograd.backward, recomputed forwards included
  step      inside optimizer.step, and while gradients are clipped
  load      before the first of these
  other     between them: data, rewards, zero_grad, logging, saving
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

BETWEEN = "other"


class PhaseTracker:
    """Follows one process through its phases and reports every change."""

    def __init__(self, on_change: Callable[[str, str], None]) -> None:
        """`on_change(old, new)` is called when a phase ends; it must not raise."""
        self.phase = "load"
        self.steps = 0
        self._on_change = on_change
        self._local = threading.local()
        self._held: list[str] = []  # phases that cover what happens inside: rollout, backward, step
        self._roots: Any = weakref.WeakSet()
        self._optimizers: Any = weakref.WeakSet()
        self._undo: list[Callable[[], None]] = []
        self._torch: Any = None
        self._decoders: Any = weakref.WeakSet()
        self._decoder_ids: set[int] = set()
        self._awaited = 0  # gradients of hidden states that backward has not reached yet

    def install(self, torch: Any) -> None:
        """Register the global hooks; `remove` takes them away."""
        self._torch = torch
        module = torch.nn.modules.module
        optimizer = importlib.import_module("torch.optim.optimizer")
        compiler = getattr(torch, "compiler", None)
        asked: Callable[[], bool] | None = getattr(compiler, "is_compiling", None)
        self._is_compiling = asked or (lambda: False)
        self._undo += [
            module.register_module_forward_pre_hook(self._before_forward).remove,
            module.register_module_forward_hook(self._after_forward, always_call=True).remove,
            optimizer.register_optimizer_step_pre_hook(self._before_step).remove,
            optimizer.register_optimizer_step_post_hook(self._after_step).remove,
        ]
        # torch.compile warns that global hooks fire once more for its wrapper: ours may
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are")
        self._patch(torch.autograd, "backward", self._backward_begins)
        self._patch(torch.nn.utils, "clip_grad_norm_", lambda: "step")

    def remove(self) -> None:
        """Take every hook and patch away."""
        while self._undo:
            self._undo.pop()()

    def wrap_generate(self, owner: Any, name: str = "generate") -> None:
        """Count everything inside `owner.name(...)` as rollout."""
        if name in vars(owner):
            self._patch(owner, name, lambda: "rollout")

    def wrap_marker(self, owner: Any, name: str) -> None:
        """Follow a loop that names its own phases: `with owner.name(phase): ...`."""
        original = vars(owner)[name]

        @contextlib.contextmanager
        @functools.wraps(original)
        def marked(instance: Any, phase: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
            self.hold(phase)
            try:
                with original(instance, phase, *args, **kwargs) as value:
                    yield value
            finally:
                self.let_go(BETWEEN)

        setattr(owner, name, marked)
        self._undo.append(lambda: setattr(owner, name, original))

    def wrap_turn(self, owner: Any, name: str) -> None:
        """Follow a loop that goes on to another phase inside a marked one: `owner.name(phase)`."""
        original = vars(owner)[name]

        @functools.wraps(original)
        def turned(instance: Any, phase: str) -> None:
            self.change(phase)
            original(instance, phase)

        setattr(owner, name, turned)
        self._undo.append(lambda: setattr(owner, name, original))

    def know(self, models: Iterable[Any], optimizers: Iterable[Any] = ()) -> None:
        """Count these in before their first pass or step."""
        for model in models:
            self._add_root(model)
        for optimizer in optimizers:
            self._optimizers.add(optimizer)

    def models(self) -> list[Any]:
        """Outermost modules seen so far that hold parameters."""
        return list(self._roots)

    def optimizers(self) -> list[Any]:
        """Optimizers that have stepped."""
        return list(self._optimizers)

    def change(self, new: str) -> None:
        """Enter phase `new`."""
        old = self.phase
        if new != old:
            self.phase = new
            self._on_change(old, new)

    def hold(self, phase: str) -> None:
        """Enter `phase` and stay in it whatever runs inside, until `let_go`."""
        self._held.append(phase)
        if len(self._held) == 1:
            self.change(phase)

    def let_go(self, after: str | None = None) -> None:
        """Leave the phase of the matching `hold`; the outermost one goes on to `after`."""
        if self._held:
            self._held.pop()
        if not self._held and after:
            self.change(after)

    def _patch(self, owner: Any, name: str, phase: Callable[[], str]) -> None:
        """Hold `phase()` while `owner.name(...)` runs."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], self._torch.nn.Module):
                self._add_root(args[0])  # model.generate(): known before its first pass
            self.hold(phase())
            try:
                return original(*args, **kwargs)
            finally:
                self.let_go(BETWEEN)

        setattr(owner, name, wrapper)

        def undo() -> None:
            # someone may have wrapped ours meanwhile: then theirs stays
            if getattr(owner, name) is wrapper:
                setattr(owner, name, original)

        self._undo.append(undo)

    def _before_forward(self, module: Any, args: Any) -> None:
        if self._is_compiling():
            return
        local = self._local
        depth = getattr(local, "depth", 0)
        local.depth = depth + 1
        if depth == 0:
            self._enter(module)

    def _after_forward(self, module: Any, args: Any, output: Any) -> None:
        if self._is_compiling():
            return
        local = self._local
        depth = getattr(local, "depth", 1) - 1
        local.depth = max(0, depth)
        if self._held:
            return
        if id(module) in self._decoder_ids and self.phase == "forward":
            self._decoder_done(output)
        if depth <= 0:
            if self.phase == "forward":
                self.change("loss")
            elif self.phase == "score":
                self.change(BETWEEN)

    def _enter(self, module: Any) -> None:
        if module not in self._roots:
            # a loss module has no parameters: it is not a pass of a model
            if next(module.parameters(), None) is None:
                return
            self._add_root(module)
        if self._held:
            return
        self.change("forward" if self._torch.is_grad_enabled() else "score")

    def _add_root(self, module: Any) -> None:
        self._roots.add(module)
        decoder = _decoder_of(module)
        if decoder is not None:
            self._decoders.add(decoder)
            # ids are compared at every call of every module: cheaper than a set of weak references
            self._decoder_ids = {id(each) for each in self._decoders}

    def _decoder_done(self, output: Any) -> None:
        """The decoder has returned its hidden states: what follows is head and loss."""
        hidden = output if self._torch.is_tensor(output) else output[0]
        if self._torch.is_tensor(hidden) and hidden.requires_grad:
            self._awaited += 1
            hidden.register_hook(self._hidden_gradient)
            self.change("loss")

    def _backward_begins(self) -> str:
        return "loss" if self._awaited else "backward"

    def _hidden_gradient(self, gradient: Any) -> None:
        self._awaited = max(0, self._awaited - 1)
        if self._held and self.phase == "loss" and not self._awaited:
            self.change("backward")

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._optimizers.add(optimizer)
        self.hold("step")

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.steps += 1
        # left at once: gradients are still there, so what the step held is told apart exactly
        self.let_go(BETWEEN)


def _decoder_of(module: Any) -> Any:
    """Return the decoder stack of a transformers model, under adapters and wrappers; or None."""
    for unwrap in ("module", "get_base_model"):  # DistributedDataParallel, PEFT
        inner = getattr(module, unwrap, None)
        if inner is not None:
            module = inner if unwrap == "module" else inner()
    prefix = getattr(module, "base_model_prefix", "")
    decoder = getattr(module, prefix, None) if prefix else None
    return decoder if decoder is not module else None
