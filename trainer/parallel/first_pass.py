"""The first passes of a policy in parts, over two tokens: all ranks learn what a pass sends, and links are made."""

from typing import Any

import torch
from torch import Tensor

from trainer.model import Policy
from trainer.parallel.dealing import blank_batch
from trainer.scoring import hidden_rows, log_probs


def learn_traffic(policy: Policy, shape: dict[str, Any]) -> None:
    """Run each kind of pass once; weights stay as they are. `shape`: of the scoring."""
    batch = blank_batch(policy.tokenizer.pad_token_id or 0, policy.device)

    def score() -> Tensor:
        return 0.0 * log_probs(policy, batch, hidden_rows(policy, batch), **shape).logp.sum()

    def learn() -> bool:
        policy.whole(score).backward()
        return True

    with policy.training():
        policy.one_pass(learn)
    policy.clear_gradients()
    with torch.no_grad():
        for _ in range(2):  # the second finds the root gathered
            policy.whole(score, keep=True)
        policy.settle()
