"""Which framework file of data/frameworks describes the code that a row's run used."""

from planner.accuracy.prediction import NotCovered
from planner.accuracy.rows import Row


def framework_of(row: Row) -> str:
    """Return the framework's name for a fine-tuning row."""
    name, kernels = row["framework"].lower(), row["kernels"].lower()
    if "fms" in name:
        return _fms(kernels)
    for word, framework in (
        ("unsloth", "unsloth"),
        ("litgpt", "litgpt"),
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


def _fms(kernels: str) -> str:
    if "scattermoe" in kernels:
        raise NotCovered("expert-parallel ScatterMoE kernels are not modelled")
    if kernels.startswith("baseline"):
        return "fms-hf-tuning-kbit"  # prepare_model_for_kbit_training
    if "foak" in kernels:
        return "fms-hf-tuning-foak"
    return "fms-hf-tuning"
