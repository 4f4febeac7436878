"""Probes of the vLLM engines: what they compute, how fast, and what they give back while a step is made."""

import gc
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check_probe import Place, mib
from benchmarks.gpu_check_probe_run import scored_otherwise
from benchmarks.gpu_check_run import config_of, empty_caches
from benchmarks.gpu_check_vramwise import make_model
from planner.machines.machine import make_machine
from planner.models.hub import find_model
from planner.plan import plan
from planner.run.runfile import make_recipe
from profiler.calibration import this_machine
from trainer.engines import make_engine
from trainer.engines.protocol import Completion, SamplingSettings
from trainer.engines.vllm_llm import AGREEMENT
from trainer.engines.vllm_settings import settle_engine
from trainer.model import load_policy
from trainer.preflight import settled

MODEL = "qwen3-0.6b"
SLACK_BYTES = 64 << 20
"""Of the driver's: memory is mapped in granules, and other processes breathe."""
LEFT_BYTES = 1 << 30
"""May stay of a closed engine beside the weights: libraries' workspaces and loaded kernels."""


def vllm_shared_full(place: Place) -> dict[str, Any]:
    """One copy of the weights, all of them trained."""
    return _engine(place, "vllm-shared", "full")


def vllm_shared_lora(place: Place) -> dict[str, Any]:
    """One copy of the weights, adapters reloaded in place."""
    return _engine(place, "vllm-shared", "lora")


def vllm_shared_graphs(place: Place) -> dict[str, Any]:
    """The same with CUDA graphs: addresses that they captured must hold."""
    return _engine(place, "vllm-shared", "lora", cuda_graphs=True)


def vllm_push_full(place: Place) -> dict[str, Any]:
    """A second copy, all of it pushed."""
    return _engine(place, "vllm-push", "full")


def vllm_push_lora(place: Place) -> dict[str, Any]:
    """A second copy, adapters pushed."""
    return _engine(place, "vllm-push", "lora")


def _engine(place: Place, kind: str, method: str, *, cuda_graphs: bool = False) -> dict[str, Any]:
    rows, prompt, completion = place.pick((4, 16, 8), (64, 256, 256))
    recipe = settle_engine(
        settled(
            make_recipe(
                task="grpo",
                method=method,
                dtype=place.pick("fp32", "bf16"),
                prompt_length=prompt,
                completion_length=completion,
                num_generations=rows,
                checkpointing="none",
                engine={"kind": kind, "max_num_seqs": rows, "cuda_graphs": cuda_graphs},
            )
        )
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(config_of(MODEL, cpu=place.toy), folder, cpu=place.toy)
        empty_caches()
        machine = this_machine() or make_machine(vram="16GiB")
        planned = plan(find_model(name), recipe, machine)
        free = {"before": _free(place)}
        policy = load_policy(name, recipe=recipe, device=str(place.device))
        engine, start_s = place.timed(lambda: make_engine(policy, recipe=recipe, plan=planned))
        try:
            found = _exercise(place, policy, engine, free, rows=rows, prompt=prompt, new=completion)
        finally:
            engine.close()
    del engine
    free["closed"] = _free(place)
    problems = found.pop("problems")
    # the policy has shared weights, or its own: the rest must be back
    weights = sum(p.nbytes for p in policy.model.parameters())
    if not place.toy and free["before"] - free["closed"] > weights + LEFT_BYTES:
        problems.append(f"{mib(free['before'] - free['closed'])} are not back after closing")
    summary = f"{found['tokens_per_second']:,.0f} tokens/s, log-probs off by {found['agreement'][0]:.1g}, "
    summary += f"{mib(found['released_bytes'])} given back, up in {start_s:.0f} s"
    return {
        "problems": problems,
        "summary": summary,
        "start_s": start_s,
        "free_bytes": free,
        "planned_rollout_bytes": planned.phase("rollout").total_bytes,
        **found,
    }


def _exercise(
    place: Place,
    policy: Any,
    engine: Any,
    free: dict[str, int],
    *,
    rows: int,
    prompt: int,
    new: int,
) -> dict[str, Any]:
    """Generate, give back, train, take again, generate."""
    problems: list[str] = []
    free["up"] = _free(place)
    held = engine.memory()
    agreement = [engine.check("after building")]
    # text that no cache has seen twice
    ids = [3 + (7919 * index) % 400 for index in range(prompt)]
    engine.generate([ids[1:]], SamplingSettings(num_generations=rows, max_new_tokens=2, seed=3))
    settings = SamplingSettings(num_generations=rows, max_new_tokens=new, seed=1)
    first, seconds = place.timed(lambda: engine.generate([ids], settings))
    sampled = [scored_otherwise(policy, ids, first)]
    before = _free(place)
    engine.release()
    free["released"] = _free(place)
    released = free["released"] - before
    if not place.toy and released < held["kv_cache"] - SLACK_BYTES:
        problems.append(f"{mib(released)} given back of a KV cache of {mib(held['kv_cache'])}")
    moved = _train(place, policy)
    engine.resume()
    engine.update_weights()
    free["resumed"] = _free(place)
    agreement.append(engine.check("after a step"))
    second = engine.generate([ids], settings)
    sampled.append(scored_otherwise(policy, ids, second))
    limit = AGREEMENT[policy.dtype]
    if not max(sampled) <= limit:
        problems.append(f"sampled log-probs are off by {max(sampled):.2g} (allowed {limit:g})")
    if not moved > 3 * max(agreement):
        problems.append(f"the step moved log-probs by {moved:.2g} only: agreement says nothing")
    for completion in (*first, *second):
        _check(completion, new, problems)
    return {
        "problems": problems,
        "agreement": agreement,
        "sampled_difference": sampled,
        "moved": moved,
        "tokens_per_second": sum(len(c.token_ids) for c in first) / seconds,
        "released_bytes": released,
        "engine_bytes": held,
    }


def _train(place: Place, policy: Any) -> float:
    """Change the trained weights by a step's gradient; return how far log-probs moved by it."""
    ids = torch.randint(3, 400, (2, place.pick(32, 512)), device=policy.device)

    def score() -> torch.Tensor:
        with torch.no_grad():
            logp = policy.model(input_ids=ids).logits[:, :-1].float().log_softmax(-1)
            return logp.gather(-1, ids[:, 1:, None])

    before = score()
    policy.model(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():
        for _, parameter in policy.trainable():
            if parameter.grad is not None and parameter.grad.abs().max() > 0:
                step = parameter.grad / parameter.grad.float().norm().to(parameter.dtype)
                parameter.sub_(step * max(0.2 * parameter.float().norm().item(), 0.5))
            parameter.grad = None
    return (score() - before).abs().mean().item()


def _check(completion: Completion, limit: int, problems: list[str]) -> None:
    if not completion.finished and len(completion.token_ids) != limit and not problems:
        problems.append(f"a completion ends after {len(completion.token_ids)} of {limit} tokens")


def _free(place: Place) -> int:
    """Return the bytes that the driver says are free; 0 on a CPU, where nothing is given back."""
    if place.toy:
        return 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
