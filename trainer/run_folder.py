"""The folder a run writes to: refused where it is not to be used, made with run.yaml, put back by a run that never began."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from planner.errors import UsageError
from planner.run.recipe import RunFile
from trainer import checkpoint as checkpoints
from trainer.config import TrainSection
from trainer.metrics import COMPLETIONS_FOLDER, METRICS_FILE, read_metrics
from trainer.parallel.agree import check_shared
from trainer.parallel.ranks import ALONE, Ranks

REWARDS_LOG = "rewards.log"
"""What reward functions print."""
OWN_NAMES = (
    checkpoints.FOLDER,
    COMPLETIONS_FOLDER,
    METRICS_FILE,
    checkpoints.RUN_FILE,
    "tensorboard",
    "wandb",
    ".push",
    "preflight.json",
    "evaluations.jsonl",
    REWARDS_LOG,
)


def check_output(train: TrainSection, *, resume: bool) -> None:
    """Raise UsageError where the output folder is not to be used; nothing is written or deleted."""
    output = Path(train.output)
    if output.exists() and not output.is_dir():
        raise UsageError(f"train.output: {output} is a file")
    if resume:
        checkpoints.latest(output)
    elif output.exists() and any(output.iterdir()):
        if not train.overwrite:
            raise UsageError(
                f"train.output: {output} exists and is not empty",
                hint="--resume continues it; overwrite: true starts anew; or name another folder",
            )
        foreign = sorted(path.name for path in output.iterdir() if path.name not in OWN_NAMES)
        if foreign:
            raise UsageError(
                f"train.overwrite: {output} holds what no run made ({foreign[0]}); not deleting it"
            )


@contextmanager
def run_folder(
    run: RunFile, train: TrainSection, *, resume: bool, ranks: Ranks = ALONE
) -> Iterator[Path]:
    """Make the output folder, with run.yaml in it; a run that fails before its first step leaves no trace.

    An earlier run that is to be replaced is put aside, and deleted when the new one has made a step. The
    first rank does all of it; the others see that they look at the same folder.
    """
    import yaml

    output = Path(train.output)
    ranks.barrier()  # all have checked the folder as it was
    if not ranks.first:
        check_shared(ranks, output)
        yield output
        return
    check_output(train, resume=resume)
    aside = replaced(output)
    if not resume and output.exists():
        shutil.rmtree(aside, ignore_errors=True)
        output.rename(aside)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"train.output: cannot make {output}: {error.strerror}") from None
    document = run.model_dump(mode="json", exclude_unset=True)
    text = yaml.safe_dump(document, sort_keys=False)
    (output / checkpoints.RUN_FILE).write_text(text, encoding="utf-8")
    try:
        check_shared(ranks, output)
        yield output
    except BaseException:
        began = checkpoints.checkpoints(output) or read_metrics(output / METRICS_FILE)
        if not resume and not began:
            shutil.rmtree(output)
            if aside.exists():
                aside.rename(output)
        raise


def replaced(output: Path) -> Path:
    """Return where an earlier run is until the new one in its folder has made a step."""
    return output.with_name(f".{output.name}.replaced")
