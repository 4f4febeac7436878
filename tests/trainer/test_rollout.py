import dataclasses

import pytest
import torch

from planner.run.recipe import Recipe
from trainer.batching import Layout, collate
from trainer.config import LossSection, SamplingSection
from trainer.data import Prompt
from trainer.engines import make_engine
from trainer.engines.protocol import Completion, SamplingSettings
from trainer.model import load_policy
from trainer.parallel.ranks import ALONE, Ranks
from trainer.rollout import (
    Rollout,
    importance_weights,
    sample,
    sampler_log_probs,
    sampling_settings,
    split,
)
from trainer.sampling import draw, shape_logits, stop_tokens, uniforms
from trainer.scoring import hidden_rows, log_probs
from trainer.shared_plan import Sharing
from trainer.shared_prefix import RowCost

TEXTS = ["1 + 2 =", "abc", "7 * 8 = 56\n3 * 3 ="]
SHAPES = [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.6), (0.8, 7, 0.8)]


@pytest.fixture(scope="module")
def policy(small_model):
    recipe = Recipe(task="grpo", dtype="fp32", lora={"rank": 4})
    policy = load_policy(str(small_model), recipe=recipe)
    torch.manual_seed(0)
    with torch.no_grad():
        for _, parameter in policy.trainable():
            parameter.normal_(std=0.2)
    return policy


def prompts_of(policy):
    return [
        Prompt(
            token_ids=tuple(policy.tokenizer(text)["input_ids"]),
            text=text,
            sample={},
            conversational=False,
        )
        for text in TEXTS
    ]


def roll(
    policy,
    *,
    shape=(1.0, 0, 1.0),
    rows=None,
    stop=(),
    new=8,
    generations=4,
    seed=0,
    prefill=None,
    ranks=ALONE,
):
    temperature, top_k, top_p = shape
    engine = {"max_num_seqs": rows, "max_num_batched_tokens": prefill}
    recipe = Recipe(task="grpo", engine=engine, num_generations=generations)
    settings = dataclasses.replace(
        sampling_settings(
            SamplingSection(temperature=temperature, top_k=top_k, top_p=top_p, stop=stop),
            policy.tokenizer,
            num_generations=generations,
            max_new_tokens=new,
        ),
        seed=seed,
    )
    engine = make_engine(policy, recipe=recipe)
    prompts = prompts_of(policy)
    return sample(engine, prompts, settings, tokenizer=policy.tokenizer, ranks=ranks)


def score_all(
    policy, rollout, *, budget=10_000, share=False, layout=Layout.SORTED, shape=(1.0, 0, 1.0)
):
    """Return completion -> log-probabilities by the scorer; `share` None: where it is cheaper."""
    temperature, top_k, top_p = shape
    chosen = range(len(rollout.completions))
    sharing = Sharing(cost=RowCost(token=1, pair=0.01), always=bool(share), budget_tokens=10_000)
    batches = list(
        split(
            rollout,
            chosen,
            policy=policy,
            budget_tokens=budget,
            layout=layout,
            sharing=None if share is False else sharing,
        )
    )
    scored = {}
    for batch in batches:
        logp = log_probs(
            policy,
            batch,
            hidden_rows(policy, batch),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
        ).logp
        for place, index in enumerate(batch.indices):
            scored[index] = logp[batch.sequence_ids == place]
    return scored, batches


def test_shaped_logits_are_those_of_the_definition():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    assert shape_logits(logits, temperature=1, top_k=2, top_p=1).isinf().tolist() == [[0, 0, 1, 1]]
    # p = 0.64, 0.24, 0.09, 0.03: 0.7 is reached by the second
    assert shape_logits(logits, temperature=1, top_k=0, top_p=0.7).isinf().tolist() == [
        [0, 0, 1, 1]
    ]
    assert shape_logits(logits, temperature=1, top_k=0, top_p=0.6).isinf().tolist() == [
        [0, 1, 1, 1]
    ]
    cold = shape_logits(logits, temperature=0.5, top_k=0, top_p=1)
    torch.testing.assert_close(cold, logits * 2)
    kept = shape_logits(logits, temperature=1, top_k=1, top_p=1, keep=torch.tensor([3]))
    assert kept.isinf().tolist() == [[0, 1, 1, 0]]


def test_draws_follow_the_distribution():
    never = float("-inf")
    logits = torch.tensor([never, 2.0, never, 1.0, 0.0, never]).log_softmax(-1).expand(20_000, 6)
    token, logp = draw(logits, uniforms([0], len(logits))[0])
    frequency = token.bincount(minlength=6) / len(token)
    torch.testing.assert_close(frequency, logits[0].exp(), atol=0.01, rtol=0)
    torch.testing.assert_close(logp, logits[0][token])
    ends, _ = draw(logits[:2], torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert ends.tolist() == [1, 4]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sampler_and_scorer_agree(policy, shape):
    rollout = roll(policy, shape=shape)
    scored, _ = score_all(policy, rollout, shape=shape)
    for index, completion in enumerate(rollout.completions):
        torch.testing.assert_close(
            scored[index], torch.tensor(completion.logprobs), rtol=1e-4, atol=1e-4
        )


def test_waves_and_dropped_rows_change_nothing(policy):
    """A row's distribution must not depend on its neighbours, the padding or the wave."""
    stop = ("a", "e", "3", " ", "Q", "7", "x")
    together = roll(policy, stop=stop, new=24)
    ends = {completion.finished for completion in together.completions}
    assert ends == {True, False} or ends == {True}
    scored, _ = score_all(policy, together)
    for index, completion in enumerate(together.completions):
        torch.testing.assert_close(
            scored[index], torch.tensor(completion.logprobs), rtol=1e-4, atol=1e-4
        )
    for rows in (1, 3):
        alone = roll(policy, stop=stop, new=24, rows=rows)
        assert [c.token_ids for c in alone.completions] == [
            c.token_ids for c in together.completions
        ]


def test_ranks_that_share_a_step_draw_what_one_would(policy):
    whole = roll(policy, new=24)
    for rank in range(2):
        part = roll(policy, new=24, ranks=Ranks(rank=rank, size=2))
        assert [c.token_ids for c in part.completions] == [
            whole.completions[place].token_ids for place in part.places
        ]
        assert part.places == ((*range(4), *range(8, 12)), tuple(range(4, 8)))[rank]


def test_prompts_prefilled_in_chunks_give_the_same_completions(policy):
    whole = roll(policy, rows=12)
    chunked = roll(policy, rows=12, prefill=15)
    assert [c.token_ids for c in whole.completions] == [c.token_ids for c in chunked.completions]
    for one, two in zip(whole.completions, chunked.completions, strict=True):
        assert one.logprobs == pytest.approx(two.logprobs, abs=1e-4)


def test_completions_come_grouped_by_prompt_and_end_where_they_should(policy):
    rollout = roll(policy, stop=("e", "a"), new=16)
    assert [c.prompt_index for c in rollout.completions] == [0] * 4 + [1] * 4 + [2] * 4
    ends = {*stop_tokens(policy.tokenizer, ("e", "a")), policy.tokenizer.eos_token_id}
    for completion in rollout.completions:
        assert completion.finished == (completion.token_ids[-1] in ends)
        assert not ends & set(completion.token_ids[:-1])
        assert len(completion.token_ids) == len(completion.logprobs)
        assert completion.finished or len(completion.token_ids) == 16
    assert {completion.finished for completion in rollout.completions} == {True, False}


def test_the_seed_decides_the_completions(policy):
    first, again, other = roll(policy, seed=1), roll(policy, seed=1), roll(policy, seed=2)
    assert first.completions == again.completions
    assert first.completions != other.completions


def test_generation_equals_transformers_own(policy):
    """Greedy, so that both must agree token by token, left padding included."""
    greedy = roll(policy, shape=(1e-4, 0, 1.0), generations=2, new=10)
    texts = [prompt.token_ids for prompt in prompts_of(policy)]
    for index, ids in enumerate(texts):
        expected = policy.base.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=10, pad_token_id=0
        )[0, len(ids) :]
        assert greedy.completions[2 * index].token_ids == tuple(expected.tolist())


@pytest.mark.parametrize("budget", [10_000, 60, 40], ids=["one", "several", "single"])
@pytest.mark.parametrize(
    ("share", "layout"),
    [(True, Layout.SORTED), (None, Layout.SORTED), (False, Layout.PACKED)],
    ids=["shared", "auto", "packed"],
)
def test_every_layout_and_split_scores_alike(policy, budget, share, layout):
    rollout = roll(policy, stop=("e", "a", "3"), new=12)
    plain, _ = score_all(policy, rollout)
    other, batches = score_all(policy, rollout, budget=budget, share=share, layout=layout)
    assert sorted(index for batch in batches for index in batch.indices) == list(range(12))
    assert all(batch.num_tokens <= budget for batch in batches)
    for index, logp in plain.items():
        torch.testing.assert_close(other[index], logp, rtol=1e-4, atol=1e-4)


def test_a_shared_prompt_gives_the_same_gradient_with_fewer_tokens(policy):
    rollout = roll(policy, new=6)
    gradients, tokens = [], []
    for share in (False, True):
        scored, batches = score_all(policy, rollout, share=share)
        sum((logp * (index + 1)).sum() for index, logp in scored.items()).backward()
        gradients.append([parameter.grad.clone() for _, parameter in policy.trainable()])
        tokens.append(sum(batch.num_tokens for batch in batches))
        policy.model.zero_grad()
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert tokens[1] < tokens[0]


@pytest.mark.parametrize(
    ("level", "mode", "expected"),
    [
        ("token", "truncate", [1.0, 2.0, 3.0, 0.5]),
        ("token", "mask", [1.0, 2.0, 0.0, 0.5]),
        ("sequence", "truncate", [2.0, 2.0, 2.0, 2.0]),
        ("sequence", "mask", [2.0, 2.0, 2.0, 2.0]),
    ],
)
def test_importance_weights(level, mode, expected):
    sampler = torch.zeros(4)
    logp = torch.tensor([1.0, 2.0, 4.0, 0.5]).log()
    section = LossSection(is_correction=level, is_mode=mode, is_cap=3.0)
    weights = importance_weights(logp, sampler, torch.tensor([0, 0, 1, 1]), section=section)
    torch.testing.assert_close(weights, torch.tensor(expected))


def test_a_sequence_over_the_cap_is_truncated_or_dropped_whole():
    logp, sampler = torch.tensor([4.0, 2.0, 1.0]).log(), torch.zeros(3)
    owners = torch.tensor([0, 0, 1])
    truncated = LossSection(is_correction="sequence", is_mode="truncate", is_cap=3.0)
    masked = LossSection(is_correction="sequence", is_mode="mask", is_cap=3.0)
    assert importance_weights(logp, sampler, owners, section=truncated).tolist() == [3, 3, 1]
    assert importance_weights(logp, sampler, owners, section=masked).tolist() == [0, 0, 1]
    assert (
        importance_weights(logp, sampler, owners, section=LossSection(is_correction="none")) is None
    )


def test_an_unknown_sampler_means_no_correction(policy):
    rollout = roll(policy)
    batch = collate([rollout.sequence(0)], [0], layout=Layout.SORTED)
    known = sampler_log_probs(rollout, batch)
    torch.testing.assert_close(known, torch.tensor(rollout.completions[0].logprobs))
    blind = [dataclasses.replace(completion, logprobs=None) for completion in rollout.completions]
    assert sampler_log_probs(dataclasses.replace(rollout, completions=blind), batch) is None


def test_empty_and_cut_completions_do_not_teach(policy):
    done = Completion(prompt_index=0, token_ids=(3, 2), logprobs=None, finished=True)
    cut = dataclasses.replace(done, finished=False)
    empty = dataclasses.replace(done, token_ids=())
    rollout = Rollout(
        prompts=prompts_of(policy)[:1] * 3,
        completions=[done, cut, empty],
        texts=["", "", ""],
        num_generations=3,
    )
    assert rollout.usable(mask_truncated=False) == [True, True, False]
    assert rollout.usable(mask_truncated=True) == [True, False, False]


def test_the_engine_holds_no_cache_between_rollouts(policy):
    engine = make_engine(policy, recipe=Recipe(task="grpo", num_generations=4))
    engine.generate(
        [prompt.token_ids for prompt in prompts_of(policy)],
        SamplingSettings(num_generations=4, max_new_tokens=4),
    )
    held = engine.memory()
    # 2 layers x (K, V) x 2 heads x 16 x 4 B a token; 4 rows of up to 18 + 3 tokens at a time
    per_token = 2 * 2 * 2 * 16 * 4
    assert held["kv_cache"] == 4 * (len(TEXTS[2]) + 3) * per_token
    assert held["weights"] == 0
