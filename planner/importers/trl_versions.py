"""Which TRL a run was written for, by the names it uses (data/importers/trl_versions.json, from TRL's own wheels)."""

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from planner.datafiles import data_dir
from planner.run.recipe import Task

CONFIGS = {
    Task.SFT: "SFTConfig",
    Task.GRPO: "GRPOConfig",
    Task.DPO: "DPOConfig",
    Task.KTO: "KTOConfig",
    Task.ORPO: "ORPOConfig",
    Task.REWARD: "RewardConfig",
}


class Inferred(NamedTuple):
    """A release, and what says so."""

    version: str
    why: str


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    path = data_dir() / "importers" / "trl_versions.json"
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def number(version: str) -> tuple[int, ...]:
    """Return a version as numbers, for comparison."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def infer(task: Task, keys: Iterable[str], trainer_keys: Iterable[str] = ()) -> Inferred | None:
    """Return the newest release that has all of a run's names, None where the newest of all has.

    `keys`: of the config and the model's options; `trainer_keys`: of the trainer's call. Names that no
    one release has (a file that mixes them) date nothing, unless only older ones know all that are gone.
    """
    classes = _table()["classes"]
    config = CONFIGS.get(task, "SFTConfig")
    asked = [(config, key) for key in keys]
    asked += [("ModelConfig", key) for key in keys if key not in classes.get(config, {})]
    asked += [(config.replace("Config", "Trainer"), key) for key in trainer_keys]
    spans = {key: classes[name][key] for name, key in asked if key in classes.get(name, {})}
    last = {key: span[1] for key, span in spans.items() if span[1]}
    if not last:
        return None
    key = min(last, key=lambda each: number(last[each]))
    newer = [
        each for each, span in spans.items() if span[0] and number(span[0]) > number(last[key])
    ]
    if newer:
        return None
    shown = f"{key}= of the trainer" if key in set(trainer_keys) else key
    return Inferred(last[key], f"{shown} was last read by TRL {last[key]}")
