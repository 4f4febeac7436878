"""Weights & Biases: online with a key and a network, else kept in OUTPUT/wandb for `wandb sync`."""

import netrc
import os
import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from trainer.reporters.courier import FINISH_LIMIT_S, one_line
from trainer.reporters.protocol import STEP, RunFacts, Started, Table, project_of, rows_of

INIT_LIMIT_S = 20
KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


class WandbReporter:
    """A run of wandb."""

    def start(self, facts: RunFacts) -> Started:
        """Begin or go on with a run; without a key or a network it is an offline one."""
        os.environ.setdefault("WANDB_SILENT", "true")  # logging in says where the key is from
        import wandb

        run_id = facts.run_id or secrets.token_hex(4)
        settings = wandb.Settings(
            # a prompt for a key, lines on stdout or an upload without end are not for a training run
            silent=True,
            console="off",
            init_timeout=INIT_LIMIT_S,
            finish_timeout=FINISH_LIMIT_S - 5,
        )
        folder = facts.output / "wandb"
        options: dict[str, Any] = {
            "project": project_of(facts, "WANDB_PROJECT"),
            "name": facts.name,
            "id": run_id,
            "resume": "allow",
            "dir": str(facts.output),
            "config": facts.config,
            "settings": settings,
        }
        mode: Any = os.environ.get("WANDB_MODE")
        why = ""
        if mode is None and not has_key(settings.base_url):
            mode, why = "offline", "no key: wandb login, or WANDB_API_KEY; "
        try:
            self._run: Any = wandb.init(mode=mode, **options)
        except Exception as error:
            if mode in ("offline", "disabled"):
                raise
            mode, why = "offline", f"{one_line(error)}; "
            wandb.teardown()  # or the run's id stays taken
            self._run = wandb.init(mode=mode, **options)
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP, step_sync=True)
        later = f"offline, {why}later: wandb sync {folder}/offline-run-*-{run_id}"
        return Started(run_id=run_id, where=later if mode == "offline" else str(self._run.url))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures beside their step: a resumed run may go back in it, wandb's own counter not."""
        self._run.log({**figures, STEP: step})

    def table(self, step: int, name: str, columns: Table) -> None:
        """Log a wandb.Table."""
        import wandb

        self._run.log({name: wandb.Table(columns=list(columns), data=rows_of(columns)), STEP: step})

    def finish(self, *, failed: bool) -> None:
        """End the run; what is not sent in time stays on the disk for `wandb sync`."""
        self._run.finish(exit_code=int(failed))


def has_key(url: str) -> bool:
    """Return whether wandb would find a key for `url` without asking: `wandb login` writes it to netrc."""
    if any(os.environ.get(name) for name in KEYS):
        return True
    host = urlsplit(url).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
