"""Packed rows: the gradient of samples by themselves, full rows, an order that resumes."""

import json
from dataclasses import replace

import pytest
import torch

from planner.errors import UnsupportedError
from trainer.apart import check_apart
from trainer.batching import Layout, ScoredSequence, collate
from trainer.model import load_policy
from trainer.packing import PackedOrder, block_mask
from trainer.scoring import hidden_rows, log_probs

LENGTHS = (9, 4, 6, 12, 3, 5, 2)


def recipe_of(**fields):
    from planner.run.runfile import make_recipe

    return make_recipe(task="sft", method="full", dtype="fp32", context=16, **fields)


def sequences(vocab=80):
    generator = torch.Generator().manual_seed(1)
    return [
        ScoredSequence(
            token_ids=tuple(torch.randint(3, vocab, (length,), generator=generator).tolist()),
            scored=(False,) + (True,) * (length - 1),
        )
        for length in LENGTHS
    ]


def gradients(policy, layout, picks, **shape):
    policy.model.zero_grad()
    for pick in picks:
        batch = collate(sequences(), pick, layout=layout, **shape)
        (-log_probs(policy, batch, hidden_rows(policy, batch)).logp.sum()).backward()
    return {name: parameter.grad.clone() for name, parameter in policy.trainable()}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", [Layout.ROWS, Layout.PACKED])
def test_packed_samples_have_the_gradient_that_they_have_alone(small_model, attention, layout):
    policy = load_policy(str(small_model), recipe=recipe_of(attention=attention))
    alone = gradients(policy, Layout.SORTED, [[index] for index in range(len(LENGTHS))])
    picks = [[3, 1, 0, 2], [5, 4, 6]]
    together = gradients(policy, layout, picks, row_tokens=16)
    for name, expected in alone.items():
        torch.testing.assert_close(together[name], expected, rtol=1e-4, atol=1e-5, msg=name)


def test_without_the_mask_they_would_not(small_model):
    policy = load_policy(str(small_model), recipe=recipe_of())
    batch = collate(sequences(), [3, 1], layout=Layout.PACKED)
    alone = [
        hidden_rows(policy, collate(sequences(), [index], layout=Layout.SORTED)) for index in (3, 1)
    ]
    torch.testing.assert_close(hidden_rows(policy, batch), torch.cat(alone), rtol=1e-4, atol=1e-4)
    mixed = replace(batch, position_ids=torch.arange(16)[None])
    assert (hidden_rows(policy, mixed) - torch.cat(alone)).abs().max() > 0.1


def test_rows_are_filled_and_padded_at_their_end():
    batch = collate(sequences(), [3, 1, 0, 2], layout=Layout.ROWS, row_tokens=16)
    assert batch.position_ids.tolist() == [
        [*range(12), *range(4)],
        [*range(9), *range(6), 0],
    ]
    assert batch.attention_mask is None


def test_the_mask_is_block_diagonal_and_causal():
    mask = block_mask(torch.tensor([[0, 1, 2, 0, 1]]), dtype=torch.float32)
    assert (mask[0, 0] == 0).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]


def test_rows_are_those_of_trls_own_packing():
    """Best fit, longest first: the row count of trl.pack_dataset on the same lengths."""
    trl = pytest.importorskip("trl.data_utils")
    import datasets

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 60, (200,), generator=generator).tolist()
    rows = datasets.Dataset.from_dict({"input_ids": [[1] * length for length in lengths]})
    theirs = trl.pack_dataset(rows, 64, "bfd")
    ours = PackedOrder(size=200, seed=0, shuffle=False, lengths=lengths, row_tokens=64)
    assert ours.rows == len(theirs)
    taken = [ours.take(1) for _ in range(ours.rows)]
    assert sorted(index for row in taken for index in row) == list(range(200))
    assert max(sum(lengths[index] for index in row) for row in taken) <= 64
    assert ours.epoch == 1


def test_an_order_of_rows_goes_on_where_it_was():
    lengths = [5, 9, 3, 7, 8, 2, 6]
    make = {"size": 7, "lengths": lengths, "row_tokens": 10}
    order = PackedOrder(seed=3, **make)
    order.take(2)
    state = json.loads(json.dumps(order.state()))
    rest = order.take(9)
    resumed = PackedOrder(seed=9, **make)
    resumed.restore(state)
    assert resumed.take(9) == rest
    with pytest.raises(UnsupportedError, match="rows of 12 tokens"):
        PackedOrder(seed=3, **(make | {"row_tokens": 12})).restore(state)


def test_a_model_that_mixes_samples_is_found_out(small_model):
    policy = load_policy(str(small_model), recipe=recipe_of())
    check_apart(policy, asked="recipe.packing")
    shift = policy.base.model.layers[0].register_forward_hook(
        lambda _module, _inputs, output: output.cumsum(1)
    )
    with pytest.raises(UnsupportedError, match=r"recipe\.packing: true, but this model computes"):
        check_apart(policy, asked="recipe.packing")
    shift.remove()


def test_layers_with_a_state_are_refused_before_anything_loads(document, tmp_path):
    from planner.models.hub import find_model
    from planner.run.recipe import Recipe
    from trainer.config import TrainSection
    from trainer.preflight import choose_layout

    spec = find_model("ai21labs/Jamba-v0.1")
    train = TrainSection.model_construct(padding_free=None)
    with pytest.raises(UnsupportedError, match=r"recipe\.packing: true, but jamba's full, mamba"):
        choose_layout(spec, Recipe(packing=True), train)
    with pytest.raises(UnsupportedError, match=r"train\.padding_free: true"):
        choose_layout(spec, Recipe(), TrainSection.model_construct(padding_free=True))
    assert choose_layout(spec, Recipe(attention="flash"), train) == (Layout.SORTED, "")
