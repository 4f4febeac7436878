"""The parts of a TRL config, each put where this trainer has it: steps, data, evaluation, sampling, loss, engine."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planner.errors import UsageError
from planner.importers.trl_data import data
from planner.importers.trl_made import Made, interval, refused
from planner.importers.trl_values import put

THINK = r"<think>(?!.*<think>)(.*?)</think>.*"
"""What think_format_reward matches (trl/rewards/format_rewards.py)."""
NO_CLIPPING = 1e30
KEEP_ALL = 1_000_000
REPORTERS = ("mlflow", "tensorboard", "trackio", "wandb")
SCHEDULES = {
    "constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine",
    "cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd",
}  # fmt: skip


def rollouts(made: Made) -> None:
    """GRPO: prompts of a rollout and its updates, from TRL's batch of completions."""
    f = made.fields
    if "num_generations" not in f.rows:
        return
    accumulation, each = f["gradient_accumulation_steps"], f["num_generations"]
    per_device = f["per_device_train_batch_size"]
    if f.says("generation_batch_size") and f.says("steps_per_generation"):
        raise UsageError("generation_batch_size and steps_per_generation exclude each other")
    steps = f["steps_per_generation"] or accumulation
    batch = f["generation_batch_size"] or per_device * steps
    steps = batch / per_device
    if batch % each or steps % accumulation:
        raise UsageError(
            f"generation_batch_size: {batch} completions are not whole groups of num_generations "
            f"({each}) in whole optimizer steps of {per_device * accumulation}",
            hint="as in TRL, it is a multiple of both",
        )
    made.train("prompts_per_step", batch // each)
    made.train("updates_per_rollout", int(steps // accumulation))
    made.train("num_iterations", f["num_iterations"])
    made.updates = int(steps // accumulation) * f["num_iterations"]
    if made.updates > 1:
        made.notes["learning_rate"] = (
            f"the rate moves once a rollout, not once in each of its {made.updates} updates"
        )


def course(made: Made) -> None:
    """Put how long a run is and how its rate moves."""
    f = made.fields
    made.train("output", f["output_dir"] or "trainer_output")
    made.train("overwrite", f["overwrite_output_dir"] or None)
    if f["max_steps"] > 0:
        made.train("steps", math.ceil(f["max_steps"] / made.updates))
        if f.says("num_train_epochs"):
            made.notes["num_train_epochs"] = "max_steps goes first, as in TRL"
    else:
        made.train("epochs", f["num_train_epochs"])
    made.train("lr", f["learning_rate"])
    _schedule(made)
    made.train("weight_decay", f["weight_decay"])
    if not any(word in str(f["optim"]) for word in ("adafactor", "muon", "sgd")):
        made.train("adam_betas", [f["adam_beta1"], f["adam_beta2"]])
        if "lion" not in str(f["optim"]):
            made.train("adam_eps", f["adam_epsilon"])
    made.train("max_grad_norm", f["max_grad_norm"] or NO_CLIPPING)
    made.train("seed", f["seed"])
    made.train("neftune_alpha", f["neftune_noise_alpha"] or None)
    if f["use_peft"]:
        made.train("lora_alpha", f.given.get("lora_alpha", 8 if f.script else f["lora_alpha"]))
        if f["lora_target_modules"] is None:
            made.notes["lora_target_modules"] = f.rows["lora_target_modules"].note


def _schedule(made: Made) -> None:
    f = made.fields
    kind = str(f["lr_scheduler_type"])
    if kind not in SCHEDULES:
        raise refused("lr_scheduler_type", kind, ", ".join(SCHEDULES))
    made.train("schedule", SCHEDULES[kind])
    warmup = f["warmup_steps"]
    if kind == "constant":
        if warmup:
            made.notes["warmup_steps"] = (
                "constant has no warm-up in transformers: constant_with_warmup has"
            )
    elif 0 < warmup < 1:
        made.train("warmup_ratio", warmup)
    else:
        made.steps("warmup_steps", "warmup_steps", warmup)
    given = dict(f["lr_scheduler_kwargs"] or {})
    named = {"min_lr": "min_lr", "min_lr_rate": "min_lr_ratio"}
    if kind == "warmup_stable_decay":
        named = {"min_lr_ratio": "min_lr_ratio", "decay_type": "decay_type"}
        if (steps := given.pop("num_decay_steps", None)) is not None:
            made.steps("lr_scheduler_kwargs.num_decay_steps", "decay_steps", steps)
    for key, target in named.items():
        made.train(target, given.pop(key, None))
    if given:
        name = next(iter(given))
        raise refused(f"lr_scheduler_kwargs.{name}", given[name], f"{', '.join(named)} with {kind}")


def saving(made: Made) -> None:
    """Put when a checkpoint is written and how many are kept."""
    f = made.fields
    interval(made, "save_strategy", "save_steps", "save_every", never=("no", "best"))
    if f["save_strategy"] == "best":
        made.train("evaluation.save_best", True)
    made.train("keep_checkpoints", f["save_total_limit"] or KEEP_ALL)
    reporters = f["report_to"]
    names = [reporters] if isinstance(reporters, str) else list(reporters or ())
    here = [name for name in names if name in REPORTERS]
    others = [name for name in names if name not in (*REPORTERS, "none")]
    made.train("report_to", here or None)
    if others:
        made.notes["report_to"] = f"{', '.join(others)}: not here; metrics.jsonl has every figure"
    hub = ("hub_model_id", "hub_private_repo", "hub_strategy")
    if f["push_to_hub"]:
        repo = f["hub_model_id"] or Path(str(f["output_dir"] or "trainer_output")).name
        made.train("push_to_hub.repo", repo)
        made.train("push_to_hub.private", f["hub_private_repo"])
        strategy = "end" if f["hub_strategy"] == "end" else "every_save"
        made.train("push_to_hub.strategy", strategy)
    else:
        made.notes |= {name: "push_to_hub is false" for name in hub if f.says(name)}
    for name in ("run_name", "project"):
        if here and f.says(name):
            made.train(name, f[name])
        elif f.says(name):
            made.notes[name] = "there is no tracker to name it for"


def model(made: Made) -> None:
    """Refuse what from_pretrained would be given and the loader here is not."""
    given = made.fields["model_init_kwargs"] or {}
    left = sorted(set(given) - {"dtype", "torch_dtype", "attn_implementation", "revision"})
    if left:
        raise refused(f"model_init_kwargs.{left[0]}", given[left[0]], "dtype, attn_implementation, revision")  # fmt: skip
    revision = made.fields["model_revision"]
    if revision not in (None, "main"):
        made.document["revision"] = revision


def sft(made: Made) -> None:
    """SFT: lengths, packing, and what the loss is on."""
    f = made.fields
    if f["max_length"] is None:
        raise refused("max_length", "null", "the longest sample in tokens: a plan needs a length")
    if f["packing"]:
        put(made.document, "recipe.packing", True)
    made.train("padding_free", True if f["padding_free"] and not f["packing"] else None)
    made.train("router_aux_loss_coef", f["router_aux_loss_coef"])
    if f["assistant_only_loss"] or f["completion_only_loss"]:
        made.train("loss_on", "completion")
    elif f["completion_only_loss"] is False:
        made.train("loss_on", "all")
    else:
        made.dialogues_in_full = True


def sampling(made: Made) -> None:
    """GRPO: how completions are drawn and rewarded."""
    f = made.fields
    if f["max_completion_length"] is None:
        raise refused("max_completion_length", "null", "a number of tokens: a plan needs a length")
    if f["temperature"] <= 0:
        raise refused(
            "temperature", f["temperature"], "above 0: a group of equal completions teaches nothing"
        )
    made.train("sampling.temperature", f["temperature"])
    made.train("sampling.top_p", f["top_p"])
    made.train("sampling.top_k", max(0, f["top_k"] or 0))
    made.train("sampling.min_p", f["min_p"] or None)
    if f["repetition_penalty"] != 1:
        made.train("sampling.repetition_penalty", f["repetition_penalty"])
    if f["use_vllm"]:
        made.train("sampling.guided_regex", f["vllm_structured_outputs_regex"])
    given = dict(f["generation_kwargs"] or {})
    for name in ("presence_penalty", "frequency_penalty"):
        made.train(f"sampling.{name}", given.pop(name, None))
    stops = [*_list(given.pop("stop", None)), *_list(given.pop("stop_strings", None))]
    if given:
        raise refused(f"generation_kwargs.{next(iter(given))}", next(iter(given.values())), "stop, stop_strings, presence_penalty, frequency_penalty")  # fmt: skip
    made.train("sampling.stop", stops or None)
    if f["log_completions"] or f["num_completions_to_print"]:
        made.train("print_completions", f["num_completions_to_print"])
    else:
        made.train("print_completions", 0)
    if f["disable_dropout"]:
        made.lora["dropout"] = 0.0


def rewards(made: Made) -> None:
    """GRPO: TRL's reward functions by name, others as FILE.py:FUNCTION."""
    f = made.fields
    names = _list(f["reward_funcs"])
    if not names:
        raise UsageError(
            "reward_funcs: missing",
            hint="accuracy_reward, think_format_reward or my_module.function",
        )
    weights = _list(f["reward_weights"]) or [1.0] * len(names)
    if len(weights) != len(names):
        raise UsageError(f"reward_weights: {len(weights)} of them for {len(names)} reward_funcs")
    made.train(
        "rewards",
        [_reward(str(name)) | {"weight": float(weight)} for name, weight in zip(names, weights, strict=True)],
    )  # fmt: skip


def _reward(name: str) -> dict[str, Any]:
    if name == "accuracy_reward":
        return {"name": "numeric", "options": {"column": "solution"}}
    if name == "think_format_reward":
        return {"name": "format", "options": {"pattern": THINK}}
    module, dot, function = name.rpartition(".")
    if dot and not name.startswith("trl."):
        return {"name": f"{module.replace('.', '/')}.py:{function}"}
    raise refused(
        "reward_funcs",
        name,
        "accuracy_reward, think_format_reward, or my_module.function of your own",
    )


def loss(made: Made) -> None:
    """GRPO: the policy loss, and the weights for what another engine sampled."""
    f = made.fields
    kind, level = str(f["loss_type"]), str(f["importance_sampling_level"])
    if kind not in ("grpo", "dr_grpo", "bnpo", "dapo", "cispo"):
        raise refused("loss_type", kind, "grpo, dr_grpo, bnpo, dapo or cispo")
    if level == "sequence":
        if kind != "grpo":
            raise refused(
                "importance_sampling_level", level, "token, or loss_type: grpo (that is gspo)"
            )
        kind = "gspo"
    made.train("loss.type", kind)
    high = f["epsilon_high"] if f["epsilon_high"] is not None else f["epsilon"]
    made.train("loss.epsilon_high", high)
    if kind == "cispo":
        made.notes["epsilon"] = "cispo has no lower clip"
    else:
        made.train("loss.epsilon", f["epsilon"])
    made.train("loss.delta", f["delta"])
    scale = {True: "group", False: "none", "True": "group", "False": "none"}.get(f["scale_rewards"], f["scale_rewards"])  # fmt: skip
    made.train("loss.scale_rewards", scale)
    made.train("loss.mask_truncated", f["mask_truncated_completions"] or None)
    if f["beta"]:
        made.train("loss.kl", "k3-ratio" if f["use_bias_correction_kl"] else "k3")
    elif f.says("use_bias_correction_kl"):
        made.notes["use_bias_correction_kl"] = "there is no KL term with beta 0"


def engine(made: Made) -> None:
    """GRPO: what generates, and the correction for its other kernels."""
    f = made.fields
    recipe = made.document.setdefault("recipe", {})
    recipe["engine"] = {"kind": "transformers"}
    read = [name for name in f.given if name.startswith("vllm_") and f.rows[name].kind != "none"]
    if not f["use_vllm"]:
        made.notes |= dict.fromkeys(read, "use_vllm is false: the policy itself samples")
        return
    if f["load_in_4bit"]:
        made.notes["use_vllm"] = (
            "false: vLLM would serve the base unquantised; the 4-bit policy itself generates"
        )
        made.notes |= dict.fromkeys(read, "the policy itself samples")
        return
    if f["vllm_mode"] == "server":
        url = f["vllm_server_base_url"] or f"http://{f['vllm_server_host']}:{f['vllm_server_port']}"
        recipe["engine"] = {
            "kind": "vllm-server",
            "url": str(url).replace("//0.0.0.0", "//127.0.0.1"),
        }
        recipe["engine"]["timeout_s"] = f["vllm_server_timeout"]
    else:
        recipe["engine"] = {"kind": "vllm-shared"}
        server = [name for name in read if name.startswith("vllm_server")]
        made.notes |= dict.fromkeys(server, "vllm_mode is not server")
    if not f["vllm_importance_sampling_correction"]:
        made.train("loss.is_correction", "none")
        return
    cap = f["vllm_importance_sampling_cap"] or f["vllm_importance_sampling_clip_max"]
    if cap is None:
        raise refused("vllm_importance_sampling_clip_max", "null", "a number: 3.0")
    level, _, mode = str(f["vllm_importance_sampling_mode"]).partition("_")
    if level not in ("token", "sequence") or mode not in ("truncate", "mask"):
        raise refused("vllm_importance_sampling_mode", f["vllm_importance_sampling_mode"], "{token,sequence}_{truncate,mask}")  # fmt: skip
    made.train("loss.is_correction", level)
    made.train("loss.is_mode", mode)
    made.train("loss.is_cap", cap)


def _list(value: Any) -> list[Any]:
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


BOTH: tuple[Callable[[Made], None], ...] = (model, rollouts, course, data, saving)
SFT: tuple[Callable[[Made], None], ...] = (sft,)
GRPO: tuple[Callable[[Made], None], ...] = (sampling, rewards, loss, engine)
