"""Words that a key may hold in some tool, by what it decides: another one is reported, not taken for a default."""

import re
from typing import Any

_SWITCH = r"true|false|yes|no|on|off|none|null|auto|default|\d+"
_PRECISION = (
    r"bf-?16|bfloat16|fp-?16|float16|half|(?:fp|float|tf)-?32|float|amp|mixed|fp8|float8|mxfp\d"
)
VOCABULARY = {
    field: re.compile(rf"^(?:{_SWITCH})?$|{words}", re.IGNORECASE)
    for field, words in {
        "dtype": rf"{_PRECISION}|^(?:16|32|64)|int[48]|[48]bit|checkpoint",
        "mixed_precision": _PRECISION,
        "attention": r"flash|^fa[234]|eager|disabled|sdpa|xformers|sage|flex|paged|triton|torch|fused|cudnn|local|cp$|kernels|npu",
        "checkpointing": r"full|selective|offload|unsloth|layer|block|uniform|memory_budget|\bop\b|legacy|disk|hidden_states|mixed",
        "sharding": r"zero|\bz[0-3]|ds_|dsz|stage|fsdp|shard|deepspeed|megatron|mcore|ddp|\bdp\b|wrap|offload|\.json|\.ya?ml|single|hf_infer|automodel|^\{",
        "task": r"dpo|ipo|apo|kto|cpo|orpo|simpo|grpo|group_norm|gspo|dapo|cispo|bnpo|gdpo|ebft|gae|ppo|reinforce|rloo|remax|opo|gpg|maxrl|sft|\bpt\b|\brm\b|gkd|opd|distill|causal_lm|seq_cls|embed|rerank|pretrain|reward|step|pass_k|nash|xpo",
        "method": r"lora|full|freeze|peft|dora|adapter|oft|boft|vera|reft|bone|fourier|prefix|prompt|longlora|galore",
        "quantization": r"awq|gptq|marlin|fp[468]|float8|bitsandbytes|bnb|nf4|int[48]|[2-8]_?bit|compressed|modelopt|gguf|exl|hqq|eetq|aqlm|ao\b|torchao|quark|mxfp|w\d+a\d+|quanto|humming|rtn|ptpc|wna16|inc\b|auto-round|petit|qoq",
        "engine.kv_dtype": rf"{_PRECISION}|int8|fp4|nvfp4|turboquant",
        "engine": r"sglang|vllm|[dtpce]\d|server|colocate|async|sync|hf|cpu|dist",
        "parallel": r"fsdp|megatron|archon|sglang|vllm|[dtpce]\d",
        "gpus": r"range|\d|list|\[",
        "float8": r"float8|fp8|mx|nvfp4|rowwise|tensorwise|quantize",
        "compile_loss": r"model|loss",
        "loss": r"cross|chunk|linear|dpo|rso|simpo|loss|liger|fused|disabled|quack|\bkl",
        "lora.bias": r"all|lora_only",
    }.items()
}
"""Recipe fields -> what the tools call their values, all tools together: which of them a tool knows is its
importer's to say."""


def strange(to: str, value: Any) -> bool:
    """Return whether a word is none that any tool has for a field."""
    known = VOCABULARY.get(to)
    return known is not None and isinstance(value, str) and not known.search(value.strip())
