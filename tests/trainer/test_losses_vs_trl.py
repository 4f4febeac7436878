"""Loss and gradient against TRL's own code: GRPOTrainer._compute_loss on identical inputs.

A real GRPOTrainer of the installed release is made around a tiny model; only the step from model to
log-probabilities is replaced, by the numbers that both sides get.
"""

import importlib.util

import pytest
import torch

from trainer.advantages import Scale, group_advantages
from trainer.losses import KlEstimator, LossSettings, RatioLevel, policy_loss
from trainer.policy_update import step_normaliser

if importlib.util.find_spec("trl") is None:
    pytest.skip("trl is not installed", allow_module_level=True)

LENGTHS = (7, 3, 5, 1, 6, 2)
ROWS, WIDTH, MAX_LENGTH = len(LENGTHS), max(LENGTHS), 9


@pytest.fixture(scope="module")
def trl_trainer(tmp_path_factory):
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "a", "b", "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            vocab_size=len(words),
        )
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=ROWS,
            num_generations=ROWS,
            max_completion_length=MAX_LENGTH,
            report_to=[],
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a b"] * 8}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
        ),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def numbers(seed=0):
    """Padded [B, T] log-probabilities of policy, sampler and reference, mask, advantages [B]."""
    generator = torch.Generator().manual_seed(seed)

    def draw(spread):
        return torch.randn(ROWS, WIDTH, generator=generator) * spread

    logp = -draw(1.0).abs() - 0.05
    mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).long()
    return {
        "logp": logp,
        "old": logp + draw(0.4),
        "ref": logp + draw(0.3),
        "mask": mask,
        "advantages": torch.tensor([1.3, -0.7, 0.2, -1.1, 0.9, -0.6]),
    }


def trl_loss(trainer, data, *, on_policy, **options):
    """Return TRL's loss and its gradient for the padded log-probabilities."""
    logp = data["logp"].clone().requires_grad_()
    trainer.loss_type = options["loss_type"]
    trainer.importance_sampling_level = options.get("level", "token")
    trainer.epsilon_low = 0.2
    trainer.epsilon_high = options.get("epsilon_high", 0.28)
    trainer.args.delta = options.get("delta")
    trainer.beta = options.get("beta", 0.0)
    trainer.args.use_bias_correction_kl = options.get("kl") == "k3-ratio"
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
        logp,
        torch.zeros_like(logp),
        None,
    )
    batch = {
        "prompt_ids": torch.ones(ROWS, 2, dtype=torch.long),
        "prompt_mask": torch.ones(ROWS, 2, dtype=torch.long),
        "completion_ids": torch.ones(ROWS, WIDTH, dtype=torch.long),
        "completion_mask": data["mask"],
        "advantages": data["advantages"],
        "num_items_in_batch": data["mask"].sum(),
        "ref_per_token_logps": data["ref"],
    }
    if not on_policy:
        batch["old_per_token_logps"] = data["old"]
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    return loss.detach(), logp.grad


def our_loss(data, *, on_policy, **options):
    """Return our loss and gradient, laid out as TRL's."""
    logp = data["logp"].clone().requires_grad_()
    keep = data["mask"].bool()
    settings = LossSettings(
        loss_type=options.get("ours", options["loss_type"]),
        epsilon=0.2,
        epsilon_high=options.get("epsilon_high", 0.28),
        delta=options.get("delta"),
        beta=options.get("beta", 0.0),
        kl=KlEstimator(options.get("kl", "k3")),
        ratio_level=RatioLevel(options["level"]) if "level" in options else None,
        max_completion_length=MAX_LENGTH,
    )
    rows = torch.arange(ROWS)[:, None].expand(ROWS, WIDTH)[keep]
    loss, stats = policy_loss(
        logp[keep],
        advantages=data["advantages"],
        sequence_ids=rows,
        old_logp=None if on_policy else data["old"][keep],
        ref_logp=data["ref"][keep],
        normaliser=step_normaliser(
            settings,
            lengths=LENGTHS,
            chosen=range(ROWS),
            counted={row for row in range(ROWS) if keep[row].any()},
        ),
        settings=settings,
    )
    loss.backward()
    return loss.detach(), logp.grad, stats.summary()


CASES = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.15},
    "gspo": {"loss_type": "grpo", "ours": "gspo", "level": "sequence"},
    "grpo-sequence-ratio-dapo": {"loss_type": "dapo", "level": "sequence"},
    "delta": {"loss_type": "grpo", "delta": 1.4},
    "beta": {"loss_type": "grpo", "beta": 0.04},
    "beta-dapo": {"loss_type": "dapo", "beta": 0.1},
    "beta-ratio": {"loss_type": "grpo", "beta": 0.04, "kl": "k3-ratio"},
    "beta-ratio-gspo": {
        "loss_type": "grpo",
        "ours": "gspo",
        "level": "sequence",
        "beta": 0.04,
        "kl": "k3-ratio",
    },
}


@pytest.mark.parametrize("on_policy", [True, False], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_loss_and_gradient_equal_trl(trl_trainer, options, on_policy):
    data = numbers()
    if options.get("level") == "sequence":
        # a sequence's mean ratio is near 1: shift some so that both clips decide
        data["old"][:2] -= 0.5 * data["advantages"][:2, None].sign()
    expected, expected_grad = trl_loss(trl_trainer, data, on_policy=on_policy, **options)
    found, grad, summary = our_loss(data, on_policy=on_policy, **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-8)
    assert expected_grad.abs().sum() > 0
    if not on_policy:
        assert summary["clip_ratio/region"] > 0, "the case must exercise clipping"


@pytest.mark.parametrize("options", [CASES["grpo"], CASES["cispo"]], ids=["grpo", "cispo"])
def test_clip_fractions_equal_trl(trl_trainer, options):
    data = numbers(seed=3)
    trl_trainer._metrics["train"].clear()
    trl_loss(trl_trainer, data, on_policy=False, **options)
    metrics = trl_trainer._metrics["train"]
    summary = our_loss(data, on_policy=False, **options)[2]
    if options["loss_type"] == "cispo":
        assert summary["clip_ratio/high"] == pytest.approx(metrics["cispo_clip_ratio"][-1])
    else:
        for ours, theirs in (("low", "low_mean"), ("high", "high_mean"), ("region", "region_mean")):
            assert summary[f"clip_ratio/{ours}"] == pytest.approx(
                metrics[f"clip_ratio/{theirs}"][-1]
            )


@pytest.mark.parametrize("scale", list(Scale))
def test_advantages_equal_trl(trl_trainer, scale, monkeypatch):
    """TRL makes advantages at the end of its generation step: let it generate, with given rewards."""
    rewards = [1.0, 0.0, 0.5, 0.0, 0.0, 1.0]
    monkeypatch.setattr(trl_trainer, "scale_rewards", scale.value)
    monkeypatch.setattr(trl_trainer, "reward_funcs", [lambda **_: rewards])
    monkeypatch.setattr(trl_trainer, "num_generations", 3)
    trl_trainer.beta = 0.0
    batch = trl_trainer._generate_and_score_completions([{"prompt": "a b"} for _ in rewards])
    found = group_advantages(torch.tensor(rewards), num_generations=3, scale=scale)
    torch.testing.assert_close(found.values, batch["advantages"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["grpo", "gspo", "dr_grpo", "dapo", "cispo"])
def test_cut_completions_are_masked_as_in_trl(trl_trainer, name):
    """mask_truncated_completions: rows 1 and 4 have no tokens left, and are rows still."""
    data = numbers()
    data["mask"][[1, 4]] = 0
    theirs, their_gradient = trl_loss(trl_trainer, data, on_policy=False, **CASES[name])
    ours, our_gradient, _ = our_loss(data, on_policy=False, **CASES[name])
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(our_gradient, their_gradient)
