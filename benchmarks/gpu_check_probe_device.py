"""Probes of the device itself and of what is measured on it."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check_probe import Place, mib
from profiler.torch_recorder import record
from trainer.host_store import CudaCopies, DirectCopies

CHANGES = 400
STEP = """
import torch
model = torch.nn.Linear({width}, {width}, bias=False, device="{device}")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(256, {width}, device="{device}")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def host_slab(place: Place) -> dict[str, Any]:
    """The offload's slab: pinned, the same bytes back, at what speed; a refused one harms nothing."""
    size = place.pick(1 << 20, 1 << 30)
    said: list[str] = []
    copies: Any = DirectCopies() if place.toy else CudaCopies(place.device, say=said.append)
    slab, register_s = place.timed(lambda: copies.allocate(size))
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=place.device)
    event, out_s = place.timed(lambda: copies.to_host(source, slab))
    (back, _), back_s = place.timed(lambda: copies.to_device(slab, event, place.device))
    problems = [f"not pinned: {line}" for line in said]
    if not torch.equal(back, source):
        problems.append("other bytes came back")
    copies.release(slab)
    figures: dict[str, Any] = {
        "register_s": register_s,
        "to_host_bytes_per_s": size / out_s,
        "to_device_bytes_per_s": size / back_s,
    }
    if not place.toy:
        figures["refused_then"] = _after_a_refusal(place)
        if figures["refused_then"]:
            problems.append(f"after a refused slab: {figures['refused_then']}")
    summary = f"{size / out_s / 1e9:.1f} GB/s out, {size / back_s / 1e9:.1f} back, "
    summary += f"{register_s * 1e3:.0f} ms to pin {mib(size)}"
    return {"problems": problems, "summary": summary, **figures}


def _after_a_refusal(place: Place) -> str:
    """Return what is wrong after CUDA has refused to pin a slab; "" if nothing is."""
    said: list[str] = []
    # nothing to pin: cudaHostRegister answers cudaErrorInvalidValue
    CudaCopies(place.device, say=said.append).allocate(0)
    if not said:
        return "CUDA did not refuse"
    try:
        torch.zeros(8, device=place.device).add_(1)
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def recorder(place: Place) -> dict[str, Any]:
    """A peak that the program resets stays ours, and ours stays invisible; what a phase change costs."""
    size = place.pick(1 << 22, 1 << 28)
    problems = []

    def hold() -> None:
        torch.empty(size, dtype=torch.uint8, device=place.device).fill_(1)

    hold()
    with record(follow=place.toy) as live:
        with live.phase("loss"):
            hold()
            if not place.toy:
                torch.cuda.reset_peak_memory_stats()
        with live.phase("backward"):
            hold()
        _nothing(live, 1)
        seen = size if place.toy else torch.cuda.max_memory_allocated()
        both = [seen] if place.toy else [seen, _accelerator_peak()]
    phases = {phase.name: phase.peak_bytes for phase in live.recording.phases}
    for name in ("loss", "backward"):
        if not phases.get(name, 0) >= size:
            problems.append(f"{name}: {phases.get(name, 0)} of {size} bytes recorded")
    if min(both) < size:
        problems.append(f"the program sees peaks of {both} after {size} bytes")
    with record(follow=False) as live:
        _, seconds = place.timed(lambda: _nothing(live, CHANGES))
    change_us = 1e6 * seconds / (2 * CHANGES)
    summary = f"peaks survive resets, {change_us:.0f} us a change of phase"
    return {
        "problems": problems,
        "summary": summary,
        "change_us": change_us,
        "phases": phases,
        "followed_bytes": _followed(place, problems),
    }


def _nothing(live: Any, times: int) -> None:
    for _ in range(times):
        with live.phase("score"):
            pass


def _accelerator_peak() -> int:
    """Return the peak that vLLM reads, or the other one on a torch without it."""
    accelerator = getattr(torch, "accelerator", None)
    read = getattr(accelerator, "max_memory_allocated", torch.cuda.max_memory_allocated)
    return int(read())


def _followed(place: Place, problems: list[str]) -> int:
    """Return what a follower counts of tensors of a known size on the device; the host's don't count."""
    size = 1 << 20
    with record(follow=True) as live, live.phase("forward"):
        held = torch.zeros(size, dtype=torch.uint8, device=place.device)
        host = None if place.toy else torch.zeros(3 * size, dtype=torch.uint8)
    del held, host
    found = next(phase.peak_bytes for phase in live.recording.phases if phase.name == "forward")
    if found != size:
        problems.append(f"followed tensors: {found} of {size} bytes")
    return found


def profile_run(place: Place) -> dict[str, Any]:
    """`profile run` and `--follow` of a small program: weights, gradients and state to the byte."""
    from profiler.assemble import recordings
    from profiler.launch import LaunchSettings, launch

    width = place.pick(512, 4096)
    weight = width * width * 4
    problems: list[str] = []
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        script = Path(name) / "step.py"
        script.write_text(STEP.format(width=width, device=place.device.type))
        for follow in (False, True):
            way = "followed" if follow else "totals"
            settings = LaunchSettings(out=Path(name) / way, follow=follow, snapshot="none")
            result = launch([sys.executable, str(script)], settings)
            if result.exit_code:
                return {"problems": [f"{way}: the program ended with {result.exit_code}"]}
            (recording,) = recordings(result)
            phases = {phase.name: phase.terms_bytes for phase in recording.phases}
            expected = {"weights": weight, "gradients": weight, "optimizer": 2 * weight}
            terms = {term: phases["step"].get(term, 0) // weight * weight for term in expected}
            # in the step itself the optimizer's temporaries count as its own
            terms["optimizer"] = phases["backward"].get("optimizer", 0) // weight * weight
            if terms != expected:
                problems.append(f"{way}: {terms}, not {expected}")
            found[way] = {
                "peak_bytes": recording.peak_bytes,
                "reserved_bytes": recording.peak_reserved_bytes,
                "device_bytes": recording.peak_device_bytes,
                "elapsed_s": result.elapsed_s,
            }
    summary = ", ".join(f"{way} {mib(row['peak_bytes'])}" for way, row in found.items())
    return {"problems": problems, "summary": summary, "ways": found}


def workspaces(place: Place) -> dict[str, Any]:
    """What cuBLAS keeps in torch's pool after forward, backward and a linear with bias; the planner's figure."""
    from planner.terms.overhead import workspace
    from profiler.calibration import this_machine

    weight = torch.randn(256, 256, device=place.device, dtype=torch.bfloat16, requires_grad=True)
    data = torch.randn(256, 256, device=place.device, dtype=torch.bfloat16)
    held = torch.cuda.memory_allocated()
    product = data @ weight
    forward = torch.cuda.memory_allocated() - held - product.nbytes
    product.sum().backward()
    assert weight.grad is not None
    del product
    backward = torch.cuda.memory_allocated() - held - weight.grad.nbytes
    layer = torch.nn.Linear(256, 256, device=place.device, dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    layer(data)
    bias = torch.cuda.memory_allocated() - before
    machine = this_machine()
    assert machine is not None
    planned = workspace(machine, trains=True).bytes
    problems = []
    # a MiB: small results round up to blocks of 512 bytes
    if abs(planned - (backward + bias)) > 1 << 20:
        problems.append(f"planned {mib(planned)}, {mib(backward + bias)} are held")
    return {
        "problems": problems,
        "summary": f"{mib(forward)} after forward, {mib(backward)} after backward, {mib(bias)} for bias",
        "forward_bytes": forward,
        "backward_bytes": backward,
        "bias_bytes": bias,
        "planned_bytes": planned,
    }


def calibration(place: Place) -> dict[str, Any]:
    """Context, totals and bandwidths as they are, beside the catalogue's; saved ones are used."""
    from profiler.calibration import calibrate, save, this_machine

    found = calibrate()
    catalogue = this_machine(path=Path("/nonexistent"))
    with tempfile.TemporaryDirectory() as name:
        machine = this_machine(path=save(found, Path(name) / "calibration.json"))
    assert catalogue is not None
    assert machine is not None
    problems = []
    if machine.context_bytes != found.context_bytes:
        problems.append(f"a plan takes {machine.context_bytes}, measured {found.context_bytes}")
    summary = f"context {mib(found.context_bytes)} (catalogue {mib(catalogue.context_bytes)})"
    summary += f", {found.bandwidth_bytes_per_s / 1e9:,.0f} GB/s"
    return {
        "problems": problems,
        "summary": summary,
        "measured": found.to_dict(),
        "catalogue_context_bytes": catalogue.context_bytes,
        "catalogue_gpu": machine.gpu.id if machine.gpu else None,
    }
