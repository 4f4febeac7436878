"""A chosen plan as another tool's settings: only keys that exist in the stated version."""

from collections.abc import Callable

from planner.errors import UnknownNameError
from planner.exporters import axolotl, llamafactory, trl, vllm
from planner.exporters.common import Exported
from planner.run.recipe import RunFile

__all__ = ["EXPORTERS", "Exported", "export_run"]

EXPORTERS: dict[str, Callable[..., Exported]] = {
    "trl": trl.export,
    "axolotl": axolotl.export,
    "llamafactory": llamafactory.export,
    "vllm": vllm.export,
}


def export_run(run: RunFile, tool: str, *, version: str | None = None) -> Exported:
    """Return `run` as settings of `tool`; raises UnsupportedError for a task it does not have."""
    exporter = EXPORTERS.get(tool.lower().replace("-", "").replace("_", ""))
    if exporter is None:
        raise UnknownNameError("tool", tool, EXPORTERS, hint=", ".join(EXPORTERS))
    return exporter(run, version=version)
