"""Token-budget micro-batches: nothing lost, nothing over the budget, and one gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from planner.errors import UsageError
from trainer.batching import Layout, ScoredSequence, collate, micro_batches
from trainer.logprob_head import logprob_head
from trainer.losses import LossSettings, loss_normaliser, policy_loss


@given(
    lengths=st.lists(st.integers(1, 50), max_size=40),
    budget=st.integers(50, 200),
    layout=st.sampled_from(list(Layout)),
    limit=st.one_of(st.none(), st.integers(1, 5)),
)
@settings(max_examples=150, deadline=None)
def test_every_sequence_once_and_within_the_budget(lengths, budget, layout, limit):
    batches = micro_batches(
        lengths, budget_tokens=budget, layout=layout, max_sequences=limit, row_tokens=50
    )
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        chosen = [
            ScoredSequence(token_ids=(1,) * length, scored=(False,) * length) for length in lengths
        ]
        assert collate(chosen, batch, layout=layout, row_tokens=50).num_tokens <= budget
        assert limit is None or len(batch) <= limit
    if batches and layout is not Layout.ROWS:
        assert max(lengths) in [lengths[index] for index in batches[0]], "the longest runs first"
    if layout is Layout.PACKED and limit is None and lengths:
        fewest = -(-sum(lengths) // budget)
        assert len(batches) <= 11 / 9 * fewest + 2


def test_packing_wastes_nothing_where_padding_would():
    lengths = [100, 10, 10, 10, 70, 30, 60, 40, 90, 80]
    packed = micro_batches(lengths, budget_tokens=100)
    assert len(packed) == 5, "500 tokens fit in 5 x 100 exactly"
    assert len(micro_batches(lengths, budget_tokens=100, layout=Layout.SORTED)) > 5


def test_a_sequence_over_the_budget_and_an_empty_one_are_refused():
    with pytest.raises(UsageError, match="101 tokens is longer than the budget of 100"):
        micro_batches([5, 101], budget_tokens=100)
    with pytest.raises(UsageError, match="empty"):
        micro_batches([5, 0], budget_tokens=100)


def sequences(lengths=((4, 7), (2, 3), (6, 1), (3, 9), (5, 5)), vocab=61):
    """Return sequences of (prompt, completion) lengths with the completion scored."""
    generator = torch.Generator().manual_seed(3)
    return [
        ScoredSequence(
            token_ids=tuple(
                torch.randint(1, vocab, (prompt + completion,), generator=generator).tolist()
            ),
            scored=(False,) * prompt + (True,) * completion,
        )
        for prompt, completion in lengths
    ]


@pytest.mark.parametrize("layout", list(Layout))
def test_rows_point_at_the_state_before_each_scored_token(layout):
    batch = collate(sequences(), [3, 1], layout=layout)
    flat = batch.input_ids.flatten()
    assert torch.equal(flat[batch.rows + 1], batch.targets)
    assert batch.sequence_ids.tolist() == [0] * 9 + [1] * 3
    assert batch.position_ids.flatten()[batch.rows].tolist() == [*range(2, 11), *range(1, 4)]
    assert batch.cu_seqlens.tolist() == [0, 12, 17]
    assert batch.max_length == 12
    assert batch.num_tokens == (17 if layout is Layout.PACKED else 24)
    moved = batch.to(torch.device("cpu"))
    assert moved.indices == batch.indices
    assert torch.equal(moved.targets, batch.targets)


def test_scoring_the_first_token_is_refused():
    bad = ScoredSequence(token_ids=(1, 2), scored=(True, True))
    with pytest.raises(ValueError, match="first False"):
        collate([bad], [0], layout=Layout.PACKED)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=61,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).double()


def gradient(model, batches, *, loss_type, layout):
    """Return (loss, gradients) of one optimizer step over the given micro-batches."""
    samples = sequences()
    advantages = torch.tensor([0.5, -1.0, 0.7, -0.4, 1.1], dtype=torch.float64)
    chosen = LossSettings(loss_type=loss_type, max_completion_length=9)
    tokens = sum(sum(sample.scored) for sample in samples)
    model.zero_grad()
    total = 0.0
    for indices in batches:
        batch = collate(samples, indices, layout=layout)
        hidden = model.model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.attention_mask,
            use_cache=False,
        ).last_hidden_state
        logp = logprob_head(
            hidden.flatten(0, 1)[batch.rows], model.lm_head.weight, batch.targets
        ).logp
        loss, _ = policy_loss(
            logp,
            advantages=advantages[list(batch.indices)],
            sequence_ids=batch.sequence_ids,
            old_logp=logp.detach() - 0.1,
            normaliser=loss_normaliser(chosen, num_sequences=len(samples), num_tokens=tokens),
            settings=chosen,
        )
        loss.backward()
        total += loss.item()
    return total, [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "gspo", "dr_grpo", "cispo"])
def test_any_budget_and_layout_gives_the_gradient_of_one_big_batch(model, loss_type):
    """The big batch: all five sequences, padded, one forward pass."""
    whole = gradient(model, [range(5)], loss_type=loss_type, layout=Layout.SORTED)
    lengths = [len(sample.token_ids) for sample in sequences()]
    for layout in Layout:
        for budget in (12, 20, 60):
            batches = micro_batches(lengths, budget_tokens=budget, layout=layout)
            found = gradient(model, batches, loss_type=loss_type, layout=layout)
            assert found[0] == pytest.approx(whole[0], rel=1e-9)
            torch.testing.assert_close(found[1], whole[1], rtol=1e-7, atol=1e-10)
