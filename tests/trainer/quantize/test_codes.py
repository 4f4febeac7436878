"""Codes of one weight: what is stored is what is read, and feedback loses less where inputs are related."""

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

from trainer.quantize import bnb, codes

BNB = bnb.BitsAndBytes()


def _weight(rows=96, columns=256, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def _moments(columns=256, seed=1):
    """Inputs that share a few directions, as a layer's do."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(2048, 24, generator=generator) @ torch.randn(
        24, columns, generator=generator
    )
    inputs = mixed + 0.3 * torch.randn(2048, columns, generator=generator)
    return inputs, inputs.t() @ inputs / len(inputs)


@pytest.mark.parametrize("block", [64, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_bitsandbytes_reads_is_what_was_chosen_bit_for_bit(block, dtype):
    weight = _weight()
    _, moments = _moments()
    scales = codes.searched_scales(weight, moments.diagonal(), bnb.book(), block)
    state, read = bnb.nested(scales)
    chosen = codes.fed_back(weight, read, bnb.book(), codes.factor(moments))
    stored = bnb.packed(chosen, state, dtype)
    expected = codes.values(chosen, read, bnb.book()).to(dtype)
    back = BNB.read_back(stored, dtype)
    assert back.dtype == dtype
    assert torch.equal(back, expected)


@pytest.mark.parametrize("block", [64, 32])
def test_plain_codes_are_bitsandbytes_own(block):
    weight = _weight()
    packed, theirs = quantize_4bit(
        weight, blocksize=block, compress_statistics=True, quant_type="nf4"
    )
    scales = codes.plain_scales(weight, bnb.book(), block)
    state, _ = bnb.nested(scales)
    ours = bnb.packed(codes.rounded(weight, scales, bnb.book()), state, torch.float32)
    assert torch.equal(ours["weight"], packed)
    assert torch.equal(ours["weight.absmax"], theirs.absmax)
    assert torch.equal(ours["weight.nested_absmax"], theirs.state2.absmax)
    assert torch.equal(BNB.read_back(ours, torch.float32), dequantize_4bit(packed, theirs))


def test_each_step_loses_less_of_the_output():
    weight = _weight()
    inputs, moments = _moments()
    book, losses = bnb.book(), []

    def lost(chosen, scales):
        error = codes.values(chosen, scales, book) - weight
        return float((inputs @ error.t()).square().mean())

    _, plain = bnb.nested(codes.plain_scales(weight, book, 64))
    losses.append(lost(codes.rounded(weight, plain, book), plain))
    _, searched = bnb.nested(codes.searched_scales(weight, moments.diagonal(), book, 64))
    losses.append(lost(codes.rounded(weight, searched, book), searched))
    fed = codes.fed_back(weight, searched, book, codes.factor(moments))
    losses.append(lost(fed, searched))
    assert losses[1] < 0.95 * losses[0]
    assert losses[2] < 0.3 * losses[1]


def test_unrelated_inputs_of_one_size_leave_nothing_to_feed_back():
    weight = _weight(rows=16, columns=64)
    _, scales = bnb.nested(codes.plain_scales(weight, bnb.book(), 64))
    fed = codes.fed_back(weight, scales, bnb.book(), codes.factor(torch.eye(64)))
    assert torch.equal(fed, codes.rounded(weight, scales, bnb.book()))


def test_two_columns_worked_by_hand():
    """H = [[2, 1], [1, 2]]: the second column takes H12 / H22 = half of the first one's error."""
    book = codes.Book(torch.tensor([-1.0, 0.0, 1.0]), 1.0)
    weight, scales = torch.tensor([[0.6, 0.35]]), torch.tensor([[1.0]])
    moments = torch.tensor([[2.001, 1.0], [1.0, 2.0]])  # the first column is the weightier one
    assert codes.rounded(weight, scales, book).tolist() == [[2, 1]]
    # 0.6 -> 1 is 0.4 too much; 0.35 - 0.4 / 2 = 0.15 stays 0, where 0.35 + 0.2 would have become 1
    assert codes.fed_back(weight, scales, book, codes.factor(moments)).tolist() == [[2, 1]]
    weight = torch.tensor([[0.6, 0.65]])  # alone it becomes 1; 0.65 - 0.2 is nearer to 0
    assert codes.rounded(weight, scales, book).tolist() == [[2, 2]]
    assert codes.fed_back(weight, scales, book, codes.factor(moments)).tolist() == [[2, 1]]


def test_inputs_and_blocks_of_nothing_are_no_error():
    weight, moments = _weight(), _moments()[1]
    weight[3, :64] = 0
    moments[5, :] = moments[:, 5] = 0
    scales = codes.searched_scales(weight, moments.diagonal(), bnb.book(), 64)
    assert scales.isfinite().all()
    assert scales[3, 0] == 0
    fed = codes.fed_back(weight, scales, bnb.book(), codes.factor(moments))
    assert (codes.values(fed, scales, bnb.book())[3, :64] == 0).all()
    assert codes.factor(torch.zeros(64, 64))[1].isfinite().all()
