"""Layers split over GPUs (device_map, pipeline): the part of a model that one GPU holds."""

import re
from dataclasses import replace

from planner.accuracy.prediction import NotCovered
from planner.accuracy.rows import Row
from planner.models.rank_part import stage_part
from planner.models.spec import ModelSpec


def is_split(row: Row) -> bool:
    """Return whether the row's layers are divided over GPUs one after the other."""
    text = row["parallelism"].lower()
    return "device_map split" in text or "pipeline-sequential" in text


def stage_models(row: Row, model: ModelSpec) -> tuple[ModelSpec, ...]:
    """Return what the row's GPU holds, layers in equal parts; first and last for a maximum."""
    place = re.search(r"GPU (\d+) of (\d+)", row["per_gpu_or_total"])
    count = row.integer("n_gpus") or 1
    if place:
        return (part(model, int(place[1]), int(place[2])),)
    if "max" in row["per_gpu_or_total"]:
        return part(model, 0, count), part(model, count - 1, count)
    raise NotCovered("the row does not say which of the GPUs it measured")


def part(model: ModelSpec, index: int, count: int) -> ModelSpec:
    """Return stage `index` of `count`: the first holds the embeddings, the last the head."""
    total = model.num_layers
    first, last = total * index // count, total * (index + 1) // count
    held = stage_part(model, range(first, last), first=index == 0, last=index == count - 1)
    return replace(held, name=f"{model.name} part {index + 1} of {count}")
