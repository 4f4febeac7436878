"""What a pasted text, a config and the flags say about the run: model, method, batch, cards."""

import re
from dataclasses import dataclass, field, replace
from itertools import islice

from planner.errors import VramwiseError
from planner.machines.machine import find_gpu
from planner.models.spec import ModelSpec
from planner.run.framework import pick
from planner.run.recipe import Method, Recipe, Sharding, Task
from planner.units import GiB

_KEYS: dict[str, str] = {
    "batch": r"per_device_(?:train_)?batch(?:_size)?|micro_batch_size(?:_per_gpu)?|train_micro_batch_size_per_gpu"
    r"|local_batch(?:_size)?|logprob_batch_size|micro_train_batch(?:_size)?|batch_size",
    "length": r"max_seq_length|max_seq_len|max_seq|sequence_len|seq_length|seq_len|seq|cutoff_len|max_length|context(?:_length)?",
    "prompt": r"max_prompt_length|prompt(?:_length)?",
    "completion": r"max_completion_length|max_response_length|response(?:_length)?|completion(?:_length)?",
    "generations": r"num_generations|rollout\.n|n_samples_per_prompt",
    "tp": r"tensor[-_](?:model[-_])?parallel[-_]size|rollout_tp|tp(?:[-_]size)?",
    "max_num_seqs": r"max[-_]num[-_]seqs",
    "max_model_len": r"max_model_len|vllm_maxlen|max-model-len",
    "vocab": r"vocab_per_rank|vocab_size|vocab",
    "tokens": r"tokens",
    "gpus": r"num_gpus|n_gpus(?:_per_node)?|num_processes|nproc_per_node|world_size|gpus",
    "host_ram_gb": r"host_ram_gb",
    "accumulation": r"gradient_accumulation(?:_steps)?|grad_accum(?:ulation)?(?:_steps)?",
    "layers": r"num_hidden_layers",
    "hidden": r"hidden_size",
    "ffn": r"intermediate_size",
}
_NUMBER = r"['\"]?\s{0,8}[:=\s]\s{0,8}['\"]?(\d[\d,_]{0,14})(?![\d,_]|\.\d|e-?\d)"
_PATTERNS = {
    name: re.compile(rf"(?<![\w.])(?:--)?(?:{keys}){_NUMBER}", re.IGNORECASE)
    for name, keys in _KEYS.items()
}
_UTIL = re.compile(
    r"gpu[_-]memory[_-]utilization['\"]?\s*[:=\s]\s*['\"]?(0?\.\d+|1\.0)|\butil\w*\s*=?\s*(0?\.\d+)"
)
_MODEL_KEY = re.compile(
    r"(?:model_name_or_path|model_name|base_model|model_path|model_id|model_tag|model|--model)['\"]?\s*[:=]\s*['\"]?"
    r"([^\n'\",;}{]{2,100})",
)
_MODEL_WORD = re.compile(
    r"(?<![\w/.-])(?:[\w.-]+/)?(?:unsloth-)?(?:Qwen|QwQ|Llama|LLaMA|Meta-Llama|CodeLlama|Mistral|Mixtral|Ministral|Codestral"
    r"|Magistral|Devstral|gemma|Phi|phi|GPT-J|gpt-neox|gpt2|gpt-oss|OPT|opt|Falcon|falcon|Baichuan|DeepSeek|GLM|glm|Yi|InternLM"
    r"|Kimi|MiniMax|Nemotron|SmolLM|TinyLlama|OLMo|granite|starcoder|bloom|Pythia|pythia|Vicuna|Zephyr|zephyr)"
    r"[\w.-]*?\d[\w.]*[\w-]*(?:[ -]\d+(?:\.\d+)?[bB])?"
)
_NAME = re.compile(r"(?=.{0,100}\d)[\w~/][\w./+:-]*(?: [\w.(),+/ -]*)?$|[\w.-]+/[\w.-]+$")
"""A value that can be a model's name, unlike the rest of a line of code."""
_VISION = re.compile(r"\b\w*VL\b|[Vv]ision|[Oo]mni")
_GPU_WORD = re.compile(
    r"\b(?:NVIDIA |GeForce |Tesla )*(?:RTX[ _-]?(?:PRO )?\d{4}(?: ?Ti| Super)?|[AH]\d{2,3}(?:-SXM\d?)?(?:-\d+GB)?|[LTVB]\d{1,3}S?\b|H200|B200"
    r"|GH200|A10G|H20|A800|H800|Titan \w+)(?:[ -]\d+ ?G[Bi]*)?"
)
_CARD_GB = re.compile(r"\b(\d{1,3}) ?G[Bi]{1,2}\b")
_PARAMETERS = re.compile(
    r"(?<![\w.])~?(\d+(?:\.\d+)?) ?[Bb](?:illion)?(?:-A\d+(?:\.\d+)?B)?(?![\w.])"
)
_SHAPE_HINTS = (
    ("vocab", r"\bvocab(?:ulary)?(?: of| size)?[ (=]{1,2}(\d{4,7})"),
    ("hidden", r"\bh(?:idden )?(\d{3,5})\b"),
    ("ffn", r"\bffn (\d{3,6})"),
    ("layers", r"(\d+) layers"),
)
_COUNT_GPUS = re.compile(
    r"\b(\d{1,4}) ?(?:[x*\u00d7] ?)(?:NVIDIA )?(?:[AHLBV]\d{2,3}|RTX|GPUs?\b|\d{2,3} ?G)|\b(\d{1,4}) GPUs?\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Context:
    """Facts about the run; None or "" = not said."""

    model: ModelSpec | None = None
    model_name: str = ""
    parameters: int | None = None
    """From the model, else from a size in its name (about)."""
    task: str = ""
    method: str = ""
    sharding: str = ""
    vram_bytes: int | None = None
    utilization: float | None = None
    numbers: dict[str, int] = field(default_factory=dict)
    unsloth: bool = False
    colocated: bool = False
    multimodal: bool = False
    mixed_fp32: bool = False
    """Training keeps fp32 weights or masters: fp16 AMP, DeepSpeed, fp32 weights."""
    text: str = ""
    notes: tuple[str, ...] = ()

    def number(self, name: str) -> int | None:
        """Return a count by name ("batch", "length", "gpus", "tp" ...), or None."""
        return self.numbers.get(name)

    @property
    def gpus(self) -> int:
        """GPUs of the run; 1 if not said."""
        return max(1, self.numbers.get("gpus", 1))

    @property
    def vocab(self) -> int | None:
        """Vocabulary rows of the head on one rank."""
        return self.numbers.get("vocab") or (self.model.vocab if self.model else None)


def read_context(
    text: str,
    *,
    model: str | None = None,
    gpu: str | None = None,
    recipe: Recipe | None = None,
    config_model: str | None = None,
    gpus: int | None = None,
) -> Context:
    """Return what is known: flags first, then the config, then what the text says."""
    numbers = {}
    for name, pattern in _PATTERNS.items():
        if match := pattern.search(text):
            numbers[name] = int(match.group(1).replace(",", "").replace("_", ""))
    if "gpus" not in numbers and (match := _COUNT_GPUS.search(text)):
        numbers["gpus"] = int(match.group(1) or match.group(2))
    context = Context(
        task=_task(text),
        method=_method(text),
        sharding=_sharding(text),
        utilization=_utilization(text),
        numbers=numbers,
        unsloth="unsloth" in text.lower(),
        colocated=bool(
            re.search(
                r"colocat|vllm_mode|fast_inference|standby|sleep_level|Sleep mode|free_cache_engine|wake_up",
                text,
            )
        ),
        multimodal=bool(
            re.search(r"\b(?:image|video|vision|pixel|limit_mm|multimodal|\w*VL)\b", text)
        ),
        mixed_fp32=bool(re.search(r"\bAMP\b|deepspeed|ZeRO|\bfp32\b|float32", text, re.IGNORECASE)),
        text=text,
    )
    if recipe is not None:
        context = _with_recipe(context, recipe)
    if gpus:
        context = replace(context, numbers={**context.numbers, "gpus": gpus})
    context = _with_gpu(context, gpu)
    return _with_model(context, model or config_model or model_in_text(text))


def model_in_text(text: str) -> str:
    """Return the model a text names, or ""."""
    for match in islice(_MODEL_KEY.finditer(text), 200):
        name = match.group(1).strip("`*() ")
        if _NAME.match(name):
            return name
    word = _MODEL_WORD.search(text)
    return word.group() if word else ""


def _with_model(context: Context, name: str) -> Context:
    if not name:
        return context
    from planner.importers.names import resolve_model

    word = _MODEL_WORD.search(name)
    spec = resolve_model(name) or (resolve_model(word.group()) if word else None)
    numbers = dict(context.numbers)
    parameters = spec.parameters if spec else None
    notes = context.notes
    hints = f"{name} {context.text[:2000]}"
    for key, pattern in _SHAPE_HINTS:
        if key not in numbers and (match := re.search(pattern, hints)):
            numbers[key] = int(match.group(1))
    if spec is None:
        if match := _PARAMETERS.search(name.replace("-", " ").replace("_", " ")):
            parameters = int(float(match.group(1)) * 1e9)
        notes = (*notes, f"model {name[:80]!r} is not in the catalogue: shapes are unknown")
    return replace(
        context,
        model=spec,
        multimodal=context.multimodal or bool(spec and spec.towers) or bool(_VISION.search(name)),
        model_name=name[:120],
        parameters=parameters,
        numbers=numbers,
        notes=notes,
    )


def _with_gpu(context: Context, gpu: str | None) -> Context:
    match = None if gpu else _GPU_WORD.search(context.text)
    name = gpu or (match.group() if match else "")
    if not name:
        return context
    vram: int | None = None
    try:
        vram = find_gpu(name).torch_total_bytes
    except VramwiseError:
        nearby = name if gpu else context.text[match.start() : match.end() + 12] if match else ""
        if size := _CARD_GB.search(nearby):
            vram = int(size.group(1)) * GiB
    notes = context.notes
    if vram is None and gpu:
        notes = (
            *notes,
            f"gpu {gpu[:60]!r} is not known: its memory is taken from the message, if it says",
        )
    return replace(context, vram_bytes=vram, notes=notes)


def _with_recipe(context: Context, recipe: Recipe) -> Context:
    numbers = dict(context.numbers)
    for key, value in (
        ("batch", recipe.micro_batch_size),
        ("length", recipe.context),
        ("prompt", recipe.prompt_length),
        ("completion", recipe.completion_length),
        ("generations", recipe.num_generations),
        ("max_num_seqs", recipe.engine.max_num_seqs),
    ):
        if value:
            numbers[key] = value
    if recipe.prompt_length and recipe.completion_length and not recipe.context:
        numbers["length"] = recipe.prompt_length + recipe.completion_length
    return replace(
        context,
        numbers=numbers,
        task=recipe.task.value,
        method=recipe.method.value,
        sharding=recipe.sharding.value
        if recipe.sharding is not Sharding.NONE
        else context.sharding,
        utilization=recipe.engine.gpu_memory_utilization or context.utilization,
        unsloth=context.unsloth or pick(recipe.framework).family == "unsloth",
    )


def _task(text: str) -> str:
    if re.search(r"\bPPO\b|RLHF step 3", text):
        return "ppo"
    if re.search(r"GRPO|\bRLOO\b|grpo|\bDAPO\b", text):
        return Task.GRPO.value
    if re.search(r"\bDPO\b|\bdpo\b", text):
        return Task.DPO.value
    if re.search(r"\bSFT\b|\bsft\b|fine-?tun|LoRA|lora", text):
        return Task.SFT.value
    return Task.SERVE.value if re.search(r"vllm serve|LLM engine|inference", text) else ""


def _method(text: str) -> str:
    if re.search(r"qlora|QLoRA|load_in_4bit['\"]?\s*[:=]\s*['\"]?[Tt]rue|bnb-4bit|4-bit|nf4", text):
        return Method.QLORA.value
    if re.search(r"\blora\b|LoRA", text):
        return Method.LORA.value
    return Method.FULL.value if re.search(r"\bfull\b", text, re.IGNORECASE) else ""


def _sharding(text: str) -> str:
    if match := re.search(
        r"ZeRO[- _]?(?:stage[- _]?)?([123])|zero[_-]?(?:stage['\"]?\s*[:=]\s*)?([123])\b|\"stage\":\s*([123])",
        text,
        re.IGNORECASE,
    ):
        return f"zero{next(group for group in match.groups() if group)}"
    if re.search(r"\bFSDP2?\b|fsdp", text):
        return Sharding.FSDP.value
    return Sharding.DDP.value if re.search(r"\bDDP\b", text) else ""


def _utilization(text: str) -> float | None:
    match = _UTIL.search(text)
    return float(match.group(1) or match.group(2)) if match else None
