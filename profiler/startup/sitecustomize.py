"""Start-up hook that `profile run` puts first on a child's PYTHONPATH. Standard library only.

The child may be any Python (3.9 or newer) in any environment, so nothing here imports vramwise.
It first hands over to the sitecustomize module that it hides, then waits for torch: until the
program imports torch nothing is patched and nothing is written.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))


def _chain() -> None:
    """Run the sitecustomize that this file hides, as if this one were not there."""
    paths = [p for p in sys.path if os.path.abspath(p or os.getcwd()) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


class _WaitFor:
    """A meta path finder that calls `ready(module)` right after a watched module is imported."""

    def __init__(self, watched: dict[str, Callable[[ModuleType], None]]) -> None:
        self.watched = watched  # {module name: callable(module)}
        self.busy: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.watched or name in self.busy:
            return None
        self.busy.add(name)  # find the real spec without meeting ourselves again
        try:
            spec = importlib.util.find_spec(name)
        except Exception:
            return None
        finally:
            self.busy.discard(name)
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return None
        original, ready, loader = spec.loader.exec_module, self.watched[name], spec.loader

        def exec_module(module: ModuleType) -> None:
            original(module)
            # the loader is an instance made for this one import: put it back as it was
            del loader.exec_module
            ready(module)

        try:
            loader.exec_module = exec_module  # type: ignore[method-assign]
        except AttributeError:
            return None
        return spec


def _arm() -> None:
    """Load the recorder by file path and let it wait for the modules that it hooks."""
    path = os.path.join(_HERE, "vramwise_child.py")
    spec = importlib.util.spec_from_file_location("vramwise_child", path)
    assert spec is not None
    assert spec.loader is not None
    child = importlib.util.module_from_spec(spec)
    sys.modules["vramwise_child"] = child
    spec.loader.exec_module(child)
    sys.meta_path.insert(0, _WaitFor(child.watched()))


try:
    _chain()
finally:
    if os.environ.get("VRAMWISE_JOURNAL"):
        try:
            _arm()
        except Exception as error:  # a profiler must never keep the program from starting
            sys.stderr.write(f"vramwise: no hooks: {error!r}\n")
