"""TRL's fields: the table against the installed dataclasses, and the importer against the table."""

import dataclasses
import enum
from functools import cache

import pytest
import yaml
from pydantic import BaseModel

from planner.errors import UsageError
from planner.importers import import_config
from planner.importers.trl_fields import KINDS, inherited_defaults, rows_of, table, version
from planner.importers.trl_training import convert
from planner.run.recipe import RunFile, Task
from trainer.config import RewardSection, TrainSection

CONFIGS = ("TrainingArguments", "SFTConfig", "GRPOConfig", "DPOConfig", "ModelConfig", "ScriptArguments",
           "GRPOScriptArguments", "DatasetMixtureConfig")  # fmt: skip


def config_class(name):
    import transformers
    import trl
    from trl.scripts.grpo import GRPOScriptArguments

    if name == "GRPOScriptArguments":
        return GRPOScriptArguments
    return getattr(transformers if name == "TrainingArguments" else trl, name)


def own_fields(name):
    """Return field -> default of a dataclass; a trainer's config without what it inherits unchanged."""

    def fields(config):
        found = {}
        for field in dataclasses.fields(config):
            value = field.default
            if value is dataclasses.MISSING:
                made = field.default_factory
                value = None if made is dataclasses.MISSING else made()
            found[field.name] = value.value if isinstance(value, enum.Enum) else value
        return found

    found = fields(config_class(name))
    if name in ("SFTConfig", "GRPOConfig", "DPOConfig", "GRPOScriptArguments"):
        base = fields(
            config_class("TrainingArguments" if name.endswith("Config") else "ScriptArguments")
        )
        return {k: v for k, v in found.items() if k not in base or base[k] != v}, base
    return found, {}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_of_the_installed_dataclass_has_a_row(name):
    import trl

    assert trl.__version__.startswith(version().rsplit(".", 1)[0]), (
        "the table is of another release"
    )
    installed, inherited = own_fields(name)
    told = {row.field: row.default for row in table(name).values()}
    told |= inherited_defaults(name)
    assert set(installed) - set(told) == set(), "fields without a row"
    assert set(told) - set(installed) == set(), "rows without a field"
    for field, default in installed.items():
        assert told[field] == default, field
    assert all(field in inherited for field in inherited_defaults(name))


def paths_of(section, prefix=""):
    for name, info in section.model_fields.items():
        yield f"{prefix}{name}"
        for kind in (info.annotation, *getattr(info.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from paths_of(kind, f"{prefix}{name}.")


def test_every_field_of_ours_that_a_row_names_exists():
    known = {*paths_of(RunFile), *paths_of(TrainSection, "train."), *paths_of(RewardSection, "train.rewards.")}  # fmt: skip
    for name in CONFIGS:
        for row in table(name).values():
            assert row.kind in KINDS
            assert set(row.ours) <= known, row
            assert bool(row.ours) == (row.kind in ("same", "changed", "plan")), row


BASE = {
    Task.SFT: {"model_name_or_path": "Qwen/Qwen3-0.6B", "dataset_name": "some/data", "use_peft": True, "bf16": False},
    Task.GRPO: {"model_name_or_path": "Qwen/Qwen3-0.6B", "dataset_name": "some/data", "use_peft": True, "bf16": False,
                "num_generations": 4, "reward_funcs": ["think_format_reward"]},
}  # fmt: skip
OTHER = {
    "bf16": True,
    "model_name_or_path": "Qwen/Qwen3-1.7B", "model_revision": "v1", "dataset_name": "other/data",
    "use_peft": False, "output_dir": "elsewhere", "lr_scheduler_type": "cosine", "optim": "sgd",
    "hub_model_id": "me/mine", "hub_strategy": "end", "hub_private_repo": True, "min_p": 0.1,
    "vllm_structured_outputs_regex": "[0-9]+", "repetition_penalty": 1.2,
    "report_to": "wandb", "run_name": "mine", "project": "ours", "metric_for_best_model": "eval_loss", "train_sampling_strategy": "sequential",
    "model_init_kwargs": {"dtype": "bfloat16"}, "dtype": "float16", "attn_implementation": "eager",
    "lora_target_modules": ["o_proj"], "lora_modules_to_save": ["norm"], "bnb_4bit_quant_type": "fp4",
    "generation_kwargs": {"stop": ["END"]}, "chat_template_kwargs": {"enable_thinking": False},
    "vllm_mode": "server", "vllm_server_base_url": "http://there:9", "importance_sampling_level": "sequence",
    "scale_rewards": "batch", "loss_type": "cispo", "vllm_importance_sampling_mode": "token_truncate",
    "reward_weights": [0.5], "reward_funcs": ["mine.brevity"], "eval_strategy": "steps", "save_strategy": "no",
    "warmup_steps": 3, "generation_batch_size": 24, "steps_per_generation": 3, "num_generations": 2,
    "datasets": [{"path": "a/b"}], "completion_only_loss": False, "delta": 3.0, "neftune_noise_alpha": 5,
    "lr_scheduler_kwargs": {"min_lr": 1e-7}, "lora_target_parameters": ["mlp.experts.gate_up_proj"],
    "max_steps": 7, "epsilon_high": 0.3, "num_generations_eval": 2, "vllm_importance_sampling_cap": 2.0,
    "dataset_config": "main", "dataset_text_field": "body", "router_aux_loss_coef": 0.1, "eval_steps": 7,
    "save_total_limit": 3, "top_p": 0.5, "num_completions_to_print": 3, "lora_dropout": 0.2,
}  # fmt: skip
"""Values that are not TRL's default, where its type alone does not tell one."""
HELD_OUT = {"eval_strategy": "steps", "eval_steps": 5}
HUB = {"push_to_hub": True}
TRACKED = {"report_to": "wandb"}
FOUR_BIT = {"load_in_4bit": True}
VLLM = {"use_vllm": True}
WITH = {
    **dict.fromkeys(("eval_on_start", "load_best_model_at_end", "metric_for_best_model", "num_generations_eval",
                     "dataset_test_split", "eval_steps"), HELD_OUT),
    "eval_strategy": {"eval_steps": 5},
    **dict.fromkeys(("run_name", "project"), TRACKED),
    **dict.fromkeys(("bnb_4bit_quant_type", "use_bnb_nested_quant"), FOUR_BIT),
    **dict.fromkeys(("hub_model_id", "hub_strategy", "hub_private_repo"), HUB),
    **{name: VLLM for name in table("GRPOConfig") if name.startswith("vllm_")},
    "vllm_server_base_url": {**VLLM, "vllm_mode": "server"}, "vllm_server_host": {**VLLM, "vllm_mode": "server"},
    "vllm_server_port": {**VLLM, "vllm_mode": "server"}, "vllm_server_timeout": {**VLLM, "vllm_mode": "server"},
    "use_bias_correction_kl": {"beta": 0.1}, "importance_sampling_level": {"loss_type": "grpo"},
    "datasets": {"dataset_name": None}, "disable_dropout": {"lora_dropout": 0.3},
    "warmup_steps": {"lr_scheduler_type": "linear"}, "lr_scheduler_kwargs": {"lr_scheduler_type": "cosine_with_min_lr"},
    "max_grad_norm": {}, "log_completions": {},
}  # fmt: skip
"""What else the file says, so that the field is read."""


def another(row):
    if row.field == "loss_type" and row.default == "nll":
        return "dft"
    if row.field in OTHER:
        return OTHER[row.field]
    if isinstance(row.default, bool):
        return not row.default
    if isinstance(row.default, int):
        return row.default + 4 if row.default >= 0 else 4
    if isinstance(row.default, float):
        return row.default / 2 or 0.25
    return "other" if isinstance(row.default, str) else 4


def converted(settings):
    return of_text(yaml.safe_dump({k: v for k, v in settings.items() if v is not None}))


@cache
def of_text(text):
    return convert(import_config(text))


def same_but(document, other, path):
    """Return whether two documents hold the same at a dotted name."""
    for part in path.split("."):
        document = document.get(part, {}) if isinstance(document, dict) else {}
        other = other.get(part, {}) if isinstance(other, dict) else {}
    return document == other


FIELDS = [(task, name) for task in (Task.SFT, Task.GRPO) for name in rows_of(task)]


@pytest.mark.parametrize(("task", "name"), FIELDS, ids=lambda value: str(value))
def test_the_importer_does_what_the_table_says(task, name):
    """A field is set to another value: ours changes, or nothing does and it is said, or it is refused by name."""
    row = rows_of(task)[name]
    base = BASE[task] | WITH.get(name, {})
    changed = base | {name: another(row)}
    if row.kind == "refused":
        with pytest.raises(UsageError, match=name) as caught:
            converted(changed)
        assert "\n" not in caught.value.message
        return
    before = converted({**base, "dataset_name": "some/data"} if name == "datasets" else base)
    after = converted(changed)
    (said,) = [d for d in after.differences if d.field == name]
    assert "\n" not in said.line
    if row.kind == "none":
        assert after.document == before.document
        assert said.kind == "none"
        assert said.note
        return
    moved = [path for path in row.ours if not same_but(after.document, before.document, path)]
    assert moved or before.shares != after.shares, said
    assert said.ours


def test_a_name_that_trl_does_not_know_is_refused_with_its_neighbours():
    with pytest.raises(UsageError, match=r"learning_rat: TRL 1\.16\.0 has no such field") as caught:
        converted(BASE[Task.SFT] | {"learning_rat": 1e-3})
    assert "learning_rate" in caught.value.hint
    with pytest.raises(UsageError, match="max_steps: 'many' is not allowed"):
        converted(BASE[Task.SFT] | {"max_steps": "many"})
