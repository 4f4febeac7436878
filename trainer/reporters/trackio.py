"""Trackio: a local SQLite file (TRACKIO_DIR), or a Space where TRACKIO_SPACE_ID names one."""

from collections.abc import Mapping
from typing import Any

from trainer.reporters.protocol import RunFacts, Started, Table, flat, plain, project_of, rows_of


class TrackioReporter:
    """A run of trackio, which knows it by its name."""

    def start(self, facts: RunFacts) -> Started:
        """Begin a run, or go on with the one of that name."""
        import trackio

        project = project_of(facts, "TRACKIO_PROJECT")
        resumed = facts.run_id is not None
        name = facts.run_id or self._free(project, facts.name)
        self._run: Any = trackio.init(
            project=project,
            name=name,
            resume="allow" if resumed else "never",
            config={key: plain(value) for key, value in flat(facts.config).items()},
            embed=False,
        )
        return Started(run_id=name, where=f"{name}: trackio show --project {project}")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures of a step."""
        self._run.log(dict(figures), step=step)

    def table(self, step: int, name: str, columns: Table) -> None:
        """Log a trackio.Table."""
        import trackio

        made = trackio.Table(columns=list(columns), data=rows_of(columns))
        self._run.log({name: made}, step=step)

    def finish(self, *, failed: bool) -> None:
        """Send what is left."""
        self._run.finish()

    @staticmethod
    def _free(project: str, name: str) -> str:
        """Return `name`, or name-2 and so on where the project has a run of that name."""
        import trackio

        try:
            taken = {run.name for run in trackio.Api().runs(project)}
        except Exception:  # no such project yet
            return name
        names = (name, *(f"{name}-{number}" for number in range(2, len(taken) + 3)))
        return next(each for each in names if each not in taken)
