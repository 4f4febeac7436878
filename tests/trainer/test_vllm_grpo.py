"""GRPO through real vLLM: the reward rises, whichever way the weights reach the engine."""

import statistics

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from planner.errors import VramwiseError
from trainer import checkpoint as checkpoints
from trainer.engines import vllm_llm

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]

STEPS = 24


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    """A model whose heads are wide enough (32) for vLLM's CPU attention."""
    from trainer.small_model import make_small_model

    folder = tmp_path_factory.mktemp("models") / "wide"
    return make_small_model(folder, hidden=128, heads=4, layers=1, chat=True)


@pytest.fixture
def learn(document, train_run_of, wide_model):
    """Train to write digits (about one token in eight at first) and return the Result."""

    def run(kind, method, **train):
        made = document(
            model=str(wide_model),
            recipe={
                "method": method,
                "engine": {"kind": kind},
                "num_generations": 8,
                "micro_batch_size": 32,
                "completion_length": 6,
                "lora": {"rank": 8},
            },
            train={
                "steps": STEPS,
                "lr": 5e-2 if method == "lora" else 1e-2,
                "rewards": ["digits.py:share_of_digits"],
                "prompts_per_step": 4,
            }
            | train,
        )
        return train_run_of(made)

    return run


@pytest.fixture(autouse=True)
def digits_reward(tmp_path):
    (tmp_path / "digits.py").write_text(
        "def share_of_digits(prompts, completions, **columns):\n"
        "    return [sum(c.isdigit() for c in text) / 6 for text in completions]\n"
    )


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("vllm-shared", "lora"),
        ("vllm-shared", "full"),
        ("vllm-push", "lora"),
        ("vllm-push", "full"),
    ],
)
def test_reward_rises_through_vllm(learn, kind, method):
    result = learn(kind, method)
    rewards = [row["reward"] for row in result.metrics]
    assert len(rewards) == STEPS
    # adapters on a random one-layer model can do little to its tied head; all weights can do all
    gain = 0.3 if method == "full" else 0.03
    assert statistics.mean(rewards[-5:]) > statistics.mean(rewards[:5]) + gain
    # the sampler's log-probs are the scorer's: on CPU in fp32 the importance ratio is 1
    learned = [row for row in result.metrics if not row.get("nothing_to_learn")]
    assert len(learned) > 4
    for row in learned:
        assert row["sampling/ratio_mean"] == pytest.approx(1.0, abs=1e-3)
        assert row["sampling/logp_difference_max"] < 1e-2


def test_an_engine_that_dies_leaves_a_checkpoint_to_resume(learn, monkeypatch, tmp_path):
    calls = []
    real = vllm_llm.generate

    def dies(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            options["timeout_s"] = 0.0  # the third rollout "never ends"
        return real(*arguments, **options)

    monkeypatch.setattr(vllm_llm, "generate", dies)
    with pytest.raises(VramwiseError, match="took longer"):
        learn("vllm-shared", "lora")
    assert checkpoints.latest(tmp_path / "out").path.is_dir()
    state_step = int(checkpoints.latest(tmp_path / "out").path.name.split("-")[-1])
    assert state_step == 2
