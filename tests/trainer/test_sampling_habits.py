"""min_p is part of the policy that is trained; penalties and grammars are the sampler's, and corrected."""

import pytest
import torch
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from planner.errors import VramwiseError
from trainer.config import parse_run
from trainer.engines.protocol import SamplingSettings
from trainer.sampling import penalise, shape_logits


def settings(**fields):
    return SamplingSettings(num_generations=1, max_new_tokens=1, **fields)


def test_min_p_is_transformers_own():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * 3
    ours = shape_logits(logits, temperature=0.7, top_k=0, top_p=1.0, min_p=0.15)
    theirs = MinPLogitsWarper(0.15)(None, logits / 0.7)
    assert torch.equal(ours.isinf(), theirs.isinf())
    assert 0 < ours.isinf().sum() < ours.numel()
    # the token that was drawn is scored, though the policy has moved it below the edge
    dropped = ours.isinf().int().argmax(-1)
    kept = shape_logits(logits, temperature=0.7, top_k=0, top_p=1.0, min_p=0.15, keep=dropped)
    assert kept.gather(-1, dropped[:, None]).isfinite().all()


def test_the_repetition_penalty_is_transformers_own():
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(1))
    prompts, said = [[1, 2, 3], [4, 5, 6]], [[7, 2], [7, 7]]
    ids = torch.tensor([p + s for p, s in zip(prompts, said, strict=True)])
    ours = penalise(logits, prompts, said, settings(repetition_penalty=1.7))
    assert torch.allclose(ours, RepetitionPenaltyLogitsProcessor(1.7)(ids, logits))


def test_presence_and_frequency_count_the_completion_alone():
    ours = penalise(
        torch.zeros(1, 5),
        [[0, 1]],
        [[2, 2, 3]],
        settings(presence_penalty=0.5, frequency_penalty=0.25),
    )
    assert ours.tolist() == [[0.0, 0.0, -1.0, -0.75, 0.0]]


def test_without_a_penalty_nothing_is_copied():
    logits = torch.zeros(1, 5)
    assert penalise(logits, [[0]], [[1]], settings()) is logits


def test_a_bent_sampler_is_corrected_and_a_plain_one_is_not(document, train_run_of, tmp_path):
    plain = document(train={"steps": 1, "sampling": {"min_p": 0.01}})
    told = train_run_of(plain).metrics[0]
    assert "sampling/ratio_mean" not in told
    bent = document(
        train={
            "steps": 1,
            "output": str(tmp_path / "bent"),
            "sampling": {"repetition_penalty": 1.5, "min_p": 0.01},
            "loss": {"is_cap": 2.0},
        }
    )
    told = train_run_of(bent).metrics[0]
    assert told["sampling/ratio_max"] != told["sampling/ratio_min"]


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"guided_regex": "[0-9"}, "guided_regex"),
        ({"guided_regex": "[0-9]"}, "train.sampling.guided_regex"),
        ({"guided_json": "{not json"}, "guided_json"),
        ({"guided_json": {"type": "object"}, "guided_regex": "a"}, "guided_regex"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
    ],
)
def test_bad_sampling_is_refused_by_name(sampling, named, document, tmp_path):
    with pytest.raises(VramwiseError) as caught:
        parse_run(document(train={"sampling": sampling}), root=tmp_path)
    assert named in caught.value.message
    assert caught.value.hint


def test_a_schema_may_be_text(document, tmp_path):
    made = document(
        recipe={"engine": {"kind": "vllm-push"}},
        train={"sampling": {"guided_json": '{"type": "object"}'}},
    )
    assert parse_run(made, root=tmp_path)[1].sampling.guided_json == {"type": "object"}
