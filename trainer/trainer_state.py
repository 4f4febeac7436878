"""What reward functions see as trainer_state: TrainerState's names in transformers 5, as far as they mean anything here."""

import math
from typing import Any

from trainer import checkpoint as checkpoints
from trainer.preflight import Preflight
from trainer.session import Session
from trainer.validation import BEST

HISTORY_STEPS = 100
"""Of log_history: all of a long run would be sent to every reward process at every step."""


def trainer_state(session: Session, ready: Preflight, *, step: int, prompts: int) -> dict[str, Any]:
    """Return the state before step number `step` of a data set of `prompts` (counted from 0)."""
    train, validation = ready.train, session.validation
    per_epoch = max(1, prompts)
    best = None
    if validation is not None and train.evaluation.save_best and validation.best_step is not None:
        best = str(session.output / checkpoints.FOLDER / BEST)
    return {
        "global_step": step,
        "max_steps": train.steps,
        "epoch": ready.prompts_per_step * step / per_epoch,
        "num_train_epochs": math.ceil(ready.prompts_per_step * train.steps / per_epoch),
        "num_input_tokens_seen": session.tokens_seen,
        "train_batch_size": ready.recipe.micro_batch_size,
        "logging_steps": 1,
        "eval_steps": train.eval_every if validation is not None else 0,
        "save_steps": train.save_every,
        "best_metric": validation.best if validation is not None else None,
        "best_global_step": validation.best_step if validation is not None else None,
        "best_model_checkpoint": best,
        "log_history": session.metrics[-HISTORY_STEPS:],
        "is_local_process_zero": True,
        "is_world_process_zero": True,
    }
