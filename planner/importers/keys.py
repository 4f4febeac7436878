"""Foreign keys by their names: which move no byte, which may, which hold what must not be printed."""

import re
from typing import Any

HARMLESS = re.compile(
    r"(?:^|[._-])(?:learning_rate|lr\w*|warmup\w*|weight_decay|seed|output_dir|logging\w*|log\w*|report_to|save\w*|wandb\w*|tensorboard\w*|hub\w*|push_to_hub"
    r"|dataset\w*|datasets|data_dir|train_file\w*|data_paths?|data_files?|eval_data\w*|val_set_size|val_split|chat_template|template|preprocessing\w*|dataloader\w*|num_workers|num_proc|epochs?|num_epochs|num_train_epochs|max_steps|total\w*"
    r"|scheduler|lr_scheduler\w*|early_stopping\w*|resume\w*|overwrite\w*|run_name|project\w*|experiment_name|plot_loss|do_train|do_eval|do_predict|eval_strategy|evaluation_strategy|eval_steps|evals_per_epoch"
    r"|temperature|top_p|top_k|reward\w*|system\w*|special_tokens\w*|strict|load_best_model\w*|metric\w*|max_grad_norm|clip_grad\w*|adam_\w+|betas|eps|ddp_timeout|trust_remote_code|revision|model_revision"
    r"|served_model_name|host|port|api_key|tool\w*|enable_auto_tool_choice|tokenizer_?mode|config_format|load_format|tokenizer\w*|model_type|hf_\w+|remove_unused_columns|shuffle|split\w*|message\w*|prompt_template|add_\w+_prompt"
    r"|(?:eos|bos|pad|unk)_token|num_labels|author|name|tags|title|description|meta|debug|train_batch_size|val_\w*|test_\w*|critic_warmup|balance_batch|nnodes|node_rank|master\w*|filter_\w+|truncation\w*|kl_loss_coef|kl_loss_type|rpo_alpha|lora_alpha|alpha"
    r"|use_reentrant|packing_strategy|group_by_length|train_on_inputs|chat_\w+|use_\w*rslora|loraplus\w*|moe_backend|version|columns|load_from_cache\w*|lazy_preprocess|tf32|epsilon(?:_high|_low)?|overlong_filter|external_plugins|importance_sampling_level|eot_tokens|processor_type|loss_watchdog\w*|ddp_find_unused_parameters|image_folders?|image_root|data_file_paths|bos|eos|stop\w*|n_shot|checkpointer\w*|profiler\w*|metric_logger\w*|max_samples|overwrite_cache)(?:$|\.)",
    re.IGNORECASE,
)
"""Keys that move no byte of the GPU's memory, as far as a plan goes."""


_SECRET_KEY = re.compile(
    r"(?:^|[._-])(?:\w*token|api_?key|secret\w*|password|passwd|credential\w*)$", re.IGNORECASE
)
_SECRET = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|gh[pousr]_[A-Za-z0-9]{8,}|AKIA[A-Z0-9]{12,}|xox[abp]-[\w-]{8,}"
    r"|eyJ[\w-]{10,}\.[\w.-]+|[0-9a-f]{40})\b|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)
"""Tokens of the hubs and clouds that configs hold, and user:password in an address."""


def shown(key: str, value: Any) -> str:
    """Return a value as reports and errors may print it: without what is secret."""
    named = _SECRET_KEY.search(key) and not re.search(r"(?:eos|bos|pad|unk)_token$", key)
    if isinstance(value, str) and value and named:
        return "(hidden)"
    return _SECRET.sub("(hidden)", str(value))


MOVES = re.compile(
    r"offload|checkpoint(?!er|_dir|_path)|recompute|parallel|shard|zero|fsdp|cache|quant|[48]bit|fp8|int8|int4|dtype|precision"
    r"|batch|length|seq_?len|tokens|lora|adapter|rank|optim|buffer|bucket|pin|vision|image|video|pixel|expert|moe|draft"
    r"|speculative|critic|teacher|reward_model|ref_model|ema|swap|memory|gpu|compile|graph|pack|pad|vocab|head|embed",
    re.IGNORECASE,
)
"""Words in a key's name that speak of memory."""

SETTLED = re.compile(
    r"(?:^|[._-])(?:(?:train_)?global_batch_size|(?:rollout|eval|consumer|over_sampling|generation|val|batch)_?batch_size|(?:policy|critic)_mini_batch_size"
    r"|update_epochs_per_batch|ppo_n_minibatches|batch_multiplier|batched|dump_data_batch|max_(?:num|sample)_batches|batch_adjust_mode"
    r"|\w*(?:num|n)_gpus(?:_per_(?:node|worker|engine))?|device_mapping|gpus_per_node|beta[12]|gradient_clipping\w*|clipping_\w+|hysteresis|\w*loss_scale\w*"
    r"|overlong_buffer\w*|overlap_\w+|\w*divisible_by|sequence_length_round\w*|microbatch_order|algorithm|max_input_seq_length|max_input_length"
    r"|num_parallel_generation_workers|moe_(?:router|token|grouped|permute|shared|enable|layer_freq|layer_recompute|ffn_hidden_size|aux)\w*|freeze_\w+|lora_[AB]_init_method|dropout_position"
    r"|length_penalty\w*|max_head_offpolicyness|checkpoint_config|memory_monitor|pin_memory|skip_optimizer|num_attention_heads|num_experts|untie_embeddings\w*"
    r"|position_embedding_type|attention_output_gate|vocab_size|n_heads|decoder_(?:first|last)_pipeline_num_layers|deterministic_mode|max_turns|use_distributed_optimizer|infer_batch_size|ppo_mini_batch_size|image_folders?|image_root|data_file_paths|n_val|do_sample|hybrid_engine|\w*max_gen_batches|empty_unused_memory_level|ckpt_assume_constant_structure|\w*loss_weight|num_infer_gpus|(?:orchestrator|data|rollout)\.batch_size|model\.max_seq_len|max_(?:completion_|new_)?tokens(?:_per_\w+)?|context_length|disable_radix_cache|actor_infer\.model_args\.disable_gradient_checkpointing|max_position_embeddings|\w*image_folder|evaluation_images)(?:$|\.)"
    r"|(?:^|\.)(?:eval\w*|validation|environment|env|econfig|env_vars|custom_envs|icl\w*|algorithms|callbacks)(?:\.|$)|^env_|_env_vars\.|_CACHE_|optimizer\.(?:bf16|optimizer|params_dtype|sgd_momentum)$"
)
"""Names that speak of memory and move none of a card's: batches that are cut into micro-batches, counts of
GPUs read elsewhere, shapes that the model's own config states, what only evaluation or an environment has."""

DTYPE = re.compile(r"(?:dtype|precision)$", re.IGNORECASE)
SIXTEEN = ("bfloat16", "bf16", "auto", "torch.bfloat16")
"""What such a key says where it says nothing that is not planned anyway."""
