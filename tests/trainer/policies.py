"""A policy around a model that a test has made, with no tokenizer but its last token."""

from types import SimpleNamespace
from typing import Any

import torch

from planner.run.recipe import Method
from trainer.model import Policy

EOS = 1


def policy_over(folder: str, model: Any, method: Method = Method.LORA) -> Policy:
    """Return the fp32 policy of `model` on the CPU, of the base in `folder`."""
    return Policy(
        model=model,
        tokenizer=SimpleNamespace(eos_token_id=EOS),
        method=method,
        source=folder,
        revision=None,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
