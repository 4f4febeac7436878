"""Which framework file of data/frameworks describes the code that a row's run used."""

from planner.accuracy.prediction import NotCovered
from planner.accuracy.rows import Row


def framework_of(row: Row) -> str:
    """Return the framework's name for a fine-tuning row."""
    name, kernels = row["framework"].lower(), row["kernels"].lower()
    if row["method"] == "adapter_v2":
        return "litgpt-2023-adapter-v2"
    if "fms" in name:
        return _fms(row, kernels)
    for word, framework in (
        ("unsloth", "unsloth"),
        ("litgpt", "litgpt-2023" if row["source_family"].endswith("tables") else "litgpt"),
        ("torchtune", "torchtune"),
        ("torchtitan", "torchtitan"),
        ("swift", "ms-swift-1.5" if "torch 2.1" in row["framework_version"] else "ms-swift"),
        ("peft", "peft-loop"),
        ("axolotl", "axolotl"),
        ("llamafactory", "llama-factory"),
        ("llama-factory", "llama-factory"),
        ("qwen finetune", "ms-swift-1.5"),
        ("trl", "trl"),
        ("transformers", "hf-trainer"),
        ("accelerate", "hf-trainer"),
    ):
        if word in name:
            return framework
    raise NotCovered(f"the framework {name[:40]!r} is not known" if name else "no framework named")


def _fms(row: Row, kernels: str) -> str:
    if "scattermoe" in kernels:
        raise NotCovered("expert-parallel ScatterMoE kernels are not modelled")
    name = "fms-hf-tuning"
    if "bigcode" in row["model"]:
        name += "-bigcode"
    elif row["path"].endswith("/refs/a100_80gb.csv"):
        name += "-2024"  # the first reference file, measured with an older loop
    if kernels.startswith("baseline") and row.integer("n_gpus") == 1 and "bigcode" not in name:
        return f"{name}-kbit"  # prepare_model_for_kbit_training, not under FSDP
    return f"{name}-foak" if "foak" in kernels else name
