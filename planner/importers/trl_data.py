"""TRL's data set and held-out data, as this trainer names them."""

from pathlib import Path
from typing import Any

from planner.errors import UsageError
from planner.importers.trl_made import Made, interval, refused

LOADERS = ("json", "csv", "parquet")


def data(made: Made) -> None:
    """Put the data set and the held-out one."""
    f = made.fields
    section: dict[str, Any] = {}
    if f["datasets"]:
        section = _mixture(f["datasets"])
    elif f["dataset_name"]:
        section = {"name": f["dataset_name"], "config": f["dataset_config"], "split": f["dataset_train_split"]}  # fmt: skip
    else:
        raise UsageError(
            "dataset_name: missing: the file names no data set",
            hint="dataset_name, or datasets: [{path: ...}]",
        )
    file = Path(str(section["name"])).suffix in (".jsonl", ".json", ".csv", ".parquet")
    if file:
        section.pop("split", None)
    strategy = str(f["train_sampling_strategy"])
    if strategy not in ("random", "sequential", "group_by_length"):
        raise refused("train_sampling_strategy", strategy, "random or sequential")
    grpo = "num_generations" in f.rows
    if strategy == "sequential" or (grpo and f["shuffle_dataset"] is False):
        section["shuffle"] = False
    if grpo:
        section["chat_template_kwargs"] = f["chat_template_kwargs"]
    elif f["dataset_text_field"] != "text":
        section["text_column"] = f["dataset_text_field"]
    section = {key: value for key, value in section.items() if value not in (None, {}) and (key, value) != ("split", "train")}  # fmt: skip
    made.train("dataset", section)
    if str(f["eval_strategy"]) == "no":
        return
    if file:
        raise refused(
            "eval_strategy", f["eval_strategy"],
            "a data set that is one file has no test split: train.validation of a run.yaml takes a second file",
        )  # fmt: skip
    made.train("validation", {**section, "split": f["dataset_test_split"]})
    interval(made, "eval_strategy", "eval_steps", "eval_every", never=())
    made.train("evaluation.on_start", f["eval_on_start"] or None)
    if f["load_best_model_at_end"]:
        made.train("evaluation.save_best", True)
    if f["metric_for_best_model"]:
        made.train("evaluation.metric", str(f["metric_for_best_model"]).removeprefix("eval_"))
    if grpo:
        made.train("evaluation.generations", f["num_generations_eval"] or f["num_generations"])


def _mixture(datasets: Any) -> dict[str, Any]:
    if not isinstance(datasets, list) or len(datasets) != 1 or not isinstance(datasets[0], dict):
        raise refused("datasets", datasets, "one data set: mix them into one file")
    given = dict(datasets[0])
    path, files = given.pop("path", None), given.pop("data_files", None)
    section = {"config": given.pop("name", None), "split": given.pop("split", "train")}
    left = {key: value for key, value in given.items() if value is not None}
    if left:
        raise refused(f"datasets.{next(iter(left))}", next(iter(left.values())), "path, data_files, name, split")  # fmt: skip
    if path in LOADERS:
        files = files[0] if isinstance(files, list) and len(files) == 1 else files
        if not isinstance(files, str):
            raise refused("datasets.data_files", files, f"one file for {path}")
        path = files
    elif files is not None:
        raise refused("datasets.data_files", files, f"with path {', '.join(LOADERS)}")
    if not path:
        raise UsageError("datasets.path: missing")
    return {"name": path, **section}
