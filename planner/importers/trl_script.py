"""TRL and plain Hugging Face scripts and notebooks: keyword arguments by AST."""

from dataclasses import replace
from typing import Any

from planner.importers import trl
from planner.importers.python_calls import UNKNOWN, Calls
from planner.importers.settings import Imported
from planner.importers.versions import stated
from planner.run.recipe import Task

TRAINERS: tuple[tuple[tuple[str, ...], Task], ...] = (
    (("GRPOConfig", "GRPOTrainer", "RLOOConfig"), Task.GRPO),
    (("KTOConfig", "KTOTrainer"), Task.KTO),
    (("ORPOConfig", "ORPOTrainer"), Task.ORPO),
    (("DPOConfig", "DPOTrainer"), Task.DPO),
    (("RewardConfig", "RewardTrainer"), Task.REWARD),
    (("SFTConfig", "SFTTrainer", "TrainingArguments"), Task.SFT),
)
_LOADERS = (
    "AutoModelForCausalLM.from_pretrained",
    "AutoModelForImageTextToText.from_pretrained",
    "from_pretrained",
)


def constants(call: dict[str, Any] | None) -> dict[str, Any]:
    """Return the keywords of a call whose values are constant."""
    return {
        key: value
        for key, value in (call or {}).items()
        if value is not UNKNOWN and not key.startswith("*")
    }


def read(calls: Calls, *, version: str | None = None) -> Imported:
    """Return a script that builds TRL trainers as a run."""
    task = next((task for names, task in TRAINERS if calls.has(*names)), Task.SFT)
    values: dict[str, Any] = {}
    loader = next((found for name in _LOADERS if (found := calls.first(name))), None)
    values.update(constants(loader))
    model = (loader or {}).get("*0") or values.pop("pretrained_model_name_or_path", None)
    trainer = calls.last(
        *(name for names, _ in TRAINERS for name in names if name.endswith("Trainer"))
    )
    model = model if isinstance(model, str) else (trainer or {}).get("model")
    if quantization := calls.last("BitsAndBytesConfig"):
        values.update(constants(quantization))
    if lora := calls.last("LoraConfig"):
        values.update(constants(lora))
        values["use_peft"] = True
    arguments = calls.last(
        *(
            name
            for names, wanted in TRAINERS
            if wanted is task
            for name in names
            if not name.endswith("Trainer")
        )
    )
    unknown = [key for key, value in (arguments or {}).items() if value is UNKNOWN]
    values.update(
        {key: value for key, value in constants(arguments).items() if key not in ("model",)}
    )
    if kwargs := values.pop("model_init_kwargs", None):
        values.update(kwargs if isinstance(kwargs, dict) else {})
    for key in (
        "quantization_config",
        "peft_config",
        "device_map",
        "use_cache",
        "*0",
        "low_cpu_mem_usage",
    ):
        values.pop(key, None)
    values["model"] = model if isinstance(model, str) else ""
    result = trl.read(
        values, task=task, version=version or stated(calls.comments, "trl"), is_script=True
    )
    for key in unknown:
        result.report.not_understood.append(_not_constant(key))
    if trainer and trainer.get("reward_funcs") is not None:
        unknown.append("reward_funcs")
    return replace(
        result,
        script=True,
        unknown=tuple(unknown),
        values={**result.values, **_data_of(calls)},
    )


def _data_of(calls: Calls) -> dict[str, Any]:
    """Return the data set that a script loads, in the words of TRL's command line."""
    call = constants(calls.first("load_dataset"))
    named = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
    found = {word: call[key] for key, word in named.items() if isinstance(call.get(key), str)}
    first = (calls.first("load_dataset") or {}).get("*0")
    return {"dataset_name": first, **found} if isinstance(first, str) else found


def _not_constant(key: str) -> Any:
    from planner.importers.settings import NotUnderstood

    return NotUnderstood(
        key=key,
        value="",
        effect="the value is computed when the program runs; the default was used",
    )
