"""TensorBoard: event files in OUTPUT/tensorboard."""

from collections.abc import Mapping
from typing import Any

import yaml

from trainer.reporters.protocol import RunFacts, Started, Table, markdown

FOLDER = "tensorboard"


class TensorboardReporter:
    """Scalars, and tables as text."""

    def start(self, facts: RunFacts) -> Started:
        """Open a file of events; steps that will be done again are hidden in the ones before.

        An evaluation has the number of steps done before it: that of `first_step` steps is to stay.
        """
        from torch.utils.tensorboard import SummaryWriter

        folder = facts.output / FOLDER
        purge = facts.first_step + 1 if facts.run_id is not None else None
        self._board: Any = SummaryWriter(str(folder), purge_step=purge)
        text = yaml.safe_dump(facts.config, sort_keys=False)
        code = "\n".join(f"    {line}" for line in text.splitlines())
        self._board.add_text("run.yaml", code, facts.first_step)
        self._board.flush()
        return Started(run_id=facts.name, where=f"tensorboard --logdir {folder}")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Write a scalar each."""
        for name, value in figures.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()

    def table(self, step: int, name: str, columns: Table) -> None:
        """Write it as Markdown."""
        self._board.add_text(name, markdown(columns), step)

    def finish(self, *, failed: bool) -> None:
        """Close the file."""
        self._board.close()
