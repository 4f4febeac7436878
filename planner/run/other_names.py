"""Names that other trainers give to fields of a run file, for "did you mean"."""

OTHER_NAMES: dict[str, str] = {
    "learning_rate": "train.lr",
    "max_steps": "train.steps",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "output_dir": "train.output",
    "lr_scheduler_type": "train.schedule",
    "lr_scheduler": "train.schedule",
    "adam_epsilon": "train.adam_eps",
    "save_steps": "train.save_every",
    "save_total_limit": "train.keep_checkpoints",
    "gradient_clipping": "train.max_grad_norm",
    "reward_funcs": "train.rewards",
    "reward_weights": "train.rewards (weight of each)",
    "train_dataset": "train.dataset",
    "dataset_name": "train.dataset.name",
    "dataset_text_field": "train.dataset.text_column",
    "loss_type": "train.loss.type",
    "mask_truncated_completions": "train.loss.mask_truncated",
    "temperature": "train.sampling.temperature",
    "top_p": "train.sampling.top_p",
    "top_k": "train.sampling.top_k",
    "stop_strings": "train.sampling.stop",
    "per_device_train_batch_size": "recipe.micro_batch_size",
    "train_batch_size": "recipe.micro_batch_size",
    "batch_size": "recipe.micro_batch_size",
    "gradient_accumulation_steps": "recipe.gradient_accumulation",
    "gradient_checkpointing": "recipe.checkpointing",
    "max_prompt_length": "recipe.prompt_length",
    "max_completion_length": "recipe.completion_length",
    "max_new_tokens": "recipe.completion_length",
    "max_seq_length": "recipe.context",
    "max_length": "recipe.context",
    "model_name_or_path": "model",
    "lora_r": "recipe.lora.rank",
    "lora_rank": "recipe.lora.rank",
    "r": "recipe.lora.rank",
    "lora_target_modules": "recipe.lora.targets",
    "target_modules": "recipe.lora.targets",
    "optim": "recipe.optimizer",
    "torch_dtype": "recipe.dtype",
    "attn_implementation": "recipe.attention",
    "load_in_4bit": "recipe.method: qlora",
    "use_vllm": "recipe.engine.kind",
}
"""TRL, transformers, axolotl, verl, Unsloth -> the field here, with its section."""


def here(name: str, section: str) -> str | None:
    """Return what a field `name` of another trainer is called here; without `section` where it is in it."""
    field = OTHER_NAMES.get(name)
    return None if field is None else field.removeprefix(f"{section}." if section else "")
