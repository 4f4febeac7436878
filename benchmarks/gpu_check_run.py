"""The working side of gpu_check: runs jobs in this process and returns their rows."""

import gc
import importlib
import json
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check_jobs import (
    PROBE_MODULES,
    RESTART_CODE,
    Case,
    LeftOutError,
    Outcome,
    Probe,
    by_name,
)
from planner.errors import VramwiseError
from trainer.devices import check_driver

WITHIN = 0.03
VERSIONS = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "bitsandbytes",
    "datasets",
    "trl",
    "vllm",
)


def environment(*, cpu: bool) -> dict[str, Any]:
    """Return what this machine is; `problem` says in one line why its GPU cannot be used."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in VERSIONS if _version(name)},
        "cuda": torch.version.cuda,
        "problem": None,
        "gpu": None,
    }
    if cpu:
        return found
    problem = why_no_gpu()
    if problem:
        return found | {"problem": problem}
    free, total = torch.cuda.mem_get_info()
    return found | {
        "gpu": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "total_bytes": total,
        "free_bytes": free,
        "driver": driver(),
    }


def why_no_gpu() -> str | None:
    """Return in one line why torch cannot use a GPU here (an old driver among the reasons); None if it can."""
    try:
        unused = check_driver()
    except VramwiseError as error:
        return error.message
    return None if torch.cuda.is_available() else unused or "there is none"


def driver() -> str | None:
    """Return the NVIDIA driver's version; None where NVML does not tell."""
    from profiler.nvml import open_gpus

    try:
        with open_gpus() as gpus:
            return gpus.versions().get("driver")
    except VramwiseError:
        return None


def run_job(name: str, *, cpu: bool) -> dict[str, Any]:
    """Run a case or a probe here; whatever happens becomes its row."""
    job = by_name(name)
    started_s = time.monotonic()
    row: dict[str, Any] = {"name": name}
    try:
        row |= run_case(job, cpu=cpu) if isinstance(job, Case) else run_probe(job, cpu=cpu)
    except LeftOutError as error:
        row["left_out"] = str(error)
    except VramwiseError as error:
        row["failed"] = f"{error.message} ({error.hint})" if error.hint else error.message
    except Exception as error:  # a report of everything that goes wrong is what this script is for
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = next((line for line in str(error).splitlines() if line.strip()), "")
        row["failed"] = f"{type(error).__name__}: {text.strip()[:300]}"
        row["where"] = f"{Path(where.filename).name}:{where.lineno} {where.name}"
    row["seconds"] = round(time.monotonic() - started_s, 1)
    return row


def empty_caches() -> None:
    """Give back what a job left behind, so that the next one finds the device as it was."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def run_probe(probe: Probe, *, cpu: bool) -> dict[str, Any]:
    """Ask the device `probe`'s question."""
    from benchmarks.gpu_check_probe import Place

    if probe.gpu_only and cpu:
        raise LeftOutError("asks CUDA itself: needs a GPU")
    place = Place(torch.device("cpu" if cpu else "cuda:0"))
    torch.manual_seed(0)
    found = _probe(probe.name)(place)
    problems = found.pop("problems", [])
    return {"ok": not problems, "problems": problems, **found}


def _probe(name: str) -> Callable[..., dict[str, Any]]:
    for module in PROBE_MODULES:
        function = getattr(importlib.import_module(f"benchmarks.{module}"), name, None)
        if function is not None:
            return function  # type: ignore[no-any-return]
    raise LookupError(f"no probe {name} in {', '.join(PROBE_MODULES)}")


def run_case(case: Case, *, cpu: bool) -> dict[str, Any]:
    """Plan, run, record and trace `case`."""
    case = case.toy() if cpu else case
    free_bytes = None if cpu else torch.cuda.mem_get_info()[0]
    with tempfile.TemporaryDirectory() as name:
        if case.kind.startswith("vramwise"):
            from benchmarks.gpu_check_vramwise import run_vramwise as run
        else:
            from benchmarks.gpu_check_hf import run_hf as run
        outcome = run(
            case, config_of(case.model, cpu=cpu), Path(name), cpu=cpu, free_bytes=free_bytes
        )
    return {**case.fields, **compared(case, outcome, cpu=cpu)}


def compared(case: Case, outcome: Outcome, *, cpu: bool) -> dict[str, Any]:
    """Return planned, traced and measured of a case, and what is wrong with them."""
    plan, recording, skip = outcome.plan, outcome.recording, outcome.not_compared
    planned = {p.name: p.total_bytes for p in plan.phases if p.name not in skip}
    traced = {name: size for name, size in outcome.traced_phases.items() if name not in skip}
    measured = {p.name: p.peak_bytes for p in recording.phases if p.name not in skip}
    peak = max(measured.values())
    error = trace_error = None
    if "*" not in skip:
        error = max(planned.values()) / peak - 1
    if traced and "*" not in skip:
        # generation is not traced
        trace_error = max(traced.values()) / max(measured[name] for name in traced) - 1
    problems = [
        f"the {what} is off by {value:+.1%}"
        for what, value in (("plan", error), ("trace", trace_error))
        if value is not None and abs(value) > WITHIN
    ]
    if case.completion and "rollout" not in measured:
        problems.append("no rollout was recorded")
    return {
        "ok": not problems,
        "problems": problems,
        "planned_peak_bytes": max(planned.values()),
        "planned_reserved_bytes": plan.reserved_peak_bytes,
        "planned_device_bytes": plan.device_used_bytes,
        "traced_peak_bytes": max(traced.values(), default=None),
        "measured_peak_bytes": peak,
        "measured_reserved_bytes": recording.peak_reserved_bytes,
        "measured_device_bytes": recording.peak_device_bytes or device_used(cpu=cpu),
        "planned_phase": max(planned, key=lambda name: planned[name]),
        "measured_phase": max(measured, key=lambda name: measured[name]),
        "planned_phases": planned,
        "traced_phases": traced,
        "phases": measured,
        "not_compared": skip,
        "plan_error": error,
        "trace_error": trace_error,
        "step_seconds": outcome.step_seconds,
        # the first step warms up: kernels are chosen, the allocator grows
        "seconds_per_step": statistics.median(outcome.step_seconds[1:] or outcome.step_seconds),
        **outcome.more,
    }


def config_of(model: str, *, cpu: bool) -> dict[str, Any]:
    """Return the catalogue model's config.json; `cpu` cuts it down."""
    from planner.models.catalogue import load_catalogue

    config = dict(load_catalogue()[model]["config"])
    if cpu:
        config |= {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            # not grouped: grouped fp32 keys are planned as CUDA's math kernel, not a CPU's
            "num_key_value_heads": 4,
            "head_dim": 32,
            "vocab_size": 512,
        }
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:2]
    return config


def device_used(*, cpu: bool) -> int | None:
    """Return what the driver says is in use on the GPU now; None where it does not tell."""
    from profiler.nvml import open_gpus

    if cpu:
        return None
    try:
        with open_gpus() as gpus:
            return gpus.read()[0].used_bytes
    except VramwiseError:
        return None


def jsonable(value: Any) -> Any:
    """Return what json.dumps makes of something that it does not know."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main(names: list[str], *, cpu: bool, mark: str) -> int:
    """Print the environment, or one marked JSON line a job as soon as it is done."""

    def tell(row: dict[str, Any]) -> None:
        print(mark + json.dumps(row, default=jsonable), flush=True)

    if names == ["environment"]:
        tell(environment(cpu=cpu))
        return 0
    for name in names:
        tell(run_job(name, cpu=cpu))
        try:
            empty_caches()
        except RuntimeError:  # an illegal access: every later call of CUDA raises it again
            return RESTART_CODE
    return 0


if __name__ == "__main__":
    sys.exit("run benchmarks/gpu_check.py")
