"""What happens to one rank is decided by all, and none is left waiting in a collective."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from tests.trainer.parallel.gloo import on_ranks
from tests.trainer.parallel.work import every, short_of_memory, spoiled
from trainer import checkpoint as checkpoints
from trainer import sft
from trainer.config import parse_run
from trainer.run import train_parsed

pytestmark = pytest.mark.xdist_group("ranks")

CUT = {"sharding": "fsdp2", "micro_batch_size": 4}
CHECKPOINTED = CUT | {"checkpointing": "full", "tiled_mlp": False}


def test_memory_that_runs_out_on_one_rank_halves_on_all(sft_document, tmp_path):
    # in the forward's second layer, in the backward's recompute, in the second micro-batch; under HSDP
    places = [(CHECKPOINTED, 1, 1), (CHECKPOINTED, 0, 2), (CHECKPOINTED, 1, 3)]
    places += [(CHECKPOINTED | {"sharding": "ddp"}, 0, 2), (CUT | {"method": "full"}, 1, 1)]
    cases = [(sft_document(**CHECKPOINTED), str(tmp_path), "", 0, 0)]
    cases += [(sft_document(**CUT | {"method": "full"}), str(tmp_path), "", 0, 0)]
    cases += [(sft_document(**each), str(tmp_path), "memory", *at) for each, *at in places]
    first, second = on_ranks(2, every, spoiled, cases)
    whole, full = first[0], first[1]
    assert (whole[1], full[1]) == (0, 0)
    for place, (figures, halvings, _), other in zip(places, first[2:], second[2:], strict=True):
        assert (figures, halvings) == other[:2], place
        assert halvings == 1, place
        expected = full if "method" in place[0] else whole
        for mine, theirs in zip(figures, expected[0], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5), place


def test_a_nan_on_one_rank_skips_the_step_on_all(sft_document, tmp_path):
    cases = [
        (sft_document(**CHECKPOINTED), str(tmp_path), "nan", 0, 1),
        (sft_document(**CHECKPOINTED, dtype="fp16"), str(tmp_path), "inf", 0, 2),
    ]
    first, second = on_ranks(2, every, spoiled, cases)
    assert first[0][0][0][2:4] == (True, True), "skipped, and the weights are as before"
    assert first[0][0][1][2:4] == (False, False), "the next step is a step"
    # the scale is halved and the step done again, on both
    assert not first[1][0][0][2]
    assert first[1][0][0][4] == second[1][0][0][4] < 65536
    assert repr(first[0][0]) == repr(second[0][0])


def test_ranks_that_end_at_different_tokens_wait_for_each_other(grpo_document, tmp_path):
    document = grpo_document(sharding="fsdp2", micro_batch_size=8)
    calm = [(document, str(tmp_path), 0)]
    hit = [(document, str(tmp_path), 2), (document, str(tmp_path), 5)]
    first, second = on_ranks(2, every, short_of_memory, calm + hit)
    assert {len(each) for each, _ in first} == {4}
    assert {len(each) for each, _ in second} == {8}
    for rank in (first, second):
        assert all(made == rank[0][0] for made, _ in rank[1:]), (
            "the same completions, after a new start"
        )
    assert [wave for _, wave in second] == [8, 4, 4]


STOP = """
class Stop:
    def on_step_end(self, run, step, metrics):
        if step == 1:
            run.stop("enough")
"""


def ends(ranks, root, documents):
    """Return how each run ended here; in the first, SIGTERM comes to rank 1 alone, in its second step."""
    whole, found, passes = sft.log_probs, [], 0

    def log_probs(*arguments, **options):
        nonlocal passes
        passes += torch.is_grad_enabled()
        if ranks.rank == 1 and passes == 2 and not found:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(*arguments, **options)

    sft.log_probs = log_probs
    for made in documents:
        run, section = parse_run(made, root=Path(root))
        result = train_parsed(run, section, root=Path(root), ranks=ranks)
        saved = checkpoints.latest(result.output).step
        found.append((result.steps, saved, result.stopped_by, result.stop_reason, result.exhausted))
    return found


def test_what_stops_one_rank_stops_all_after_the_same_step(sft_document, tmp_path):
    (tmp_path / "stop.py").write_text(STOP, encoding="utf-8")
    held_out = tmp_path / "held.jsonl"
    held_out.write_text(json.dumps({"prompt": "12 - 4 =", "completion": " 8\n"}), encoding="utf-8")
    never_better = {"patience": 2, "min_delta": 100.0}
    runs = (
        {"output": "signal"},
        {"output": "callback", "callbacks": ["stop.py:Stop"]},
        {
            "output": "patience",
            "validation": str(held_out),
            "eval_every": 1,
            "evaluation": never_better,
        },
    )
    # a pass is a step
    documents = [sft_document(micro_batch_size=8, sharding="fsdp2", train=each) for each in runs]
    first, second = on_ranks(2, ends, str(tmp_path), documents)
    assert first == second
    assert first[0] == (2, 2, signal.SIGTERM, None, False)
    assert first[1] == (2, 2, None, "enough", False)
    assert first[2] == (3, 3, None, None, True)
