"""TRL and plain Hugging Face scripts and notebooks: keyword arguments by AST."""

from dataclasses import replace
from typing import Any

from planner.importers import trl
from planner.importers.python_calls import UNKNOWN, Calls
from planner.importers.settings import Imported, Settings
from planner.importers.versions import stated
from planner.run.recipe import Task

TRAINERS: tuple[tuple[tuple[str, ...], Task], ...] = (
    (("PPOConfig", "PPOTrainer", "PPOv2Config", "PPOv2Trainer"), Task.PPO),
    (("GRPOConfig", "GRPOTrainer", "RLOOConfig"), Task.GRPO),
    (("KTOConfig", "KTOTrainer"), Task.KTO),
    (("ORPOConfig", "ORPOTrainer", "CPOConfig", "CPOTrainer"), Task.ORPO),
    (("DPOConfig", "DPOTrainer"), Task.DPO),
    (("RewardConfig", "RewardTrainer"), Task.REWARD),
    (("SFTConfig", "SFTTrainer"), Task.SFT),
)
TRAINER_KEYS = (
    "max_seq_length",
    "max_length",
    "max_prompt_length",
    "packing",
    "beta",
    "loss_type",
    "precompute_ref_log_probs",
)
"""Settings that older releases took from the trainer's own call."""
_BESIDE = (
    "quantization_config",
    "peft_config",
    "device_map",
    "use_cache",
    "*0",
    "low_cpu_mem_usage",
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


def task_of(calls: Calls) -> Task:
    """Return the task of the trainers that a script builds."""
    return next((task for names, task in TRAINERS if calls.has(*names)), Task.SFT)


def trainer_settings(calls: Calls, task: Task) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return what the trainer itself is given of lengths, packing and beta, and all its keywords.

    Releases before 0.13 took them there; they are settings like any other.
    """
    names = [name for names, wanted in TRAINERS if wanted is task for name in names]
    trainer = calls.last(*(name for name in names if name.endswith("Trainer"))) or {}
    own = {key: value for key, value in constants(trainer).items() if key in TRAINER_KEYS}
    return own, tuple(key for key in trainer if not key.startswith("*"))


def arguments_of(calls: Calls, task: Task) -> dict[str, Any]:
    """Return the keywords of the trainer's arguments: its own config's, or plain TrainingArguments."""
    names = [name for names, wanted in TRAINERS if wanted is task for name in names]
    config = calls.last(*(name for name in names if not name.endswith("Trainer")))
    return config or calls.last("TrainingArguments", "Seq2SeqTrainingArguments") or {}


def checkpoints(calls: Calls) -> bool:
    """Return whether the script switches checkpointing on itself: no argument of a Trainer switches it off again.

    PEFT's prepare_model_for_kbit_training does so unless told not to (peft/utils/other.py).
    """
    prepared = calls.last("prepare_model_for_kbit_training", "prepare_model_for_int8_training")
    own = prepared is not None and prepared.get("use_gradient_checkpointing", True) is not False
    return own or calls.has("gradient_checkpointing_enable")


def read(calls: Calls, *, version: str | None = None) -> Imported:
    """Return a script that builds TRL trainers as a run."""
    task = task_of(calls)
    values: dict[str, Any] = {}
    loader = next((found for name in _LOADERS if (found := calls.first(name))), None)
    values.update(constants(loader))
    model = (loader or {}).get("*0") or values.pop("pretrained_model_name_or_path", None)
    trainer = calls.last(
        *(name for names, _ in TRAINERS for name in names if name.endswith("Trainer"))
    )
    given = (trainer or {}).get("model", (trainer or {}).get("*0"))
    named = isinstance(given, str)
    model = model if isinstance(model, str) else given
    if quantization := calls.last("BitsAndBytesConfig"):
        values.update(constants(quantization))
    if lora := calls.last("LoraConfig"):
        values.update(constants(lora))
        values["use_peft"] = True
    arguments = arguments_of(calls, task)
    unknown = [key for key, value in arguments.items() if value is UNKNOWN]
    own, keywords = trainer_settings(calls, task)
    values.update(own)
    values.update(
        {key: value for key, value in constants(arguments).items() if key not in ("model",)}
    )
    if checkpoints(calls):
        values["gradient_checkpointing"] = True
    if kwargs := values.pop("model_init_kwargs", None):
        values.update(kwargs if isinstance(kwargs, dict) else {})
    for key in _BESIDE:
        values.pop(key, None)
    values["model"] = model if isinstance(model, str) else ""
    if task is Task.ORPO and values.get("loss_type") == "simpo":
        task = Task.SIMPO
    result = trl.read(
        values,
        task=task,
        version=version or stated(calls.comments, "trl"),
        is_script=True,
        trainer_keys=keywords,
        loaded=loader is not None and not named,
    )
    for key in unknown:
        Settings.note_unknown(result.report, key)
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
