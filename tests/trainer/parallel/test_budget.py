"""`train --fit` on two ranks: one choice for both, and the same curve after memory ran out on one of them."""

from pathlib import Path

import pytest
import torch
import yaml

from planner.errors import VramwiseError
from planner.units import GiB
from tests.trainer.parallel.gloo import on_ranks
from trainer import sft
from trainer.fit import fit
from trainer.foreign import read_given
from trainer.run import train_parsed

pytestmark = pytest.mark.xdist_group("ranks")

STEPS = 3


def fitted(ranks, path, root):
    """Return what was said of the choice, what each run of it did, and why nothing is chosen for less memory.

    A run: (losses, norms and tokens of each step, tokens of a micro-batch at the end, what was said). In the second
    and third memory runs out on rank 1 alone, in so many passes from the second on.
    """
    whole, said, runs = sft.log_probs, [], []
    given, promised = fit(read_given(Path(path)), "2GiB, <6h", say=said.append, ranks=ranks)
    for times in (0, 4, 6):
        passes = 0

        def log_probs(*arguments, times=times, **options):
            nonlocal passes
            passes += torch.is_grad_enabled()
            if ranks.rank == 1 and 2 <= passes < 2 + times:
                raise torch.OutOfMemoryError("injected")
            return whole(*arguments, **options)

        sft.log_probs, told = log_probs, []
        output = str(Path(root) / f"out-{times}")
        section = given.train.model_copy(update={"output": output})
        result = train_parsed(
            given.run, section, root=Path(root), say=told.append, ranks=ranks, fitted=promised
        )
        curve = [(step["loss"], step["grad_norm"], step["tokens"]) for step in result.metrics]
        runs.append((curve, result.metrics[-1]["budget_tokens"], told))
    try:
        fit(read_given(Path(path)), "1MiB", ranks=ranks)
    except VramwiseError as error:
        return said, runs, error.message


@pytest.mark.slow
def test_ranks_choose_alike_and_their_curve_is_that_of_a_run_without_the_error(
    sft_document, tmp_path
):
    made = sft_document(lora={"rank": 4, "dropout": 0.2}, train={"steps": STEPS})
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(made), encoding="utf-8")
    (said, runs, nothing), (other, others, nothing_too) = on_ranks(
        2, fitted, str(path), str(tmp_path)
    )
    text = "\n".join(said)
    # 7 samples a step: 4 are one rank's
    assert "fit: micro_batch_size=4 x 1" in text
    assert "fit: traced: " in text
    assert "fit: " not in "\n".join(other), "the first one says it"
    assert [each[:2] for each in runs] == [each[:2] for each in others]
    kept = yaml.safe_load((tmp_path / "out-0" / "run.yaml").read_text(encoding="utf-8"))
    assert kept["train"]["prompts_per_step"] == 7
    assert kept["train"]["device_memory"] == f"{2 * GiB}b"
    assert kept["recipe"]["checkpointing"] == "none"
    (whole, tokens, _), (redone, same_tokens, told), (halved, fewer, _) = runs
    rungs = [line.partition("; ")[2] for line in told if "out of memory" in line]
    assert rungs[1:] == ["checkpointing=full", rungs[0], "checkpointing=offload"]
    assert (redone, same_tokens) == (whole, tokens), "bit for bit"
    assert fewer < tokens
    assert halved[0] == whole[0], "before it ran out"
    assert halved[-1] == pytest.approx(whole[-1], rel=1e-5)
    assert "nothing meets" in nothing
    assert nothing_too == f"rank 0: {nothing}"
