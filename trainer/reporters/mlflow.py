"""MLflow: the server or store of MLFLOW_TRACKING_URI, else an SQLite file beside the output folder."""

import logging
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from trainer.reporters.protocol import RunFacts, Started, Table, flat, project_of, rows_of

DATABASE = "mlflow.db"
ARTIFACTS = "mlartifacts"
MAX_PARAM_CHARACTERS = 6000
"""Of a parameter's value, mlflow.utils.validation."""
BATCH = 100
"""Parameters of one call, as above."""


class MlflowReporter:
    """A run of MLflow, through its client: no global state, no active run."""

    def start(self, facts: RunFacts) -> Started:
        """Begin a run in the experiment of the project, or go on with one."""
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):  # after the import, which sets them up
            logging.getLogger(name).setLevel(logging.WARNING)
        beside = facts.output.resolve().parent
        local = f"sqlite:///{beside / DATABASE}"
        uri = os.environ.get("MLFLOW_TRACKING_URI") or local
        self._client: Any = MlflowClient(tracking_uri=uri)
        self._id = facts.run_id or self._new(facts, beside if uri == local else None)
        known = self._client.get_run(self._id).data.params
        if facts.run_id:
            self._client.update_run(self._id, status="RUNNING")
        # a parameter is written once: of a resumed run those that are new
        params = [
            Param(_allowed(key), str(value)[:MAX_PARAM_CHARACTERS])
            for key, value in flat(facts.config).items()
            if _allowed(key) not in known
        ]
        for start in range(0, len(params), BATCH):
            self._client.log_batch(self._id, params=params[start : start + BATCH])
        return Started(run_id=self._id, where=f"mlflow ui --backend-store-uri {uri}")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures of a step in one call."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(_allowed(name), float(value), now, step) for name, value in figures.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def table(self, step: int, name: str, columns: Table) -> None:
        """Write NAME/step-NNN.json, in the form that MLflow shows as a table."""
        document = {"columns": list(columns), "data": rows_of(columns)}
        self._client.log_dict(self._id, document, f"{name}/step-{step:08d}.json")

    def finish(self, *, failed: bool) -> None:
        """Say how the run ended."""
        self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")

    def _new(self, facts: RunFacts, beside: Any) -> str:
        project = project_of(facts, "MLFLOW_EXPERIMENT_NAME")
        found = self._client.get_experiment_by_name(project)
        place = (beside / ARTIFACTS).as_uri() if beside else None
        number = (
            found.experiment_id
            if found
            else self._client.create_experiment(project, artifact_location=place)
        )
        run_id: str = self._client.create_run(number, run_name=facts.name).info.run_id
        return run_id


def _allowed(name: str) -> str:
    """Return a name in the characters that MLflow allows: pass@1 is pass_at_1."""
    return re.sub(r"[^\w.\-/ :]", "_", name.replace("@", "_at_"))
