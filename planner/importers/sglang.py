"""SGLang servers: `python -m sglang.launch_server` and `sglang serve` (0.5: srt/server_args.py).

SGLang has no law of its own: it is planned as a vLLM server of the same share, which is said.
"""

from typing import Any

from planner.importers import words
from planner.importers.launchers import started
from planner.importers.names import quantization_in_name, resolve_model
from planner.importers.settings import Imported, Settings
from planner.importers.shell import Script, flags
from planner.run.recipe import EngineKind, Method, Sharding, Task

VERSION = "0.5"
SHARE = 0.88
"""mem_fraction_static where neither flag nor a large tensor-parallel degree lowers it."""
_SHORT = {
    "tp": "tp-size",
    "tensor-parallel-size": "tp-size",
    "dp": "dp-size",
    "data-parallel-size": "dp-size",
    "pp": "pp-size",
    "pipeline-parallel-size": "pp-size",
    "ep": "ep-size",
    "model": "model-path",
}


def read_script(script: Script, *, version: str | None = None) -> Imported | None:
    """Return the run of the first SGLang server command, or None."""
    for command, environment in zip(script.commands, script.prefixes, strict=True):
        program = started(command, environment)
        if program is None:
            continue
        served = program.name == "sglang" and program.arguments[:1] == ["serve"]
        if served or program.program in ("sglang.launch_server", "sglang.srt.server"):
            return read(dict(flags(program.arguments)), version=version)
    return None


def read(given: dict[str, Any], *, version: str | None = None) -> Imported:
    """Return a server's flags as a run."""
    dashed = {key.replace("_", "-"): value for key, value in given.items()}
    values = {_SHORT.get(key, key): value for key, value in dashed.items()}
    settings = Settings(values, tool="sglang", version=version or VERSION, assumed=version is None)
    model = str(settings.raw("model-path", to="model", default=""))
    recipe: dict[str, Any] = {"framework": "vllm", "task": Task.SERVE, "method": Method.FULL}
    word, named = settings.raw("quantization", to="quantization"), quantization_in_name(model)
    if word or named:
        known = {"awq": "awq-4bit", "gptq": "gptq-4bit", "fp8": "fp8", "bitsandbytes": "nf4"}
        match = next((value for key, value in known.items() if key in str(word)), None)
        recipe["quantization"] = named or match or "none"
    recipe["dtype"] = words.dtype(settings.raw("dtype", to="dtype"))
    spec = resolve_model(model) if model else None
    most = spec.max_position if spec else None
    recipe["context"] = settings.count("context-length", to="context", default=most)
    tensor = settings.count("tp-size", to="engine.tensor_parallel", default=1) or 1
    pipeline = settings.count("pp-size", to="engine.pipeline_parallel") or 1
    copies = settings.count("dp-size", to="gpus") or 1
    attention = settings.flag("enable-dp-attention")
    if attention:
        settings.effect(
            "enable-dp-attention: data-parallel ranks are inside the tensor-parallel ones"
        )
    experts = (settings.count("ep-size", to="engine.expert_parallel") or 1) > 1
    share = settings.number(
        "mem-fraction-static", to="engine.gpu_memory_utilization", default=SHARE
    )
    settings.effect(
        "SGLang is planned as a vLLM server: mem-fraction-static is the share of weights and KV pool alone, "
        "activations and graphs come on top of it"
    )
    if settings.raw("speculative-algorithm", "speculative-draft-model-path"):
        settings.effect("a speculative drafter's weights and KV cache come on top")
    settings.quiet(
        "speculative-",
        "schedule-",
        "disable-radix",
        "=attention-backend",
        "=num-continuous-decode-steps",
        "=model-impl",
        "log-",
        "enable-metrics",
        "nccl-",
        "dist-",
        "node-rank",
        "nnodes",
        "stream-",
        "decode-log",
        "watchdog",
        "device",
        "grammar",
        "is-embedding",
    )
    if largest := settings.count("cuda-graph-max-bs", to="engine.cuda_graphs", off=True):
        settings.effect(
            f"CUDA graphs of up to {largest} sequences: planned as vLLM's, which are more"
        )
    kv = settings.raw("kv-cache-dtype", to="engine.kv_dtype")
    engine = {
        "kind": EngineKind.VLLM_SERVER,
        "gpu_memory_utilization": share,
        "max_num_seqs": settings.count("max-running-requests", to="engine.max_num_seqs"),
        "max_num_batched_tokens": settings.count(
            "chunked-prefill-size", to="engine.max_num_batched_tokens", off=True
        ),
        "kv_dtype": "fp8" if "fp8" in str(kv) else None,
        "cpu_offload_gib": settings.number("cpu-offload-gb", to="engine.cpu_offload_gib"),
        "cuda_graphs": not settings.flag("disable-cuda-graph", to="engine.cuda_graphs"),
        "tensor_parallel": tensor,
        "pipeline_parallel": pipeline,
        "data_parallel": 1 if attention else copies,
        "expert_parallel": experts,
    }
    gpus = tensor * pipeline * (1 if attention else copies)
    if gpus > 1:
        recipe["sharding"] = Sharding.NONE
    return settings.finish(model, recipe=recipe, lora={}, engine=engine, gpus=gpus)
