"""Checkpointing: same gradients, layers run again as often as said, inputs travel as counted."""

import gc

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from planner.errors import UnsupportedError, UsageError
from planner.run.recipe import Checkpointing
from profiler.storages import StorageTracker
from trainer.checkpointing import checkpoint_layers, decoder_layers
from trainer.host_store import DirectCopies, HostStore

LAYERS, WIDTH = 6, 32


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
        attention_dropout=0.2,  # random numbers must repeat in the recompute
    )
    return LlamaForCausalLM(config).train()


def gradients(model, tokens=11):
    ids = torch.randint(0, 97, (2, tokens), generator=torch.Generator().manual_seed(tokens))
    model.zero_grad()
    torch.manual_seed(5)
    loss = model(input_ids=ids, use_cache=False).logits.square().mean()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def same(left, right):
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize(
    ("mode", "every", "recomputed"),
    [
        (Checkpointing.NONE, 1, 0),
        (Checkpointing.FULL, 1, LAYERS),
        (Checkpointing.EVERY_K, 1, LAYERS),
        (Checkpointing.EVERY_K, 2, LAYERS),
        (Checkpointing.EVERY_K, 4, LAYERS),
        (Checkpointing.EVERY_K, 100, LAYERS),
        (Checkpointing.OFFLOAD, 1, LAYERS),
    ],
)
def test_gradients_are_bit_for_bit_the_same(model, mode, every, recomputed):
    expected = gradients(model)
    wrapped = checkpoint_layers(decoder_layers(model), mode=mode, every=every)
    assert same(gradients(model), expected)
    assert wrapped.recomputed == recomputed
    if mode is Checkpointing.EVERY_K:
        assert wrapped.rerun == sum(index % every != 0 for index in range(LAYERS))
    wrapped.remove()
    assert same(gradients(model), expected)
    assert wrapped.recomputed == recomputed


@pytest.mark.parametrize("keep_last", [0, 1, 3, LAYERS])
def test_offload_moves_each_input_once_each_way(model, keep_last):
    """The slab logic with real copies, on a CPU: gradients, counts and bytes."""
    expected = gradients(model)
    store = HostStore(LAYERS, keep_last=keep_last, copies=DirectCopies())
    checkpoint_layers(decoder_layers(model), mode=Checkpointing.OFFLOAD, store=store)
    steps = 3
    for _ in range(steps):
        assert same(gradients(model), expected)
    away = LAYERS - keep_last
    input_bytes = 2 * 11 * WIDTH * 4
    counts = store.counts
    assert counts.offloaded == steps * away
    assert counts.kept == steps * keep_last
    # with keep_last=0 the last layer's input is still here when its backward begins
    fetched = steps * (away if keep_last else away - 1)
    assert counts.fetched == fetched
    assert counts.out_bytes == counts.offloaded * input_bytes
    assert counts.back_bytes == counts.fetched * input_bytes
    assert counts.slab_bytes == counts.live_bytes_peak == away * input_bytes
    assert counts.staged_peak <= 1


def test_all_but_the_first_fetch_are_prefetched(model):
    store = HostStore(LAYERS, keep_last=1, copies=DirectCopies())
    checkpoint_layers(decoder_layers(model), mode=Checkpointing.OFFLOAD, store=store)
    gradients(model)
    assert store.counts.fetched == LAYERS - 1
    assert store.counts.prefetched == LAYERS - 2


def inputs_alive_after_forward(model, **settings):
    wrapped = checkpoint_layers(decoder_layers(model), **settings)
    ids = torch.randint(0, 97, (2, 64))
    with StorageTracker() as tracker:
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        gc.collect()
        shape = (2, 64, WIDTH)
        alive = sum(block.shape == shape for block in tracker.live_blocks())
    hidden.sum().backward()
    wrapped.remove()
    return alive


def test_only_what_must_stay_is_alive_after_the_forward(model):
    full = inputs_alive_after_forward(model, mode=Checkpointing.FULL)
    store = HostStore(LAYERS, keep_last=1, copies=DirectCopies())
    offload = inputs_alive_after_forward(model, mode=Checkpointing.OFFLOAD, store=store)
    every = inputs_alive_after_forward(model, mode=Checkpointing.EVERY_K, every=3)
    assert full - offload == LAYERS - 1
    assert full - every == LAYERS - 2


def test_on_a_cpu_nothing_is_copied(model):
    wrapped = checkpoint_layers(decoder_layers(model), mode=Checkpointing.OFFLOAD)
    gradients(model)
    assert wrapped.store.counts.kept == LAYERS
    assert wrapped.store.counts.out_bytes == wrapped.store.counts.slab_bytes == 0


def test_the_slab_grows_for_a_longer_batch_and_stays(model):
    expected = {tokens: gradients(model, tokens) for tokens in (5, 20, 9)}
    store = HostStore(LAYERS, keep_last=1, copies=DirectCopies())
    checkpoint_layers(decoder_layers(model), mode=Checkpointing.OFFLOAD, store=store)
    sizes = []
    for tokens, grads in expected.items():
        assert same(gradients(model, tokens), grads)
        sizes.append(store.counts.slab_bytes)
    per_token = 2 * WIDTH * 4 * (LAYERS - 1)
    assert sizes == [5 * per_token, 20 * per_token, 20 * per_token]


def test_two_graphs_at_once_are_kept_apart(model):
    """Two forwards before any backward: what the slab can't hold stays where it is."""
    ids = torch.arange(22).reshape(2, 11)
    losses = []
    expected = []
    for row in range(2):
        model.zero_grad()
        torch.manual_seed(row)
        model(input_ids=ids[row : row + 1], use_cache=False).logits.square().mean().backward()
        expected.append(model.model.layers[0].mlp.up_proj.weight.grad.clone())
    store = HostStore(LAYERS, keep_last=1, copies=DirectCopies())
    checkpoint_layers(decoder_layers(model), mode=Checkpointing.OFFLOAD, store=store)
    for row in range(2):
        torch.manual_seed(row)
        losses.append(model(input_ids=ids[row : row + 1], use_cache=False).logits.square().mean())
    for loss, grad in zip(losses, expected, strict=True):
        model.zero_grad()
        loss.backward()
        assert torch.equal(model.model.layers[0].mlp.up_proj.weight.grad, grad)


def test_a_graph_that_is_dropped_gives_its_places_back(model):
    store = HostStore(LAYERS, keep_last=1, copies=DirectCopies())
    checkpoint_layers(decoder_layers(model), mode=Checkpointing.OFFLOAD, store=store)
    expected = gradients(model)
    for _ in range(3):
        model(input_ids=torch.arange(22).reshape(2, 11), use_cache=False)  # no backward
        gc.collect()
    assert same(gradients(model), expected)
    assert store.counts.live_bytes_peak == store.counts.slab_bytes


def test_frozen_embeddings_do_not_stop_the_gradient(model):
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    trained = model.model.layers[2].self_attn.q_proj.weight.requires_grad_()
    ids = torch.arange(22).reshape(2, 11)

    def gradient():
        model.zero_grad()
        torch.manual_seed(1)
        model(input_ids=ids, use_cache=False).logits.square().mean().backward()
        return trained.grad.clone()

    expected = gradient()
    store = HostStore(LAYERS, keep_last=1, copies=DirectCopies())
    checkpoint_layers(decoder_layers(model), mode=Checkpointing.OFFLOAD, store=store)
    assert torch.equal(gradient(), expected)


def test_generation_is_left_alone(model):
    model.eval()
    ids = torch.arange(5).unsqueeze(0)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    wrapped = checkpoint_layers(decoder_layers(model), mode=Checkpointing.FULL)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)
    assert wrapped.recomputed == 0


def test_a_cache_with_gradients_is_refused(model):
    checkpoint_layers(decoder_layers(model), mode=Checkpointing.FULL)
    with pytest.raises(UnsupportedError, match="KV cache"):
        model(input_ids=torch.arange(5).unsqueeze(0), use_cache=True)


def test_decoder_layers_through_peft(model):
    from peft import LoraConfig, get_peft_model

    layers = decoder_layers(model)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert [id(layer) for layer in decoder_layers(wrapped)] == [id(layer) for layer in layers]
    assert len(layers) == LAYERS


def test_wrong_settings_are_named():
    with pytest.raises(UsageError, match="checkpoint_every"):
        checkpoint_layers([], mode=Checkpointing.EVERY_K, every=0)
    with pytest.raises(UsageError, match="offload_keep_layers"):
        checkpoint_layers([], mode=Checkpointing.OFFLOAD, keep_last=-1)
    with pytest.raises(UnsupportedError, match="Linear"):
        decoder_layers(nn.Linear(2, 2))
