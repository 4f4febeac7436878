"""A chosen plan as another tool's settings: only keys that exist in the stated version."""

from collections.abc import Callable

from planner.errors import UnknownNameError
from planner.exporters import axolotl, llamafactory, trl, vllm
from planner.exporters.common import Exported
from planner.models.catalogue import load_catalogue, model_names
from planner.run.framework import pick, spelled
from planner.run.recipe import RunFile

__all__ = ["EXPORTERS", "Exported", "export_run"]

EXPORTERS: dict[str, Callable[..., Exported]] = {
    "trl": trl.export,
    "axolotl": axolotl.export,
    "llamafactory": llamafactory.export,
    "vllm": vllm.export,
}


def export_run(run: RunFile, tool: str, *, version: str | None = None) -> Exported:
    """Return `run` as settings of `tool`; raises UnsupportedError for a task it does not have.

    Without a version, of the one that the recipe's framework names, if that is the tool.
    """
    name = tool.lower().replace("-", "").replace("_", "")
    exporter = EXPORTERS.get(name)
    if exporter is None:
        raise UnknownNameError("tool", tool, EXPORTERS, hint=", ".join(EXPORTERS))
    known = model_names().get(run.model.lower()) if "/" not in run.model else None
    if known is not None:  # other tools know the hub's names alone
        run = run.model_copy(update={"model": load_catalogue()[known]["hub_id"]})
    same = pick(run.recipe.framework).family == name
    asked = spelled(run.recipe.framework).version if same else ""
    return exporter(run, version=version or asked or None)
