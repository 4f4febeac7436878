"""vLLM: `vllm serve` lines, api_server commands, LLM(...) calls, serve YAML and recipe YAML (0.32)."""

import re
from pathlib import Path
from typing import Any

from planner.importers.names import quantization_in_name
from planner.importers.settings import Imported, Settings
from planner.importers.shell import Script, flags, parse_shell
from planner.run.recipe import EngineKind, Method, Sharding, Task

VERSION = "0.32"
OLD_VERSION = "0.10.2"
OLD = (
    "num-scheduler-steps",
    "use-v2-block-manager",
    "num-lookahead-slots",
    "preemption-mode",
    "scheduler-delay-factor",
    "worker-use-ray",
)
"""Flags of the V0 engine, which releases from 0.11 on do not have."""
_SHORT = {
    "tp": "tensor-parallel-size",
    "dp": "data-parallel-size",
    "pp": "pipeline-parallel-size",
    "O": "optimization-level",
    "q": "quantization",
}


def read_script(script: Script, *, version: str | None = None) -> Imported | None:
    """Return the run of the first vLLM server command, or None."""
    for command in script.commands:
        shell = next(
            (i for i, word in enumerate(command[:-1]) if re.match(r"-[lex]*c$", word)), None
        )
        if shell is not None and "vllm" in command[shell + 1]:  # bash -c "...", docker's too
            return read_script(parse_shell(command[shell + 1]), version=version)
        if (values := _command(command)) is not None:
            return read(values, version=version)
    return None


def _command(command: list[str]) -> dict[str, Any] | None:
    names = [Path(word).name for word in command]
    text = " ".join(command)
    if "vllm" in names and "serve" in names[names.index("vllm") : names.index("vllm") + 2]:
        rest = command[names.index("serve") + 1 :]
    elif "vllm.entrypoints" in text or "vllm/vllm-openai" in text:
        start = next(
            index
            for index, word in enumerate(command)
            if "vllm.entrypoints" in word or "vllm/vllm-openai" in word
        )
        rest = command[start + 1 :]
    else:
        return None
    positional = rest[0] if rest and not rest[0].startswith("-") else None
    values: dict[str, Any] = {
        _SHORT.get(key, key).replace("_", "-"): value for key, value in flags(rest).items()
    }
    if isinstance(named := values.get("model"), list):  # words after the value that are no flags
        values["model"] = named[0]
    if positional and "model" not in values:
        values["model"] = positional
    return values


def read(values: dict[str, Any], *, version: str | None = None, is_call: bool = False) -> Imported:
    """Return server or LLM() settings as a run. `is_call`: LLM(), whose defaults differ."""
    values = {
        _SHORT.get(str(key), str(key)).replace("_", "-"): value for key, value in values.items()
    }
    old = next((key for key in OLD if values.get(key) is not None), None)
    settings = Settings(
        values,
        tool="vllm",
        version=version or (OLD_VERSION if old else VERSION),
        assumed=version is None,
        why=f"{old} was V0's, which 0.11 no longer has" if old and version is None else "",
    )
    settings.raw(*OLD)
    model = str(settings.raw("model", "model-tag", "*0", to="model", default=""))
    recipe: dict[str, Any] = {
        "framework": settings.framework("vllm"),
        "task": Task.SERVE,
        "method": Method.FULL,
    }
    quantization = settings.raw("quantization", to="quantization")
    named = quantization_in_name(model)
    if quantization or named:
        recipe["quantization"] = _quantization(str(quantization)) if quantization else named
        recipe["quantization"] = named or recipe["quantization"]
    _dtype(settings, recipe)
    _length(settings, recipe, model)
    tensor = settings.count("tensor-parallel-size", to="engine.tensor_parallel", default=1) or 1
    pipeline = settings.count("pipeline-parallel-size", to="engine.pipeline_parallel") or 1
    data = settings.count("data-parallel-size", to="engine.data_parallel", default=1) or 1
    experts = settings.flag("enable-expert-parallel", to="engine.expert_parallel")
    if data > 1 and experts:
        settings.effect(
            "data parallel with expert parallel: attention weights and KV cache are replicated, experts are split"
        )
    engine = _engine(settings, is_call)
    engine |= {
        "tensor_parallel": tensor,
        "pipeline_parallel": pipeline,
        "data_parallel": data,
        "expert_parallel": bool(experts),
        "cpu_offload_gib": settings.number("cpu-offload-gb", to="engine.cpu_offload_gib"),
        **_adapter_slots(settings),
        **_prefixes(settings),
    }
    gpus = tensor * pipeline * data
    if gpus > 1:
        recipe["sharding"] = Sharding.NONE
    _extras(settings)
    return settings.finish(model, recipe=recipe, lora={}, engine=engine, gpus=gpus)


def _length(settings: Settings, recipe: dict[str, Any], model: str) -> None:
    if str(settings.values.get("max-model-len")) in ("-1", "auto"):
        settings.raw("max-model-len", to="context")
        settings.effect("max-model-len auto: vLLM takes the largest length that fits")
        return
    length = settings.count("max-model-len", to="context")
    recipe["context"] = length or _model_length(settings, model)


def _adapter_slots(settings: Settings) -> dict[str, int | None]:
    """Return the adapter slots that --enable-lora preallocates."""
    slots = settings.count("max-loras", to="engine.max_loras")
    rank = settings.count("max-lora-rank", to="engine.max_lora_rank")
    if not settings.flag("enable-lora", to="engine.max_loras"):
        return {}
    settings.effect(f"{slots or 1} LoRA slot(s) of rank {rank or 16} are preallocated")
    return {"max_loras": slots or 1, "max_lora_rank": rank or 16}


def _prefixes(settings: Settings) -> dict[str, bool]:
    """Return whether prefixes are cached, where somebody says so."""
    if settings.values.get("enable-prefix-caching") is None:
        return {}
    return {"prefix_caching": settings.flag("enable-prefix-caching", to="engine.prefix_caching")}


def _extras(settings: Settings) -> None:
    """Read what comes on top of weights, KV cache and activations, or moves none of them."""
    if settings.raw("speculative-config", to="engine") or any(
        key.startswith("speculative-config.") for key in settings.values
    ):
        settings.used.update(
            key for key in settings.values if key.startswith("speculative-config.")
        )
        settings.effect("a speculative drafter's weights and KV cache come on top")
    settings.raw(
        "enable-chunked-prefill",
        "limit-mm-per-prompt",
        "mm-processor-kwargs",
        "swap-space",
        "kv-transfer-config",
        "async-scheduling",
        "disable-log-requests",
        "compilation-config",
        "reasoning-parser",
        "moe-backend",
    )


def _quantization(word: str) -> str:
    for pattern, name in (
        ("awq", "awq-4bit"),
        ("gptq", "gptq-4bit"),
        ("bitsandbytes", "nf4"),
        ("fp8", "fp8"),
        ("mxfp4", "mxfp4"),
        ("nvfp4|modelopt_fp4", "nvfp4"),
    ):
        if re.search(pattern, word):
            return name
    return "none"


def _dtype(settings: Settings, recipe: dict[str, Any]) -> None:
    from planner.importers import words

    given = settings.raw("dtype", to="dtype", default="auto")
    recipe["dtype"] = words.dtype(given)


def _model_length(settings: Settings, model: str) -> int | None:
    from planner.importers.names import resolve_model

    spec = resolve_model(model) if model else None
    if spec is None or not spec.max_position:
        return None
    settings.defaulted("context", f"{spec.max_position} (the model's)")
    return spec.max_position


def _engine(settings: Settings, is_call: bool) -> dict[str, Any]:
    """Return the engine's settings; what is not said follows from release and card (EngineLaw)."""
    kv = settings.raw("kv-cache-dtype", to="engine.kv_dtype", default="auto")
    return {
        "kind": EngineKind.VLLM_SERVER,
        "gpu_memory_utilization": settings.number(
            "gpu-memory-utilization",
            to="engine.gpu_memory_utilization",
            default=settings.law("vllm").engine.utilization,
        ),
        "max_num_seqs": settings.count("max-num-seqs", to="engine.max_num_seqs"),
        "max_num_batched_tokens": settings.count(
            "max-num-batched-tokens", to="engine.max_num_batched_tokens"
        ),
        "offline": is_call,
        "kv_dtype": "fp8" if "fp8" in str(kv) else None,
        "kv_bytes": settings.count(
            "kv-cache-memory-bytes", "kv-cache-memory", to="engine.kv_bytes"
        ),
        "block_size": settings.count("block-size", to="engine.block_size"),
        "cuda_graphs": not settings.flag("enforce-eager", to="engine.cuda_graphs"),
    }


def read_recipe(
    document: dict[str, Any],
    *,
    version: str | None = None,
    variant: str | None = None,
) -> Imported:
    """Return one variant of a vLLM recipe YAML: base_args + extra_args + hardware override.

    `variant`: its name, or name:hardware ("nvfp4:rtx_5090").
    """
    model, variants = _section(document, "model"), _section(document, "variants")
    wanted, _, hardware = (variant or "").partition(":")
    name = wanted or ("default" if "default" in variants else next(iter(variants), ""))
    chosen = _section(variants, name)
    arguments: list[str] = []
    for source, key in ((model, "base_args"), (chosen, "extra_args")):
        part = source.get(key) or []
        arguments += [str(item) for item in part] if isinstance(part, list) else str(part).split()
    overrides = _section(chosen, "hardware_overrides")
    arguments += [str(item) for item in _section(overrides, hardware).get("extra_args") or []]
    values: dict[str, Any] = flags(arguments)
    if chosen.get("tp"):
        values.setdefault("tensor-parallel-size", chosen["tp"])
    hub_id = (
        chosen.get("model_id")
        or model.get("model_id")
        or model.get("id")
        or document.get("model_id")
        or ""
    )
    found = read({**values, "model": hub_id}, version=version)
    if chosen.get("vram_minimum_gb"):
        found.report.effects.append(
            f"vram_minimum_gb {chosen['vram_minimum_gb']} is parameters * bytes * 1.2, not a measurement"
        )
    if len(variants) > 1:
        found.report.effects.append(f"variant {name!r} of {', '.join(variants)} was read")
    return found


def _section(document: dict[str, Any], key: str) -> dict[str, Any]:
    value = document.get(key)
    return value if isinstance(value, dict) else {}
