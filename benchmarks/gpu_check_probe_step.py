"""Probes of what a step computes: checkpointing, the log-prob head, optimizers, shared prefixes."""

import gc
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check_probe import Place, llama, mib, policy_of, relative
from planner.machines.machine import make_machine
from planner.plan import plan
from planner.run.recipe import Checkpointing, Recipe
from profiler.live_recipe import model_spec
from trainer.batching import Layout, ScoredSequence, collate
from trainer.checkpointing import checkpoint_layers, decoder_layers
from trainer.elementwise_optimizer import (
    ElementwiseOptimizer,
    OptimizerSettings,
    StateFormat,
    copy_stochastic_,
)
from trainer.host_store import DirectCopies, HostStore
from trainer.logprob_head import logprob_head
from trainer.scoring import hidden_rows, log_probs
from trainer.shared_plan import row_cost
from trainer.shared_prefix import collate_shared, shared_tokens
from trainer.tiled_mlp import tile_layers

# atomics of the attention's backward and other tile shapes round differently: far below a wrong gradient
GRADIENTS_AGREE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
MODES = (
    ("none", Checkpointing.NONE, False),
    ("full", Checkpointing.FULL, False),
    ("every-k", Checkpointing.EVERY_K, False),
    ("offload", Checkpointing.OFFLOAD, False),
    ("full tiled", Checkpointing.FULL, True),
    ("offload tiled", Checkpointing.OFFLOAD, True),
)
LR = 1e-2
STEPS = 3


def checkpointing(place: Place) -> dict[str, Any]:
    """None, full, every-k and offload: equal gradients, each with its peak and its seconds."""
    ids = torch.randint(3, 100, place.pick((8, 256), (4, 4096)), device=place.device)
    rows: dict[str, dict[str, Any]] = {}
    reference: list[Tensor] = []
    problems = []
    for name, mode, tiled in MODES:
        row, gradients = _checkpointed(place, ids, mode, tiled)
        reference = reference or gradients
        row["gradient_error"] = max(
            relative(found, expected) for found, expected in zip(gradients, reference, strict=True)
        )
        if not row["gradient_error"] <= GRADIENTS_AGREE[place.dtype]:
            problems.append(f"{name}: gradients differ by {row['gradient_error']:.2g}")
        if row["fetched"] != row["offloaded"]:
            problems.append(f"{name}: {row['fetched']} of {row['offloaded']} inputs came back")
        rows[name] = row
        del gradients
        gc.collect()
    if not rows["offload"]["offloaded"]:
        problems.append("offload: nothing went to the host")
    peaks = {name: row["peak_bytes"] for name, row in rows.items()}
    pairs = [("none", "full"), ("full", "every-k"), ("full", "full tiled")]
    # a CPU's host slab lies in the same memory
    pairs += [] if place.toy else [("full", "offload"), ("full tiled", "offload tiled")]
    problems += [
        f"{smaller} holds as much as {larger}"
        for larger, smaller in pairs
        if peaks[smaller] >= peaks[larger]
    ]
    summary = ", ".join(f"{name} {mib(peak)}" for name, peak in peaks.items())
    return {"problems": problems, "summary": summary, "modes": rows}


def _checkpointed(
    place: Place, ids: Tensor, mode: Checkpointing, tiled: bool
) -> tuple[dict[str, Any], list[Tensor]]:
    before = 0 if place.toy else torch.cuda.memory_allocated()
    model = llama(place, layers=place.pick(6, 8), hidden=place.pick(64, 512), vocab=128)
    layers = decoder_layers(model)
    store = None
    if mode is Checkpointing.OFFLOAD:
        store = HostStore(len(layers), copies=DirectCopies() if place.toy else None)
    handle = checkpoint_layers(layers, mode=mode, every=3, store=store)
    if tiled:
        tile_layers(model, tile_tokens=place.pick(512, 2048))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, use_cache=False).logits.float().square().mean().backward()

    step()  # slabs and workspaces are made
    peak = place.peak_of(step)
    _, seconds = place.timed(step)
    counts = store.counts if store else None
    row = {
        "peak_bytes": peak - before,
        "seconds": seconds,
        "offloaded": counts.offloaded if counts else 0,
        "fetched": counts.fetched if counts else 0,
        "prefetched": counts.prefetched if counts else 0,
        "slab_bytes": counts.slab_bytes if counts else 0,
    }
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    handle.remove()
    return row, gradients


def head(place: Place) -> dict[str, Any]:
    """The log-prob head's values and gradients against full logits in float64, at some rows."""
    rows, width, vocab = place.pick((64, 64, 500), (4096, 2048, 128256))
    hidden = (torch.randn(rows, width, device=place.device) * 2).bfloat16()
    weight = (torch.randn(vocab, width, device=place.device) * width**-0.5).bfloat16()
    target = torch.randint(0, vocab, (rows,), device=place.device)
    frozen = _head(place, hidden, weight, target, learns=False)
    trained = _head(place, hidden[: rows // 2], weight, target[: rows // 2], learns=True)
    problems = []
    for name, row in (("frozen", frozen), ("trained", trained)):
        for figure, limit in (("logp", 1e-5), ("entropy", 1e-4), ("grad", 6e-3), ("weight", 6e-3)):
            error = row.get(f"{figure}_error")
            if error is not None and not error <= limit:
                problems.append(f"{name} head: {figure} is off by {error:.2g}")
    if not place.toy and frozen["scratch_bytes"] >= rows * vocab * 2:
        problems.append("frozen head: its scratch is as large as the logits")
    summary = f"logp off by {frozen['logp_error']:.1g}, {frozen['seconds']:.3f} s for {rows} rows"
    summary += f", scratch {mib(frozen['scratch_bytes'])}"
    return {"problems": problems, "summary": summary, "frozen": frozen, "trained": trained}


def _head(
    place: Place, hidden: Tensor, weight: Tensor, target: Tensor, *, learns: bool
) -> dict[str, float]:
    hidden = hidden.clone().requires_grad_()
    weight = weight.clone().requires_grad_(learns)

    def step() -> Any:
        hidden.grad = weight.grad = None
        out = logprob_head(hidden, weight, target, entropy=True)
        out.logp.sum().backward()
        return out

    step()
    before = 0 if place.toy else torch.cuda.memory_allocated()
    peak = place.peak_of(step)
    out, seconds = place.timed(step)
    some = torch.arange(0, len(target), max(1, len(target) // 32), device=place.device)
    logits = hidden.detach()[some].double() @ weight.detach().double().T
    logp = logits.log_softmax(-1)
    picked = logp.gather(1, target[some, None])[:, 0]
    slope = -logp.exp()
    slope[torch.arange(len(some), device=place.device), target[some]] += 1
    assert hidden.grad is not None
    row = {
        "seconds": seconds,
        "scratch_bytes": peak - before,
        "logp_error": relative(out.logp[some], picked),
        "entropy_error": relative(out.entropy[some], -(logp.exp() * logp).sum(-1)),
        "grad_error": relative(hidden.grad[some], slope @ weight.detach().double()),
    }
    if learns:
        row["weight_error"] = _weight_error(hidden.detach(), weight, target)
    return row


def _weight_error(hidden: Tensor, weight: Tensor, target: Tensor) -> float:
    """Return the error of the head's own gradient at some words of the vocabulary, in float64."""
    words = torch.arange(0, len(weight), max(1, len(weight) // 32), device=weight.device)
    exact = torch.zeros(len(words), hidden.shape[1], dtype=torch.float64, device=weight.device)
    for part, aims in zip(hidden.split(256), target.split(256), strict=True):
        # float32 products of bf16 values: their error is far below bf16's
        logits = part.float() @ weight.detach().float().T
        p = (logits[:, words].double() - logits.double().logsumexp(-1, keepdim=True)).exp()
        hits = (aims[:, None] == words).double()
        exact += (hits - p).T @ part.double()
    assert weight.grad is not None
    return relative(weight.grad[words], exact)


def optimizer_state(place: Place) -> dict[str, Any]:
    """Fp32 and bf16 state, on the device and offloaded, against torch's AdamW; and reloaded."""
    kinds: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16": {"state_format": StateFormat.BF16},
        "offload": {"offload": True},
        "offload master": {"offload": True, "master_weights": True},
    }
    return _optimizers(place, kinds)


def int8_state(place: Place) -> dict[str, Any]:
    """The same of int8 state, whose kernels are bitsandbytes'."""
    int8 = {"state_format": StateFormat.INT8}
    return _optimizers(place, {"int8": int8, "offload int8": int8 | {"offload": True}})


# share of a learning rate that the mean weight may be off after STEPS steps
STATE_ERROR = {"fp32": 1e-4, "bf16": 2e-2, "offload": 1e-4, "offload master": 2e-3}
STATE_ERROR |= {"int8": 0.2, "offload int8": 0.2}


def _optimizers(place: Place, kinds: dict[str, dict[str, Any]]) -> dict[str, Any]:
    count = place.pick(5000, (1 << 22) + 4096)
    start = torch.randn(count, device=place.device)
    grads = [torch.randn(count, device=place.device) for _ in range(STEPS + 1)]
    theirs = torch.nn.Parameter(start.clone())
    adam = torch.optim.AdamW([theirs], lr=LR, weight_decay=0.0)
    for grad in grads[:STEPS]:
        theirs.grad = grad.clone()
        adam.step()
    rows, problems = {}, []
    for name, kind in kinds.items():
        row = _one_optimizer(start, theirs.detach(), grads, kind)
        if not row["error_in_lr"] <= STATE_ERROR[name]:
            problems.append(f"{name}: off by {row['error_in_lr']:.2g} of a step")
        if not row["reloads"]:
            problems.append(f"{name}: a reloaded optimizer steps otherwise")
        if kind.get("offload") and (row["on_device"] or (not place.toy and not row["pinned"])):
            problems.append(f"{name}: state is not in pinned host memory")
        rows[name] = row
    summary = ", ".join(f"{name} {row['error_in_lr']:.1g} lr" for name, row in rows.items())
    return {"problems": problems, "summary": f"off by {summary}", "kinds": rows}


def _one_optimizer(
    start: Tensor, expected: Tensor, grads: list[Tensor], kind: dict[str, Any]
) -> dict[str, Any]:
    dtype = torch.bfloat16 if kind.get("master_weights") else torch.float32
    settings = OptimizerSettings(lr=LR, **kind)
    ours = torch.nn.Parameter(start.to(dtype, copy=True))
    optimizer = ElementwiseOptimizer([ours], settings)
    for grad in grads[:STEPS]:
        ours.grad = grad.to(dtype)
        optimizer.step()
    state = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    moments = [t for t in state if t.numel() >= start.numel()]
    weights = optimizer.state[ours].get("master", ours.detach())
    # where a bf16 master began from rounded weights, only the distance gone is compared
    gone = weights.to(start.device).float() - start.to(dtype).float()
    row = {
        "error_in_lr": ((gone - (expected - start)).abs().mean() / LR).item(),
        "on_device": sum(t.device == start.device and t.is_cuda for t in moments),
        "pinned": all(t.is_pinned() for t in moments if not t.is_cuda) if start.is_cuda else None,
    }
    twin = torch.nn.Parameter(ours.detach().clone())
    again = ElementwiseOptimizer([twin], settings)
    again.load_state_dict(optimizer.state_dict())
    for parameter, each in ((ours, optimizer), (twin, again)):
        parameter.grad = grads[STEPS].to(dtype)
        each.step()
    return row | {"reloads": bool(torch.equal(ours.detach(), twin.detach()))}


def stochastic_rounding(place: Place) -> dict[str, Any]:
    """Rounding to bf16 is right on average and takes one of the two neighbours."""
    count = 1 << 20
    problems, rows = [], {}
    for value in (1.001, -3.3, 1e-20):
        source = torch.full((count,), value, device=place.device)
        target = torch.empty(count, device=place.device, dtype=torch.bfloat16)
        generator = torch.Generator(place.device).manual_seed(0)
        copy_stochastic_(target, source, generator=generator)
        taken = sorted({float(found) for found in target.unique()})
        exact, mean = float(source[0].double()), target.double().mean().item()
        gap = taken[-1] - taken[0]
        # six standard deviations of the mean of so many draws
        if len(taken) != 2 or not abs(mean - exact) <= 6 * gap / 2 / count**0.5:
            problems.append(f"{value}: mean {mean!r} of {taken}")
        rows[str(value)] = {"mean": mean, "exact": exact, "neighbours": taken}
    off = abs(rows["1.001"]["mean"] / rows["1.001"]["exact"] - 1)
    return {"problems": problems, "summary": f"mean of 1.001 is off by {off:.1g}", "values": rows}


def shared_prefix(place: Place) -> dict[str, Any]:
    """A group's prompt run once against run in every row: equal log-probs; seconds, peaks, the forecast."""
    shapes = place.pick(((16, 8, 4),), ((1024, 128, 8), (1024, 512, 8), (2048, 512, 8)))
    layers, hidden = place.pick((2, 128), (8, 2048))
    model = llama(place, layers=layers, hidden=hidden, vocab=32000)
    policy = policy_of(place, model)
    limit = 1e-4 if place.toy else 1e-1  # vLLM's own kernels are held to the same
    rows: dict[str, dict[str, float]] = {}
    problems = []
    for prompt, completion, group in shapes:
        sequences = _group(prompt, completion, group)
        cost = row_cost(*_resolved(model, prompt, completion, group), place.device)
        shared = cost.shared(shared_tokens(sequences))
        row: dict[str, float] = {
            "forecast_ratio": shared / cost.separate([prompt + completion] * group)
        }
        apart = collate(sequences, range(group), layout=Layout.SORTED).to(place.device)
        together = collate_shared(
            [sequences], range(group), pad_id=0, dtype=place.dtype, device=place.device
        )
        values = {}
        for name, batch in (("separate", apart), ("shared", together)):

            def step(batch: Any = batch) -> Tensor:
                model.zero_grad(set_to_none=True)
                logp = log_probs(policy, batch, hidden_rows(policy, batch)).logp
                logp.sum().backward()
                return logp.detach()

            step()
            peak = place.peak_of(step)
            values[name], seconds = place.timed(step)
            row |= {f"{name}_peak_bytes": peak, f"{name}_seconds": seconds}
        off = (values["separate"] - values["shared"]).abs().mean().item()
        row |= {
            "ratio": row["shared_seconds"] / row["separate_seconds"],
            "mean_logp_difference": off,
        }
        if not off <= limit:
            problems.append(f"{prompt}+{completion}x{group}: log-probs differ by {off:.2g}")
        rows[f"{prompt}+{completion}x{group}"] = row
    summary = ", ".join(
        f"{name} x{row['ratio']:.2f} (forecast {row['forecast_ratio']:.2f})"
        for name, row in rows.items()
    )
    return {"problems": problems, "summary": f"time of shared rows {summary}", "shapes": rows}


def _resolved(model: Any, prompt: int, completion: int, group: int) -> tuple[Any, Any]:
    """Return what the planner knows of the model, and of a run of such groups."""
    recipe = Recipe(
        task="grpo",
        method="full",
        prompt_length=prompt,
        completion_length=completion,
        num_generations=group,
        checkpointing="none",
        framework="vramwise",
    )
    spec = model_spec(model)
    return spec, plan(spec, recipe, make_machine(vram="64GiB")).resolved


def _group(prompt: int, completion: int, count: int) -> list[ScoredSequence]:
    start = tuple(torch.randint(3, 30000, (prompt,)).tolist())
    scored = (False,) * prompt + (True,) * completion
    return [
        ScoredSequence(
            token_ids=start + tuple(torch.randint(3, 30000, (completion,)).tolist()), scored=scored
        )
        for _ in range(count)
    ]
