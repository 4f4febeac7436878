"""Probes of what a run does: memory that runs out, 4-bit weights, generation."""

import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check_probe import Place, llama, mib, policy_of
from planner.run.recipe import Checkpointing, Method, Recipe
from profiler.torch_recorder import record
from trainer.batching import Layout, ScoredSequence, collate
from trainer.checkpointing import checkpoint_layers, decoder_layers
from trainer.devices import limited
from trainer.engines import make_engine
from trainer.engines.protocol import SamplingSettings
from trainer.engines.transformers import TransformersEngine
from trainer.fake_device import FakeDevice
from trainer.metrics import METRICS_FILE, read_metrics
from trainer.model import load_policy
from trainer.run import train_run
from trainer.scoring import hidden_rows, log_probs
from trainer.small_model import make_small_model
from trainer.tiled_mlp import tile_layers

ROWS = 8
SHARES = (0.9, 0.6, 0.3)
"""Of what a step holds beyond the weights: less than one of these it cannot have."""


def out_of_memory(place: Place) -> dict[str, Any]:
    """Memory that really runs out: nothing stays behind, and a run goes on with smaller micro-batches."""
    problems = []
    attempts = _attempts(place)
    for share, attempt in attempts.items():
        if not attempt["ran_out"]:
            problems.append(f"a step fits in {share} of what it holds")
        if attempt["left_bytes"]:
            problems.append(f"{attempt['left_bytes']} bytes stay after memory ran out at {share}")
    run = _run_that_runs_out(place)
    if not run["budgets"][1] < run["budgets"][0]:
        problems.append(f"memory did not run out in {run['limit_bytes']} bytes")
    if not run["loss_difference"] <= (1e-5 if place.toy else 1e-3):
        problems.append(f"the smaller micro-batches' loss differs by {run['loss_difference']:.2g}")
    if not run["limit_is_gone"]:
        problems.append("train.device_memory still holds after the run")
    summary = f"{run['budgets'][0]} -> {run['budgets'][1]} tokens in {mib(run['limit_bytes'])}"
    return {"problems": problems, "summary": summary, "attempts": attempts, "run": run}


def _attempts(place: Place) -> dict[str, dict[str, Any]]:
    """Run out of memory in steps that are checkpointed, tiled and offloaded, at several points."""
    model = llama(place, layers=place.pick(3, 8), hidden=place.pick(128, 1024), vocab=1024)
    checkpoint_layers(decoder_layers(model), mode=Checkpointing.OFFLOAD)
    tile_layers(model, tile_tokens=place.pick(64, 2048))
    ids = torch.randint(3, 1000, (1, place.pick(256, 16384)), device=place.device)

    def step() -> None:
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        hidden.float().square().mean().backward()

    def clean() -> None:
        model.zero_grad(set_to_none=True)
        gc.collect()
        if not place.toy:
            torch.cuda.empty_cache()

    step()
    clean()
    held = sum(p.nbytes for p in model.parameters())
    base = held if place.toy else torch.cuda.memory_allocated()
    with limited(place.device, 1 << 40, model) as room:
        peak = place.peak_of(step)
        peak = room.peak_bytes if isinstance(room, FakeDevice) else peak
        clean()
    found = {}
    for share in SHARES:
        with limited(place.device, int(base + (peak - base) * share), model) as room:
            before = _alive(place, room)
            ran_out = False
            try:
                step()
            except torch.OutOfMemoryError:
                ran_out = True
            clean()
            found[str(share)] = {"ran_out": ran_out, "left_bytes": _alive(place, room) - before}
    step()  # as if nothing had been
    return found


def _alive(place: Place, room: Any) -> int:
    return int(room.live_bytes if place.toy else torch.cuda.memory_allocated())


def _run_that_runs_out(place: Place) -> dict[str, Any]:
    """Train the same steps with all memory and with too little for a whole micro-batch."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_small_model(
            folder / "model",
            hidden=place.pick(64, 1024),
            layers=place.pick(2, 8),
            heads=place.pick(4, 16),
            intermediate=place.pick(512, 3584),
        )
        # the plan must fit: a CPU's, like a GPU's, holds 8 MiB of cuBLAS workspace
        length = place.pick(512, 1024)
        row = {"prompt": "12 + 7 = ", "completion": "19 " * length}
        (folder / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 16))
        with record(follow=place.toy) as live:
            whole = _train(place, folder, "whole", length, limit=None)
        phase = next(p for p in live.recording.phases if p.name == "backward")
        held = sum(phase.terms_bytes.get(term, 0) for term in ("weights", "gradients", "optimizer"))
        limit = int(held + 0.7 * (phase.peak_bytes - held))
        short = _train(place, folder, "short", length, limit=limit)
    return {
        "peak_bytes": phase.peak_bytes,
        "limit_bytes": limit,
        "budgets": [whole[0]["budget_tokens"], short[-1]["budget_tokens"]],
        "loss_difference": max(
            abs(one["loss"] - other["loss"]) for one, other in zip(whole, short, strict=True)
        ),
        "limit_is_gone": place.toy or torch.cuda.get_per_process_memory_fraction() == 1.0,
    }


def _train(
    place: Place, folder: Path, name: str, length: int, *, limit: int | None
) -> list[dict[str, Any]]:
    document = {
        "model": str(folder / "model"),
        "recipe": {
            "task": "sft",
            "method": "full",
            "dtype": place.pick("fp32", "bf16"),
            "context": length,
            "checkpointing": "none",
            "optimizer": "sgd",
        },
        "machine": {},
        "train": {
            "output": str(folder / name),
            "dataset": str(folder / "rows.jsonl"),
            "steps": 2,
            "lr": 1e-4,
            "save_every": 0,
            "prompts_per_step": ROWS,
            "micro_batch_tokens": ROWS * length,
            # memory is to run out in a step, not before it
            "preflight": False,
            **({"device_memory": str(limit)} if limit else {}),
        },
    }
    run_file = folder / f"{name}.yaml"
    run_file.write_text(json.dumps(document))
    train_run(run_file, resume=False, say=lambda _text: None)
    return read_metrics(folder / name / METRICS_FILE)


def nf4(place: Place) -> dict[str, Any]:
    """A 4-bit policy: its codes decode to what was quantised, it generates, its adapters learn."""
    import bitsandbytes as bnb
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as name:
        folder = make_small_model(
            Path(name), hidden=256, layers=2, heads=4, intermediate=512, vocab=512
        )
        recipe = Recipe(task="grpo", method="qlora", dtype="bf16", context=64, num_generations=2)
        policy = load_policy(str(folder), recipe=recipe, device=str(place.device))
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    layers: dict[str, Any] = {
        name: module
        for name, module in policy.base.named_modules()
        if isinstance(module, bnb.nn.Linear4bit)
    }
    errors = []
    for name, layer in layers.items():
        unpacked: Any = plain.get_submodule(name.replace(".base_layer", ""))
        exact = unpacked.weight.float()
        decoded = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        errors.append(((decoded.cpu().float() - exact).norm() / exact.norm()).item())
    engine = make_engine(policy, recipe=recipe)
    sampling = SamplingSettings(num_generations=2, max_new_tokens=8, seed=1)
    completions = engine.generate([[5, 6, 7]], sampling)
    ids = torch.tensor([[5, 6, 7, 8]], device=policy.device)
    policy.hidden(ids).float().square().mean().backward()
    # lora_A's gradient is 0 at first: lora_B is
    learning = {n: p.grad for n, p in policy.trainable() if "lora_B" in n}
    still = [n for n, grad in learning.items() if grad is None or not grad.abs().sum() > 0]
    problems = []
    if len(layers) != 14:
        problems.append(f"{len(layers)} of 14 linears are 4-bit")
    # of normal weights 4-bit NormalFloat loses 7 to 11 %
    if not all(0.05 < error < 0.13 for error in errors):
        problems.append(f"decoded weights are off by {min(errors):.2g} to {max(errors):.2g}")
    if still or not learning:
        problems.append(f"{len(still)} of {len(learning)} adapters get no gradient")
    if [len(c.token_ids) for c in completions] != [8, 8] and not any(
        c.finished for c in completions
    ):
        problems.append("completions are cut short")
    summary = f"{len(layers)} linears, off by {max(errors):.2g}, {len(learning)} adapters learn"
    return {"problems": problems, "summary": summary, "errors": errors}


def generation(place: Place) -> dict[str, Any]:
    """Milliseconds a token of the transformers engine, and its log-probs against the scorer's."""
    layers, hidden = place.pick((2, 128), (16, 2048))
    model = llama(place, layers=layers, hidden=hidden, vocab=place.pick(512, 128256))
    policy = policy_of(place, model)
    prompt = list(range(3, place.pick(40, 259)))
    steps = place.pick(6, 64)
    limit = 1e-4 if place.toy else 3e-2
    found, problems = {}, []
    for rows in place.pick((4,), (8, 64)):
        recipe = Recipe(
            task="grpo", method=Method.FULL, context=512, num_generations=rows,
            engine={"max_num_seqs": rows},
        )  # fmt: skip
        engine = TransformersEngine(policy, recipe=recipe)
        engine.generate([prompt], SamplingSettings(num_generations=rows, max_new_tokens=4, seed=1))
        settings = SamplingSettings(num_generations=rows, max_new_tokens=steps, seed=1)
        completions, seconds = place.timed(lambda e=engine, s=settings: e.generate([prompt], s))  # type: ignore[misc]
        off = scored_otherwise(policy, prompt, completions)
        if not off <= limit:
            problems.append(f"{rows} rows: sampled and scored log-probs differ by {off:.2g}")
        found[str(rows)] = {
            "ms_per_token": 1000 * seconds / steps,
            "tokens_per_second": rows * steps / seconds,
            "mean_logp_difference": off,
            "kv_bytes": engine.memory()["kv_cache"],
        }
    summary = ", ".join(
        f"{rows} rows {row['ms_per_token']:.1f} ms a token" for rows, row in found.items()
    )
    return {"problems": problems, "summary": summary, "rows": found}


@torch.no_grad()
def scored_otherwise(policy: Any, prompt: list[int], completions: list[Any]) -> float:
    """Return the mean |difference| of the sampler's log-probs and the scorer's."""
    few = completions[:8]
    sequences = [
        ScoredSequence(
            token_ids=(*prompt, *completion.token_ids),
            scored=(False,) * len(prompt) + (True,) * len(completion.token_ids),
        )
        for completion in few
    ]
    batch = collate(sequences, range(len(few)), layout=Layout.SORTED).to(policy.device)
    scored = log_probs(policy, batch, hidden_rows(policy, batch)).logp.cpu()
    sampled = torch.tensor([value for completion in few for value in completion.logprobs])
    order = torch.cat([torch.where(batch.sequence_ids.cpu() == i)[0] for i in range(len(few))])
    return (scored[order] - sampled).abs().mean().item()
