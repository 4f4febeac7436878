"""Trackers that a run reports to: one protocol (protocol.py), one short file a tool, one factory.

Each works on a thread of its own (courier.py), so that no step waits for one; trainer/reporters/reports.py
says what is sent.
"""

from typing import TYPE_CHECKING

from planner.errors import UnknownNameError

if TYPE_CHECKING:
    from trainer.reporters.protocol import Reporter

REPORTERS = ("mlflow", "tensorboard", "trackio", "wandb")


def check_reporter(name: str) -> None:
    """Raise UnknownNameError, with near matches, for a tracker that there is none of."""
    if name not in REPORTERS:
        raise UnknownNameError(
            "train.report_to", name, REPORTERS, hint=f"allowed: {', '.join(REPORTERS)}"
        )


def make_reporter(name: str) -> "Reporter":
    """Return the reporter called `name`; its tool is imported when it starts."""
    check_reporter(name)
    match name:
        case "mlflow":
            from trainer.reporters.mlflow import MlflowReporter

            return MlflowReporter()
        case "tensorboard":
            from trainer.reporters.tensorboard import TensorboardReporter

            return TensorboardReporter()
        case "trackio":
            from trainer.reporters.trackio import TrackioReporter

            return TrackioReporter()
    from trainer.reporters.wandb import WandbReporter

    return WandbReporter()
