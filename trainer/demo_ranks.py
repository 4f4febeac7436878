"""`vramwise demo --nproc N`: the demo on several ranks, its curve beside three of one rank."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from planner.errors import VramwiseError
from trainer.config import parse_run
from trainer.demo import SCHEMA_VERSION, WINDOW, demo_document
from trainer.demo_model import find_demo_model
from trainer.devices import check_driver
from trainer.grpo import train_grpo
from trainer.metrics import METRICS_FILE, mean, mean_std, read_metrics
from trainer.parallel.launch import Launch, launch
from trainer.run import quiet
from trainer.say import Say, silent

SEEDS = (0, 1, 2)
SPREAD = 4.303 * math.sqrt(1 + 1 / len(SEEDS))
"""Standard deviations of one rank's seeds: where a fourth seed is in 19 of 20 cases (Student's t of two
degrees of freedom)."""
ROWS = 10


def run_demo_ranks(
    *, output: Path, steps: int | None, model: str, nproc: int, say: Say
) -> dict[str, Any]:
    """Train the demo once on `nproc` ranks with FSDP2 and on one rank with three seeds; compare the curves.

    Raises VramwiseError.
    """
    quiet()
    check_driver()
    chosen = find_demo_model(model, say=say)
    output = output.resolve()
    count = steps or chosen.steps
    one = []
    for seed in SEEDS:
        say(f"GRPO ({chosen.method}) on one-digit sums: {chosen.name}, one rank, seed {seed}")
        document = demo_document(chosen, output=output / f"seed-{seed}", steps=count, seed=seed)
        run, train = parse_run(document, root=Path.cwd())
        result = train_grpo(run, train, root=Path.cwd(), say=silent)
        one.append([metrics["reward"] for metrics in result.metrics])
    say(f"the same on {nproc} ranks: weights, gradients and states divided by FSDP2")
    several = _on_ranks(chosen, output / f"ranks-{nproc}", count, nproc)
    if min(map(len, (*one, several))) < count:
        raise VramwiseError("the demo was stopped", hint=f"its logs are in {output}")
    say(compared(one, several, nproc))
    last, low, high = _last(one, several)
    inside = low <= last <= high
    say(
        f"last {WINDOW} steps on {nproc} ranks: {last:.2f}; one rank's seeds spread from {low:.2f} to {high:.2f}: "
        f"{'within' if inside else 'NOT within'}"
    )
    return {
        "schema_version": SCHEMA_VERSION,
        "model": chosen.name,
        "output": str(output),
        "steps": count,
        "nproc": nproc,
        "last_mean": round(last, 4),
        "spread_low": round(low, 4),
        "spread_high": round(high, 4),
        "within": inside,
        "one_rank": one,
        "ranks": several,
    }


def compared(one: Sequence[Sequence[float]], several: Sequence[float], nproc: int) -> str:
    """Return the curves beside each other, a row for each tenth of the run."""
    size = max(1, -(-len(several) // ROWS))
    lines = [f"{'steps':<14}{'one rank, three seeds':>26}{f'{nproc} ranks':>12}"]
    for start in range(0, len(several), size):
        stop = min(start + size, len(several))
        own = sorted(mean(curve[start:stop]) for curve in one)
        cells = "  ".join(f"{value:.2f}" for value in own)
        value = mean(several[start:stop])
        lines.append(
            f"{f'{start + 1}-{stop}':<14}{cells:>26}{value:>12.2f}  {'#' * round(value * 30)}"
        )
    return "\n".join(lines)


def _last(one: Sequence[Sequence[float]], several: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of the last steps on several ranks, and what one rank's seeds leave room for."""
    middle, deviation = mean_std([mean(curve[-WINDOW:]) for curve in one])
    if not math.isfinite(middle):
        raise VramwiseError("the demo has no rewards")
    width = max(SPREAD * deviation, 0.01)
    return mean(several[-WINDOW:]), middle - width, middle + width


def _on_ranks(chosen: Any, output: Path, steps: int, nproc: int) -> list[float]:
    """Train on `nproc` ranks, which print their own plan beside what they measured; return the curve."""
    document = demo_document(chosen, output=output, steps=steps, seed=SEEDS[0])
    document["recipe"]["sharding"] = "fsdp2"
    run_file = output.with_suffix(".yaml")
    output.parent.mkdir(parents=True, exist_ok=True)
    run_file.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    code = launch(Launch(nproc=nproc), run_file, [])
    if code:
        raise VramwiseError(f"the demo on {nproc} ranks ended with code {code}")
    return [metrics["reward"] for metrics in read_metrics(output / METRICS_FILE)]
