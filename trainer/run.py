"""One run from its file to its end, and what to say about it."""

import logging
import math
from pathlib import Path
from typing import Any

from planner.run.recipe import RunFile, Task
from trainer.config import TrainSection
from trainer.fit import Fit, fit
from trainer.foreign import read_given
from trainer.grpo import train_grpo
from trainer.parallel.agree import check_alike, check_world
from trainer.parallel.ranks import ALONE, Ranks
from trainer.push import note_before, push_after
from trainer.say import Say, silent
from trainer.session import Result
from trainer.sft import train_sft

SCHEMA_VERSION = 1


def train_run(
    path: Path,
    *,
    resume: bool = False,
    say: Say = silent,
    ranks: Ranks = ALONE,
    budget: str | None = None,
    price: str | None = None,
) -> Result:
    """Run the file at `path`: a run.yaml, whose relative paths count from its folder, or a TRL config.

    `budget`: settings are chosen that meet it, as `--fit` says. Every rank of `ranks` calls it.
    """
    quiet()
    given = read_given(path)
    check_alike(ranks, path, given)
    for line in given.lines:
        say(line)
    promised = None
    if budget is not None:
        given, promised = fit(given, budget, price=price, say=say, ranks=ranks)
    return train_parsed(
        given.run,
        given.train,
        root=given.root,
        resume=resume,
        say=say,
        ranks=ranks,
        fitted=promised,
    )


def train_parsed(
    run: RunFile,
    train: TrainSection,
    *,
    root: Path,
    resume: bool = False,
    say: Say = silent,
    ranks: Ranks = ALONE,
    fitted: Fit | None = None,
) -> Result:
    """Run a validated run file."""
    quiet()
    check_world(run, ranks)
    algorithm = train_grpo if run.recipe.task is Task.GRPO else train_sft
    push = train.push_to_hub
    if push is not None and ranks.first and (note := note_before()):
        say(note)
    result = algorithm(run, train, root=root, resume=resume, say=say, ranks=ranks, fit=fitted)
    if push is not None and ranks.first:
        push_after(result.output, push, stopped=result.stopped_by is not None, say=say)
    return result


def report(result: Result) -> dict[str, Any]:
    """Return the JSON document of `vramwise train --json`."""
    last = result.metrics[-1] if result.metrics else {}
    figures = {
        key: last[key]
        for key in ("loss", "reward", "kl", "entropy", "tokens_per_second")
        if isinstance(last.get(key), int | float) and math.isfinite(last[key])
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "output": str(result.output),
        "steps": result.steps,
        "bad_steps": result.bad_steps,
        "stopped_by": result.stopped_by,
        "stopped_early": result.stop_reason
        or ("no better evaluation" if result.exhausted else None),
        "seconds": round(result.seconds, 1),
        "last": figures,
        "metrics_file": str(result.output / "metrics.jsonl"),
    }


def quiet() -> None:
    """Keep progress bars and hints of libraries off stderr; their errors stay."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    for name in ("transformers", "bitsandbytes", "peft", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
