"""Keep transformers' classes as they were while vLLM's own model of them is decorated.

Architectures without an implementation in vLLM (SmolLM3, Olmo, GPT-NeoX, Phi, StarCoder2, GLM-4 ...)
run there on transformers' modules, and vLLM changes those classes in place: `__init__` asks for
vLLM's config and `__call__` for attributes that its `__init__` set
(model_executor/models/transformers/base.py and compilation/decorators.py, 0.32). The policy in the
same process is of the same class, so its next forward would raise AttributeError and no second
model could be built.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch


class DecoratedClasses:
    """The classes vLLM decorated while an engine started, with what they were before."""

    def __init__(self) -> None:
        self._before: dict[type, tuple[tuple[type, ...], dict[str, Any]]] = {}

    def note(self, cls: type) -> None:
        """Remember a class as it is now; the first time counts."""
        self._before.setdefault(cls, (cls.__bases__, dict(vars(cls))))

    def give_back(self, model: torch.nn.Module | None) -> None:
        """Give vLLM's own modules a subclass with what was added, and the class its old state."""
        for cls, (bases, attributes) in self._before.items():
            added = {
                key: value
                for key, value in vars(cls).items()
                if attributes.get(key) is not value and key not in ("__dict__", "__weakref__")
            }
            extra = tuple(base for base in cls.__bases__ if base not in bases)
            for key in added:
                if key in attributes:
                    setattr(cls, key, attributes[key])
                else:
                    delattr(cls, key)
            cls.__bases__ = bases
            if model is None:
                continue
            twin = type(cls.__name__, (cls, *extra), {**added, "__module__": cls.__module__})
            for module in model.modules():
                if type(module) is cls:
                    module.__class__ = twin
        self._before.clear()


@contextmanager
def own_classes() -> Iterator[DecoratedClasses]:
    """Note every class of transformers that vLLM decorates inside; give_back() undoes it.

    Left without give_back() (the engine did not start), the classes are given back as well.
    """
    from vllm.model_executor.models.transformers.base import Base

    noted, base = DecoratedClasses(), cast("Any", Base)
    decorate = getattr(base, "_decorate_cls_for_torch_compile", None)
    if decorate is None:  # a vLLM that decorates elsewhere, or not at all: nothing is noted
        yield noted
        return

    def noting(self: Any, cls: type, *args: Any, **kwargs: Any) -> None:
        noted.note(cls)
        decorate(self, cls, *args, **kwargs)

    base._decorate_cls_for_torch_compile = noting
    try:
        yield noted
    finally:
        base._decorate_cls_for_torch_compile = decorate
        noted.give_back(None)
