"""The tiled MLP: the same numbers, and intermediates of one tile only."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from planner.errors import UsageError
from planner.run.recipe import Checkpointing
from profiler.storages import StorageTracker
from trainer.checkpointing import checkpoint_layers, decoder_layers
from trainer.tiled_mlp import tile_layers, tile_mlps, tile_norms

WIDTH, INNER = 16, 256


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=31,
    )
    return LlamaForCausalLM(config)


def step(model, tokens=24):
    ids = torch.randint(0, 31, (2, tokens), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    logits.square().mean().backward()
    return logits.detach(), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("tile_tokens", [1, 7, 16, 47, 48, 1000])
@pytest.mark.parametrize("checkpointing", [Checkpointing.NONE, Checkpointing.FULL])
def test_same_logits_and_gradients(model, tile_tokens, checkpointing):
    logits, grads = step(model)
    assert tile_mlps(model, tile_tokens=tile_tokens) == 3
    checkpoint_layers(decoder_layers(model), mode=checkpointing)
    tiled_logits, tiled_grads = step(model)
    torch.testing.assert_close(tiled_logits, logits)
    torch.testing.assert_close(tiled_grads, grads)


@pytest.mark.parametrize("checkpointing", [Checkpointing.NONE, Checkpointing.FULL])
def test_norms_in_tiles_give_the_same(model, checkpointing):
    logits, grads = step(model)
    parents = [*decoder_layers(model), model.get_decoder()]
    assert tile_norms(parents, tile_tokens=7) == 2 * 3 + 1
    checkpoint_layers(decoder_layers(model), mode=checkpointing)
    tiled_logits, tiled_grads = step(model)
    torch.testing.assert_close(tiled_logits, logits)
    torch.testing.assert_close(tiled_grads, grads)


def test_layers_without_an_mlp_have_their_norms_tiled(model):
    for layer in model.model.layers:
        layer.shared = layer.mlp
        del layer.mlp
    with pytest.raises(UsageError, match="no module named"):
        tile_layers(model, tile_tokens=7)
    before = model.model.norm.forward
    tile_layers(model, tile_tokens=7, must=False)
    assert model.model.norm.forward != before


def peak_of_inner(model):
    """Return the most bytes alive in tensors whose last size is the MLP's width."""
    with StorageTracker() as tracker:
        step(model, tokens=128)
    live = peak = 0
    for event in tracker.events:
        if event.block.shape and event.block.shape[-1] == INNER and len(event.block.shape) > 1:
            live += event.block.bytes if event.alloc else -event.block.bytes
            peak = max(peak, live)
    return peak


def test_intermediates_of_one_tile_are_alive(model):
    checkpoint_layers(decoder_layers(model), mode=Checkpointing.FULL)
    whole = peak_of_inner(model)
    tile_mlps(model, tile_tokens=32)  # of 256 tokens: an eighth
    tiled = peak_of_inner(model)
    weights = 2 * WIDTH * INNER * 4 * 3  # gradients of down_proj [H, I] have that last size too
    assert whole > 4 * 256 * INNER * 4
    assert tiled < whole / 4 + weights


@pytest.mark.parametrize("checkpointing", [Checkpointing.NONE, Checkpointing.FULL])
def test_every_token_goes_through_the_mlp_twice(model, checkpointing):
    rows = []
    model.model.layers[1].mlp.up_proj.register_forward_hook(
        lambda _module, inputs, _output: rows.append(inputs[0].shape[1])
    )
    tile_mlps(model, tile_tokens=20)
    checkpoint_layers(decoder_layers(model), mode=checkpointing)
    step(model)
    assert rows == [20, 20, 8] * 2


def test_frozen_input_and_no_gradients(model):
    logits = model(input_ids=torch.arange(24)[None]).logits.detach()
    tile_mlps(model, tile_tokens=5)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=torch.arange(24)[None]).logits, logits)
    # only the first MLP learns: nothing before it has a gradient
    model.requires_grad_(False)
    weight = model.model.layers[0].mlp.up_proj.weight.requires_grad_()
    model(input_ids=torch.arange(24)[None]).logits.square().mean().backward()
    whole = LlamaForCausalLM(model.config)
    whole.load_state_dict(model.state_dict())
    whole(input_ids=torch.arange(24)[None]).logits.square().mean().backward()
    torch.testing.assert_close(weight.grad, whole.model.layers[0].mlp.up_proj.weight.grad)


def test_a_tiles_second_forward_drops_what_its_first_dropped(model):
    """The gradient of what was computed: the same tiles by plain autograd, from the same random state."""
    mlp = model.model.layers[0].mlp
    mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.5))
    model.train()
    plain = mlp.forward
    x = torch.randn(1, 17, WIDTH, requires_grad=True)
    torch.manual_seed(7)
    expected = torch.cat([plain(tile) for tile in x.split(5, dim=1)], dim=1)
    expected.square().sum().backward()
    wanted, x.grad = x.grad, None
    tile_mlps(model, tile_tokens=5)
    torch.manual_seed(7)
    found = mlp(x)
    torch.manual_seed(8)  # what is drawn in between must not matter
    found.square().sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(x.grad, wanted)


def test_wrong_settings_are_named(model):
    with pytest.raises(UsageError, match="tile_tokens"):
        tile_mlps(model, tile_tokens=0)
    with pytest.raises(UsageError, match="Linear"):
        tile_mlps(torch.nn.Linear(2, 2), tile_tokens=4)
