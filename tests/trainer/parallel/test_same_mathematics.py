"""Two ranks with a share of the batch each are one rank with the batch: gradients, losses, weights."""

import json

import pytest
import torch

from tests.trainer.parallel.gloo import on_ranks
from tests.trainer.parallel.work import (
    evaluation,
    every,
    grpo_gradients,
    grpo_run,
    sft_curve,
    sft_gradients,
)
from trainer.parallel.ranks import Ranks
from trainer.small_model import small_tokenizer

pytestmark = pytest.mark.xdist_group("ranks")

FULL = {"method": "full"}
CUT = {"sharding": "fsdp2"}
OF_THE_MACHINE = ("seconds", "per_second", "bytes")
"""Ends of the names of figures that are no step's own."""
PAIRS = ((7, 2), (9, 4), (3, 3), (8, 1), (6, 5))


def apart(one, other):
    """Return the largest relative distance of two sets of tensors."""
    assert one.keys() == other.keys()
    return max(
        float((one[name] - other[name]).norm() / one[name].norm().clamp(min=1e-12)) for name in one
    )


def both(work, cases, *more):
    """Return [(of one process, of each of two ranks)] for all `cases`."""
    alone = [work(Ranks.alone(), *case, *more) for case in cases]
    first, second = on_ranks(2, every, work, [(*case, *more) for case in cases])
    return list(zip(alone, zip(first, second, strict=True), strict=True))


def test_gradients_of_sft(sft_document, tmp_path):
    settings = (
        CUT,
        FULL | CUT,
        FULL,
        FULL | CUT | {"checkpointing": "offload", "tiled_mlp": True},
        {"checkpointing": "none", "tiled_mlp": False},
        {"sharding": "ddp", "packing": True},
        CUT | {"method": "qlora"},
        {"method": "qlora", "checkpointing": "full"},
        CUT | {"lora": {"rank": 4, "init": "pissa"}},
    )
    # in tiles of 5 tokens, where MLPs are tiled at all
    cases = [(sft_document(**each), str(tmp_path), 64, 5) for each in settings]
    for each, (alone, ranks) in zip(settings, both(sft_gradients, cases), strict=True):
        for loss, gradients in ranks:
            assert loss == pytest.approx(alone[0], rel=1e-6), each
            assert apart(alone[1], gradients) < 1e-6, each


@pytest.fixture(scope="module")
def small_mixture(tmp_path_factory):
    """Of eight experts, so few tokens that each rank leaves some without any."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = small_tokenizer()
    folder = tmp_path_factory.mktemp("mixture") / "model"
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
            num_experts=8, num_experts_per_tok=1, pad_token_id=0, initializer_range=0.1,
        )
    ).save_pretrained(folder)  # fmt: skip
    tokenizer.save_pretrained(folder)
    return folder


def test_gradients_of_a_mixture_and_of_its_balance(sft_document, small_mixture, tmp_path):
    """Its auxiliary loss is a micro-batch's own, so those are alike on any number of ranks: one sample each."""
    even = tmp_path / "even.jsonl"
    rows = [{"prompt": f"{a} + 1 =", "completion": f" {a + 1}\n"} for a in range(9)]
    even.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    train = {"dataset": {"name": str(even)}, "prompts_per_step": 3, "router_aux_loss_coef": 0.5}
    settings = (FULL | CUT, CUT | {"lora": {"rank": 4, "targets": "attention"}}, FULL)
    cases = [
        (sft_document(train=train, **each) | {"model": str(small_mixture)}, str(tmp_path), 0)
        for each in settings
    ]
    for each, (alone, ranks) in zip(settings, both(sft_gradients, cases), strict=True):
        for loss, gradients in ranks:
            assert loss == pytest.approx(alone[0], rel=1e-6), each
            assert apart(alone[1], gradients) < 1e-6, each


def test_curves_of_sft(sft_document, tmp_path):
    settings = (
        CUT,
        FULL | CUT,
        {"sharding": "ddp", "optimizer": "lion"},
        # states on the host
        FULL | CUT | {"optimizer": "paged-adamw"},
        CUT | {"optimizer_offload": True},
        # whole matrices: copies have them
        FULL | {"sharding": "ddp", "optimizer": "adafactor"},
    )
    check_curves(sft_document, tmp_path, settings)


@pytest.mark.slow
def test_the_curve_of_a_four_bit_base(sft_document, tmp_path):
    check_curves(sft_document, tmp_path, [CUT | {"method": "qlora"}])


def check_curves(make, root, settings):
    """Compare 20 steps of SFT on one process and on two ranks."""
    cases = [(make(**each), str(root)) for each in settings]
    for each, (alone, (first, second)) in zip(settings, both(sft_curve, cases, 20), strict=True):
        assert first == second, each
        assert first == pytest.approx(alone, rel=2e-5), each
        assert alone[-2] < 0.6 * alone[0], "it learnt"


def test_low_precision_curves_stay_near(sft_document, tmp_path):
    settings = (
        {"dtype": "bf16", **CUT},
        {"dtype": "fp16", **CUT},
        FULL | CUT | {"dtype": "bf16", "optimizer": "adamw-8bit"},
        CUT | {"optimizer": "lion-8bit", "lora": {"rank": 16}},
    )
    cases = [(sft_document(**each), str(tmp_path)) for each in settings]
    # every rank draws noise of its own
    cases.append((sft_document(train={"neftune_alpha": 0.5}, **CUT), str(tmp_path)))
    found = both(sft_curve, cases, 10)
    for each, (alone, (first, second)) in zip((*settings, "neftune"), found, strict=True):
        assert first == second, each
        losses = torch.tensor(first[::2]) - torch.tensor(alone[::2])
        assert losses.abs().max() < 0.1, (each, first[::2], alone[::2])


def test_gradients_of_grpo(grpo_document, tmp_path):
    by_step = {"scale_rewards": "batch"}
    settings = (
        ({}, FULL | CUT),
        ({}, CUT | {"lora": {"rank": 4, "init": "pissa"}}),  # both factors have a gradient at once
        ({"loss": by_step}, CUT | {"method": "qlora"}),
        (
            {"loss": by_step | {"type": "grpo", "mask_truncated": True}, "seed": 1},
            FULL | {"num_generations": 2},
        ),
    )
    cases = [(grpo_document(train=train, **recipe), str(tmp_path)) for train, recipe in settings]
    shares = []
    for each, (alone, ranks) in zip(settings, both(grpo_gradients, cases), strict=True):
        for loss, gradients, _ in ranks:
            assert loss == pytest.approx(alone[0], rel=1e-5, abs=1e-7), each
            assert apart(alone[1], gradients) < 1e-6, each
        assert any(gradient.any() for gradient in alone[1].values()), "it learns"
        shares.append(alone[2])
    assert any(flat for flat, _ in shares), "no group without an advantage: the case is not tested"
    assert any(0 < cut < 1 for _, cut in shares), "no completion is cut beside whole ones"


def test_grpo_learns_the_same(grpo_document, tmp_path):
    settings = (
        ({}, CUT),
        ({"loss": {"scale_rewards": "batch", "mask_truncated": True}, "lr": 1e-3}, FULL),
        ({"updates_per_rollout": 2, "loss": {"type": "dapo"}}, CUT | {"beta": 0.1}),
        ({}, CUT | {"method": "qlora"}),
    )
    cases = [(grpo_document(train=train, **recipe), str(tmp_path)) for train, recipe in settings]
    flat, cut = 0, []
    for each, (alone, ranks) in zip(settings, both(grpo_run, cases, 3), strict=True):
        # steps of Adam by gradients near 0 make more of their last bits
        near = 3e-5 if each[1].get("method") == "qlora" else 1e-6
        for metrics, weights in ranks:
            assert apart(alone[1], weights) < near, each
            for one, other in zip(alone[0], metrics, strict=True):
                assert one.keys() == other.keys()
                for name, value in one.items():  # what rank 0 logs is of all of them
                    if isinstance(value, float) and not name.endswith(OF_THE_MACHINE):
                        assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
                flat += one["frac_reward_zero_std"] > 0
                cut.append(one["completions/truncated_frac"])
        assert any(one["grad_norm"] > 0 for one in alone[0]), "it learnt"
    assert flat, "no group without an advantage: the case is not tested"
    assert any(0 < share < 1 for share in cut), "no completion is cut beside whole ones"


def test_an_evaluation_is_shared_and_says_the_same(sft_document, grpo_document, tmp_path):
    held_out = tmp_path / "held.jsonl"
    rows = [{"prompt": f"{a} - {b} =", "completion": f" {a - b}\n" * (1 + a)} for a, b in PAIRS]
    held_out.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    told = {"validation": {"name": str(held_out)}}
    sampled = {"sampling": {"temperature": 1.0}, "generations": 2}
    task = {"name": "arithmetic", "options": {"digits": 1, "size": 7, "seed": 5}}
    cases = [
        sft_document(train=told, **CUT),
        grpo_document(train={"validation": task, "evaluation": sampled}, **CUT),
        grpo_document(
            train={"validation": task | {"options": {"size": 1}}, "evaluation": sampled}, **CUT
        ),
    ]
    found = both(evaluation, [(each, str(tmp_path)) for each in cases])
    for (alone, _), ranks in found:
        for figures, _ in ranks:
            assert figures == pytest.approx(alone, rel=1e-6)
    asked = [[own for _, own in ranks] for _, ranks in found[1:]]
    assert asked == [[[4], [3]], [[1], [1]]], "what is too little to share each rank has all of"


@pytest.mark.slow
def test_the_curve_of_grpo(grpo_document, tmp_path):
    settings = (CUT, {"sharding": "ddp"}, FULL | CUT, CUT | {"method": "qlora"})
    # all weights are trained at the rate of all weights
    cases = [
        (grpo_document(train={"lr": 1e-3} if "method" in each else {}, **each), str(tmp_path))
        for each in settings
    ]
    for each, (alone, ranks) in zip(settings, both(grpo_run, cases, 20), strict=True):
        for metrics, weights in ranks:
            distance = apart(alone[1], weights)
            print(f"{each}: weights {distance:.1e} apart after 20 steps")
            assert distance < 1e-5, each
            for name in ("reward", "loss"):
                one, several = [[step[name] for step in each] for each in (alone[0], metrics)]
                assert several == pytest.approx(one, abs=1e-5), name


@pytest.mark.slow
def test_gradients_on_four_ranks(sft_document, tmp_path):
    """Groups of two with a copy of each, and layers that stay whole, or half, between the passes."""
    groups = {"parallel": {"data_shard": 2, "data_replicate": 2}}
    settings = (
        groups,
        groups | FULL,
        {"reshard_after_forward": False},
        {"reshard_after_forward": 2} | FULL,
        {"lora": {"rank": 4, "dora": True}},
        {"lora": {"rank": 4, "modules_to_save": ["embed_tokens"]}},
    )
    alone = [
        sft_gradients(
            Ranks.alone(),
            sft_document(**{k: v for k, v in each.items() if k in ("method", "lora")}),
            str(tmp_path),
        )
        for each in settings
    ]
    cases = [(sft_document(**each | CUT), str(tmp_path)) for each in settings]
    for rank in on_ranks(4, every, sft_gradients, cases):
        for each, (loss, gradients), (expected, whole) in zip(settings, rank, alone, strict=True):
            assert loss == pytest.approx(expected, rel=1e-6), each
            assert apart(whole, gradients) < 1e-6, each
