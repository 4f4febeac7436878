"""`vramwise demo --nproc N`: the demo on several ranks, its curve beside three of one rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from planner.errors import VramwiseError
from trainer.config import parse_run
from trainer.demo import SCHEMA_VERSION, WINDOW, demo_document
from trainer.demo_model import find_demo_model
from trainer.devices import check_driver
from trainer.grpo import train_grpo
from trainer.metrics import METRICS_FILE, mean, read_metrics
from trainer.parallel.launch import Launch, launch
from trainer.run import quiet
from trainer.say import Say, silent

SEEDS = (0, 1, 2)
"""Of one rank; the first is that of several."""
ROWS = 10


def run_demo_ranks(
    *, output: Path, steps: int | None, model: str, nproc: int, say: Say
) -> dict[str, Any]:
    """Train the demo once on `nproc` ranks with FSDP2 and on one rank with three seeds; compare the curves.

    Ranks that share a step draw what one would, so the curve of several is that of one rank's same seed, up
    to what rounding makes of it. Raises VramwiseError.
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
        if result.stopped_by is not None:
            raise VramwiseError("the demo was stopped", hint=f"its logs are in {output}")
        one.append([metrics["reward"] for metrics in result.metrics])
    say(f"the same on {nproc} ranks: weights, gradients and states divided by FSDP2")
    several = _on_ranks(chosen, output / f"ranks-{nproc}", count, nproc)
    if len(several) < count:
        raise VramwiseError("the demo was stopped", hint=f"its logs are in {output}")
    found = Comparison(one, several)
    say(found.table(nproc))
    say(found.sentence(nproc))
    ends = [mean(curve[-WINDOW:]) for curve in one]
    return {
        "schema_version": SCHEMA_VERSION,
        "model": chosen.name,
        "output": str(output),
        "steps": count,
        "nproc": nproc,
        "last_mean": round(mean(several[-WINDOW:]), 4),
        "spread_low": round(min(ends), 4),
        "spread_high": round(max(ends), 4),
        "equal_steps": found.equal,
        "largest_difference": round(found.apart, 4),
        "spread": round(found.spread, 4),
        "within": found.within,
        "one_rank": one,
        "ranks": several,
    }


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rewards of one rank's seeds, and of several ranks with the first of them, step by step."""

    one: Sequence[Sequence[float]]
    several: Sequence[float]

    @property
    def equal(self) -> int:
        """Steps whose rewards are the same, to what a mean over ranks rounds."""
        return sum(abs(a - b) < 1e-6 for a, b in zip(self.one[0], self.several, strict=True))

    @property
    def apart(self) -> float:
        """How far the curves of one seed are apart in a tenth of the run, at most."""
        return max(
            abs(of_one - of_several)
            for of_one, of_several in zip(_tenths(self.one[0]), _tenths(self.several), strict=True)
        )

    @property
    def spread(self) -> float:
        """How far one rank's seeds are apart in a tenth of the run, on average."""
        tenths = zip(*map(_tenths, self.one), strict=True)
        return mean([max(values) - min(values) for values in tenths])

    @property
    def within(self) -> bool:
        """Whether several ranks are no further from one than one's seeds are from each other."""
        return self.apart <= self.spread

    def table(self, nproc: int) -> str:
        """Return the curves beside each other, a row for each tenth of the run."""
        size, steps = _size(self.several), len(self.several)
        head = "".join(f"{f'seed {seed}':>8}" for seed in SEEDS)
        lines = [f"{'steps':<12}{head}{f'{nproc} ranks, seed {SEEDS[0]}':>20}"]
        rows = zip(*map(_tenths, (*self.one, self.several)), strict=True)
        for start, (*own, value) in zip(range(0, steps, size), rows, strict=True):
            label = f"{start + 1}-{min(start + size, steps)}"
            cells = "".join(f"{each:>8.3f}" for each in own)
            lines.append(f"{label:<12}{cells}{value:>20.3f}  {'#' * round(value * 30)}")
        return "\n".join(lines)

    def sentence(self, nproc: int) -> str:
        """Return what came of it."""
        return (
            f"{nproc} ranks and one, seed {SEEDS[0]}: the same reward in {self.equal} of {len(self.several)} steps; "
            f"in a tenth of the run at most {self.apart:.3f} apart, seeds of one rank {self.spread:.3f}: "
            f"{'within' if self.within else 'NOT within'} their spread"
        )


def _size(curve: Sequence[float]) -> int:
    return max(1, -(-len(curve) // ROWS))


def _tenths(curve: Sequence[float]) -> list[float]:
    size = _size(curve)
    return [mean(curve[start : start + size]) for start in range(0, len(curve), size)]


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
