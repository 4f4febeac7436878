"""Stack frames and words -> what the program was doing when it ran out."""

import re
from collections.abc import Sequence

PHASES: tuple[tuple[str, str], ...] = (
    (
        "sampler_warmup",
        r"_dummy_sampler_run|warming up sampler|apply_top_k_top_p|logits\.sort|sampler warm-?up",
    ),
    (
        "graph_capture",
        r"capture_end|capture_begin|capture_model|torch\.cuda\.graph|cuda ?graph|CUDA graph capture|[Cc]apturing (?:cuda|CUDA)|Graph capturing",
    ),
    ("prompt_logprobs", r"prompt[_-]logprobs"),
    (
        "mm_profile",
        r"embed_multimodal|get_multimodal_embeddings|profil\w*.{0,60}(?:pixel|image|vision|multimodal)|dummy_(?:image|video)|encoder_cache|limit_mm_per_prompt",
    ),
    ("vllm_profile", r"determine_num_available_blocks|determine_available_memory|\bprofile_run\b"),
    ("wake_up", r"wak(?:e|ing)[ _-]up|create_and_map|cumem_allocator"),
    ("kbit_prepare", r"prepare_model_for_kbit_training"),
    (
        "optimizer_init",
        r"initialize_optimizer_states|_initialize_optimizer|engine initiali[sz]ation|deepspeed\.initialize|init_optimizer|_create_fp32_partitions|_setup_for_real_optimizer|initialize_optimizer|fp32_flat|fp32_partition|fp32_groups|master_(?:param|weight)|main_params|low_level_optim|flatten_dense_tensors|_flatten_dense",
    ),
    (
        "gather",
        r"GatheredParameters|unwrap_model_for_generation|summon_full_params|gather_full|ds3_gather|full_tensor\(\)|_gather_all",
    ),
    # torch.distributed.fsdp: _fully_shard/_fsdp_collectives.py, _runtime_utils.py, _flat_param.py; DeepSpeed stage 3
    (
        "reduce_copy",
        r"\bforeach_reduce\b|reduce_scatter_input|padded_unsharded_grad|\b_reduce_grad\b",
    ),
    (
        "unit_gather",
        r"\bforeach_all_gather\b|all_gather_(?:output|copy_in)|_alloc_padded_unsharded|\bin _?unshard\b|\bfetch_sub_module\b",
    ),
    (
        "save",
        r"state_dict\(\)|save_pretrained|save_model|_save_checkpoint|checkpoint saving|saving (?:the )?(?:model|checkpoint)|full_state_dict|FULL_STATE_DICT|save_checkpoint|torch\.save",
    ),
    (
        "resume",
        r"_load_optimizer_and_scheduler|_load_from_checkpoint|resume_from_checkpoint|optimizer\.load_state_dict|[Rr]estoring checkpoint"
        r"|[Rr]esuming (?:from|training)|load_optimizer|torch\.load\(|torch/serialization\.py|default_restore_location|deepcopy\(state_dict"
        r"|load_checkpoint\(|_process_value_according_to_param_policy",
    ),
    (
        "load",
        r"_load_state_dict_into_meta_model|_load_pretrained_model|[Ll]oading checkpoint shards|load_state_dict|caching_allocator_warmup|\bmodel load\b|weight (?:loading|placement)|weights? placement|^load$|from_pretrained|dispatch_model|load_model|load_weights",
    ),
    (
        "module_to",
        r"module\.convert|Module\.to\b|\bt\.to\(|in _apply\b|(?:model|module)\.to\(|model\.cuda\(|\.to\(device|in convert\b",
    ),
    ("reload", r"reload_from_cpu|backload|onload|reload_params|load_to_gpu"),
    (
        "optimizer_temp",
        r"_foreach_(?:sqrt|div|add|mul|lerp|addcdiv|addcmul)|_multi_tensor_\w+|\bdenom\b|_single_tensor_adam",
    ),
    (
        "optimizer_states",
        r"_init_group|zeros_like\(.{0,40}memory_format|exp_avg|init_state|optimizer\.step|optim_step|optimizer step|[/ ]adamw?\.py",
    ),
    (
        "kv_concat",
        r"past_key_value|torch\.cat\(\[past|past_key_values|DynamicCache|\bcache_utils|key_cache",
    ),
    (
        "eval_accumulate",
        r"nested_concat|torch_pad_and_concatenate|prediction_loop|eval_accumulation|evaluation at \d+|eval during training|\bTrainer\.(?:evaluate|predict)|distributed_concat|all_preds|pad_across_processes",
    ),
    (
        "attention",
        r"_expand_mask|_prepare_4d|make_causal_mask|_update_causal_mask|attn_weights|attention_scores|scaled_dot_product_attention|eager_attention_forward|softmax\(attn|attention softmax|in _attn\b|baddbmm|alibi",
    ),
    (
        "vocab",
        r"cross_entropy|log_softmax|logsoftmax|entropy_from_logits|logprobs?_from_logits|per_token_logps|selective_log_softmax|convert_to_fp32|logits\.float|\.float\(\) on the model output|log_probs?\b|logprob|self\.lm_head\(|vocab_parallel|ForCausalLMLoss|loss_function|logits|compute_loss.{0,20}generations|GRPO loss|fused_linear|grad_in_feat|fixed_cross_entropy|entropy",
    ),
    ("mlp", r"down_proj\(|act_fn|gate_proj|swiglu|in mlp\b"),
    (
        "late_step",
        r"half-?way|after ~?\d+ (?:steps|iterations)|epoch [2-9]|step \d{3,}|later in training|randomly",
    ),
    ("host_load", r"host RAM|CPU memory|cpu_offload"),
    (
        "generation",
        r"\bgeneration\b|\.generate\(|in generate\b|_sample\b|generate_completions|generate_sequences",
    ),
    ("backward", r"\bbackward\b|autograd"),
    ("warmup", r"warm-?up"),
    ("forward", r"training_step|trainer\.train|compute_loss|in forward\b|\bforward\b|training\b"),
)
_COMPILED = tuple((name, re.compile(pattern)) for name, pattern in PHASES)
GENERIC = ("late_step", "host_load", "generation", "backward", "warmup", "forward", "mlp")
TRACEBACK = re.compile(r"Traceback \(most recent call last\)")


def phase_hints(stack: Sequence[str], prose: str) -> tuple[str, ...]:
    """Return the phases that the lines before an error point at, the most telling first.

    In a stack the innermost frame decides; a pasted description without a stack is read
    whole.
    """
    lines = list(stack)
    starts = [index for index, line in enumerate(lines) if TRACEBACK.search(line)]
    if starts:
        lines = lines[starts[-1] :]
    else:
        lines = lines[-12:] + (prose.splitlines() if len(prose) < 8000 else [])
    latest: dict[str, int] = {}
    for index, line in enumerate(lines):
        for name, pattern in _COMPILED:
            if pattern.search(line):
                latest[name] = index if starts else 0
    order = [name for name, _ in _COMPILED]
    return tuple(
        sorted(latest, key=lambda name: (name in GENERIC, -latest[name], order.index(name)))
    )
