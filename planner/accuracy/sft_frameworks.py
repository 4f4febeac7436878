"""Which law of data/frameworks describes the code that a row's run used."""

from planner.accuracy.notebooks import notebook_of
from planner.accuracy.prediction import NotCovered
from planner.accuracy.rows import Row
from planner.run.framework import pick, spell


def framework_of(row: Row) -> str:
    """Return the name of the law for a fine-tuning row."""
    name, kernels = row["framework"].lower(), row["kernels"].lower()
    if row["method"] == "adapter_v2":
        return "litgpt-2023-adapter-v2"
    if "unsloth" in name:
        return _unsloth(row)
    if "fms" in name:
        return _fms(row, kernels)
    for word, framework in (
        ("litgpt", "litgpt-2023" if row["source_family"].endswith("tables") else "litgpt"),
        ("torchtune", "torchtune"),
        ("torchtitan", _titan(row)),
        ("swift", "ms-swift==1.5" if "torch 2.1" in row["framework_version"] else "ms-swift"),
        ("peft", "peft-loop"),
        ("axolotl", "axolotl"),
        ("llamafactory", "llamafactory"),
        ("llama-factory", "llamafactory"),
        ("qwen finetune", "ms-swift-1.5"),
        ("trl", "trl"),
        ("transformers", "hf-trainer"),
        ("accelerate", "hf-trainer"),
    ):
        if word in name:
            return pick(framework).name
    raise NotCovered(f"the framework {name[:40]!r} is not known" if name else "no framework named")


def _unsloth(row: Row) -> str:
    """Return the law of the release that a notebook prints, like 2024.9.post4."""
    notebook = notebook_of(row)
    release = notebook.release if notebook else row["framework_version"].split(" ")[0]
    return pick(spell("unsloth", release) if release else "unsloth").name


def _titan(row: Row) -> str:
    """Return torchtitan's law by year and launcher: its script for one node sets the allocator."""
    name = "torchtitan-0.0" if "2024" in row["framework_version"] else "torchtitan"
    return f"{name}-slurm" if (row.integer("n_gpus") or 1) > ONE_NODE else name


ONE_NODE = 8


def _fms(row: Row, kernels: str) -> str:
    if "scattermoe" in kernels:
        raise NotCovered("expert-parallel ScatterMoE kernels are not modelled")
    name, foak = "fms-hf-tuning", "foak" in kernels
    if "bigcode" in row["model"]:
        return pick(f"{name}-bigcode-foak" if foak else f"{name}-bigcode").name
    if kernels.startswith("baseline") and row.integer("n_gpus") == 1:
        name += "-kbit"  # prepare_model_for_kbit_training, not under FSDP
    elif foak:
        name += "-foak"
    # the releases of transformers in the reference files' requirements
    return pick(name, "4.48.1" if row["path"].endswith("/refs/a100_80gb.csv") else "4.45.0").name
