"""Runs replayed on the simulated allocator, to the byte, by hand.

The toy's tensors (tests/planner/toys.py) are below 1 MiB, so every block is its size rounded up to 512 B and no rest
stays with it. In 16 bit all are multiples of 512 B but the seven norms: 128 B take 512. Weights: 478,080 + 7 x 384.
"""

from dataclasses import replace
from typing import Any

import pytest

from planner.families import model_spec_from_config
from planner.layer.events import (
    LayerEvents,
    forward_events,
    kept_events,
    recomputed_events,
    recomputed_held_events,
    reentrant_events,
)
from planner.layer.program import OpSettings
from planner.layer.tape import Point, envelope
from planner.machines.machine import Machine
from planner.models.spec import ModelSpec
from planner.replay.head import in_order
from planner.replay.layers import Layers
from planner.replay.player import Blocks, Player
from planner.replay.steps import Run, replay_run
from planner.replay.tensors import by_unit, factored, loaded, trained
from planner.replay.units import Units, _broadcast, wrap_units
from planner.run.logits_law import LogitsLaw
from planner.terms.activations import op_settings
from planner.terms.optimizer import optimizer
from planner.units import MiB
from tests.planner.toys import CONFIG, LLAMA, MIXED, MIXTRAL, TIED, choices, gpus

WEIGHTS = 478_080 + 7 * 384
STREAM = 8 * 128
"""The hidden stream's gradient of 8 tokens."""


def allocated(machine: Machine | None = None, lengths: tuple[int, ...] = (), **fields: Any) -> int:
    """Return the peak of a run of 8 tokens."""
    usual = {"context": 8, "checkpointing": "full", "method": "full"}
    r = choices(LLAMA, machine or gpus(1), **{**usual, **fields})
    return replay_run(LLAMA, r, lengths=lengths).allocated_bytes


def test_a_step_of_foreach_adamw() -> None:
    # weights, gradients, two states, and the square roots of all second moments
    assert allocated(optimizer="adamw") == 5 * WEIGHTS


def test_a_fused_step_peaks_in_the_embeddings_gradient() -> None:
    assert allocated(optimizer="adamw-fused") == 4 * WEIGHTS + STREAM
    assert allocated(optimizer="sgd") == 2 * WEIGHTS + STREAM


def test_a_step_with_an_fp32_master() -> None:
    # norms: 256 B take 512; all in fp32: 956,160 + 7 x 256
    wide = 956_160 + 7 * 256
    found = allocated(optimizer="adamw", master_weights=True)
    assert found == 2 * WEIGHTS + 3 * wide + wide
    assert allocated(optimizer="adamw", dtype="fp32") == 5 * wide


def test_eight_bit_states() -> None:
    # codes and a scale for 256 of them, twice: vocabularies 64,000 + 1,024, q and o 4,096 + 512,
    # MLP 8,192 + 512; k, v and norms in fp32: 8,192 and 512
    layer = 2 * 2 * 4_608 + 3 * 2 * 8_704 + 2 * 2 * 8_192 + 2 * 2 * 512
    states = 2 * 2 * 65_024 + 3 * layer + 2 * 512
    found = allocated(optimizer="adamw-8bit", switches={"embeddings_32bit_state": False})
    assert found == 2 * WEIGHTS + states + STREAM


def test_adafactors_rows_and_columns() -> None:
    # fp32: vocabularies 4,000 (4,096) + 256 (512); norms 256 (512); a layer's q and o 256 + 256, k and v
    # 128 + 256, gate and up 512 + 256, down 256 + 512: 512 each
    states = 2 * (4_096 + 512) + 7 * 512 + 3 * 7 * 2 * 512
    assert allocated(optimizer="adafactor") == 2 * WEIGHTS + states + STREAM
    # a stack of experts: each has its own
    r = choices(MIXTRAL, method="full", optimizer="adafactor")
    assert 4 * sum(factored(MIXTRAL, r)) == optimizer(MIXTRAL, r).states.bytes
    # adapters of a stack are two matrices of 4 x 8 ranks (gate and up: 8 x 8); magnitudes are vectors
    r = choices(MIXTRAL, method="lora", optimizer="adafactor", lora={"rank": 8})
    # q, k, v, o and the router, 16 ranks each: 448 and 68 sides; down, gate and up
    layer = 5 * 16 + 448 + 68 + (2 * 32 + 192) + (2 * 64 + 320)
    assert 4 * sum(factored(MIXTRAL, r)) == 4 * 3 * layer
    assert optimizer(MIXTRAL, r).states.bytes == 4 * 3 * layer
    dora = {"rank": 8, "targets": ("q_proj",), "dora": True}
    r = choices(method="lora", optimizer="adafactor", lora=dora)
    assert factored(LLAMA, r) == 3 * [8, 64, 64, 8, 64]


def test_a_scaled_embedding_is_a_copy() -> None:
    scaled = replace(LLAMA, embedding_scale_copy=True)
    r = choices(scaled, context=8)
    run = Run(scaled, r, Player())
    chunk = run._embed(8, run.once)
    # both at once, then the copy alone
    device = run.player.device
    assert (device.peak_allocated_bytes, device.allocated_bytes) == (2 * STREAM, STREAM)
    assert chunk.size == STREAM


def test_a_step_bundle_by_bundle() -> None:
    # 12 B of every element of the matrices, or of a bundle of six numbers an element
    found = allocated(optimizer="adamw", switches={"step_scratch_bytes": 10**9})
    assert found == 4 * WEIGHTS + 12 * 238_592
    found = allocated(optimizer="adamw", switches={"step_scratch_bytes": 200_704})
    assert found == 4 * WEIGHTS + 100_352  # 12 x 8,362, rounded up to 512


@pytest.mark.parametrize(
    ("fields", "passing"),
    [
        # a bundle's weights, gradient and a root, and two moments that come: 20 B an element
        ({"optimizer_offload": True, "framework": "vramwise"}, 20 * 238_592),
        ({"optimizer": "paged-adamw"}, STREAM),
    ],
)
def test_states_elsewhere(fields: dict[str, Any], passing: int) -> None:
    assert allocated(**fields) == 2 * WEIGHTS + passing


def test_adapters() -> None:
    # rank 8 in fp32: A of 64: 2,048 B, of 128: 4,096; B of 64: 2,048, of 32: 1,024, of 128: 4,096: no rounding
    adapters = 98_304
    found = allocated(method="lora", lora={"rank": 8}, optimizer="adamw")
    # at the step: weights, adapters, gradients, two states, square roots; or the loss before: 8,000 logits
    # x 12 B = 96,000 beside the head's input 1,024, the norm's kept 260 x 8 and 3 inputs, positions 512
    assert found == WEIGHTS + 5 * adapters


def test_ddps_buckets() -> None:
    one = allocated(optimizer="sgd")
    two = allocated(gpus(2), optimizer="sgd", sharding="ddp")
    # 478,080 B fill one bucket below 1 MiB
    assert two - one == 478_208  # rounded up to 512
    views = allocated(gpus(2), optimizer="sgd", sharding="ddp", bucket_views=True)
    # weights, buckets, and before the backward ends no more than the logits' three fp32 copies
    assert views < two - 300_000


def test_a_longer_step_sets_the_peak() -> None:
    short, long = (
        allocated(optimizer="sgd", lengths=(8, 8)),
        allocated(optimizer="sgd", lengths=(8, 64)),
    )
    assert short == 2 * WEIGHTS + STREAM
    assert long >= short + 56 * 128


def test_small_blocks_come_in_segments_of_2_mib() -> None:
    r = choices(context=8, checkpointing="full", method="full", optimizer="adamw")
    found = replay_run(LLAMA, r, workspace_bytes=8_519_680, resident_bytes=5 * MiB)
    # 5 x 480,768 B in two segments; the workspace and the resident in one of 20 MiB
    assert found.reserved_bytes == 4 * MiB + 20 * MiB
    assert found.allocated_bytes == 5 * WEIGHTS + 8_519_680 + 5 * MiB
    assert not found.full
    pressed = replay_run(LLAMA, r, capacity_bytes=3 * MiB)
    assert pressed.full


def test_a_cache_that_grows_by_concatenation() -> None:
    # 64 sequences of 16 tokens: keys and values of three layers, 64 x 16 x 64 B each; the last one of 15
    # tokens is there while it is copied
    fields = {"task": "grpo", "context": 16, "num_generations": 64, "micro_batch_size": 1,
              "engine": {"kind": "transformers"}, "method": "lora", "lora": {"rank": 8},
              "optimizer": "adamw-fused"}  # fmt: skip
    cache = 6 * 64 * 16 * 64 + 64 * 15 * 64
    # weights, adapters, two states; gradients are gone
    assert allocated(**fields) == WEIGHTS + 3 * 98_304 + cache
    # a first token is copied too: seven halves of 4,096 x 64 B
    first = {**fields, "context": 1, "num_generations": 4096}
    assert allocated(**first) == WEIGHTS + 3 * 98_304 + 7 * 262_144


def test_tensors_are_loaded_one_by_one() -> None:
    r = choices(method="qlora", double_quant=True, switches={"kbit_upcast": "none"})
    found = list(loaded(LLAMA, r))
    assert found[0] == ((128_000,), 0)  # embeddings
    # q: 4,096 weights are 2,048 B of codes and 1,160 of constants, made from 8,192 B
    assert found[1] == ((2_048, 1_160), 8_192)
    assert found[5] == ((4_096, 1_224), 16_384)  # gate
    assert sum(sum(each.blocks) for each in found) == 80_040 + 2 * 128_448
    int8 = list(
        loaded(LLAMA, choices(method="qlora", quantization="int8", switches={"kbit_upcast": "all"}))
    )
    assert int8[1] == ((4_096, 256), 8_192)
    assert int8[2] == ((2_048, 128), 4_096)  # k's 32 rows
    assert int8[0] == ((256_000,), 0)  # fp32 beside k-bit weights
    head = choices(
        method="qlora", double_quant=True, switches={"quantized_head": True, "kbit_upcast": "none"}
    )
    assert list(loaded(LLAMA, head))[-1] == ((32_000, 2_108), 128_000)


def elements(r) -> list[int]:
    return [each.elements for each in trained(LLAMA, r)]


def test_trained_tensors_in_order() -> None:
    full = elements(choices(method="full"))
    layer = [4_096, 2_048, 2_048, 4_096, 8_192, 8_192, 8_192, 64, 64]
    assert sorted(full) == sorted([64_000, *(3 * layer), 64, 64_000])
    adapters = elements(choices(method="lora", lora={"rank": 8, "targets": ("q_proj", "v_proj")}))
    assert adapters == 3 * [512, 512, 512, 256]
    saved = choices(
        method="lora", lora={"rank": 8, "targets": ("q_proj",), "modules_to_save": ("lm_head",)}
    )
    assert elements(saved) == [*(3 * [512, 512]), 64_000]
    # adapters in fp32, the copy of the head as the base has it
    assert [each.width for each in trained(LLAMA, saved)] == [*(6 * [4]), 2]


def test_zero_1_divides_states() -> None:
    # master and two fp32 states of a half, flat, 478,080 B rounded up; the half of the gradients in 16 bit,
    # once more flat, and in fp32
    flat, half = 478_208, 239_104
    fields = {"optimizer": "adamw-fused", "sharding": "zero1", "context": 8}
    found = allocated(gpus(2), **fields, buckets={"reduce": 1_000})
    assert found == WEIGHTS + 3 * flat + half + half + flat
    # a large bucket is the peak before: whole gradients and the half that they are reduced into
    found = allocated(gpus(2), **fields, buckets={"reduce": 1_000_000})
    buckets = 2 * 1_000_000 + WEIGHTS - 7 * 384  # and a copy of what fills it
    assert found == pytest.approx(2 * WEIGHTS + 3 * flat + half + buckets, abs=512)


def test_a_law_that_says_only_its_totals() -> None:
    law = LogitsLaw(
        kind="full",
        forward=(("logits", "act"), ("float copy", "upcast"), ("log-softmax", "fp32")),
        backward=(("log-softmax", "fp32"), ("a", "fp32"), ("b", "fp32")),
    )
    forward, backward = in_order(law, 2, False)
    assert forward == (
        ("", "logits", 2, False),
        ("", "float copy", 4, False),
        ("", "log-softmax", 4, False),
        ("logits", "", 0, False),
        ("float copy", "", 0, False),
    )
    assert backward == (
        ("", "a", 4, False),
        ("", "b", 4, False),
        ("log-softmax", "", 0, False),
        ("a", "", 0, False),
        ("b", "gradient", 2, False),  # in the logits' dtype
    )


def test_a_law_in_order() -> None:
    order = ("logits: act", "logits > float: upcast shifted", "outputs: outputs", "|", "g: fp32",
             "g > narrow: downcast", "-float")  # fmt: skip
    law = LogitsLaw(kind="full", forward=(("logits", "act"),), order=order)
    forward, backward = in_order(law, 2, True)
    assert forward == (
        ("", "logits", 2, False),
        ("logits", "float", 4, True),
        ("", "outputs", 4, False),
    )
    assert backward == (("", "g", 4, False), ("g", "narrow", 2, False), ("float", "", 0, False))
    # outputs are fp32 where autocast computed in 16 bit
    assert in_order(law, 2, False)[0][-1].each == in_order(law, 4, True)[0][-1].each == 0
    wide = in_order(law, 4, False)
    assert [step.each for step in (*wide[0], *wide[1])] == [4, 0, 0, 4, 0, 0]


def units(**fields: Any) -> tuple[Units, Player]:
    """Return the units of one of two ranks, and its device."""
    r = choices(LLAMA, gpus(2), method="full", **fields)
    player = Player()
    return Units(LLAMA, r, player), player


ROOT, LAYER = 256_512, 74_240
"""128,064 and 36,992 parameters x 2 B, rounded up to 512."""


def test_units_wait_two_forward_and_three_backward() -> None:
    found, player = units(sharding="fsdp")
    layer = LLAMA.layers[0]
    found.start()
    assert player.device.allocated_bytes == ROOT
    for waiting in (1, 2, 2):
        found.before(layer, backward=False)
        assert player.device.allocated_bytes == ROOT + waiting * LAYER
    for waiting in (3, 3):
        found.before(layer, backward=True)
        assert player.device.allocated_bytes == ROOT + waiting * LAYER


def test_a_smaller_layer_is_gathered_at_its_own_size() -> None:
    r = choices(MIXED, gpus(2), method="full", sharding="fsdp")
    player = Player()
    found = Units(MIXED, r, player)
    found.before(MIXED.layers[0], backward=False)
    assert player.device.allocated_bytes == LAYER
    # gate, up and down of 256 rows for 128: 61,568 parameters x 2 B, 123,136 in 123,392
    found.before(MIXED.layers[1], backward=False)
    assert player.device.allocated_bytes == LAYER + 123_392


def test_gradients_are_reduced_to_a_ranks_share() -> None:
    found, player = units(sharding="fsdp")
    layer, grads = LLAMA.layers[0], []
    found.start()
    share = 37_376  # 36,992 B
    for number in (1, 2, 3):
        found.after_backward(layer, [player.block(10_240)], grads)
        # one flat gradient still waits; the layer's own are gone
        assert player.device.allocated_bytes == ROOT + LAYER + number * share
    found.finish([player.block(512)], grads)
    # the root gathered and its flat gradient, three shares and its own: 128,064 x 2 B halved
    assert player.device.peak_allocated_bytes == 2 * ROOT + 3 * share + 128_512
    assert player.device.allocated_bytes == 3 * share + 128_512
    assert len(grads) == 4


def test_fp32_shards_are_cast_before_and_after() -> None:
    found, player = units(sharding="fsdp", mixed_precision="bf16")
    found.start()
    # while the root is cast, half of it; gathered in 16 bit
    assert player.device.peak_allocated_bytes == ROOT
    grads: list[Any] = []
    found.after_backward(LLAMA.layers[0], [], grads)
    # reduced in 16 bit, kept as fp32: 36,992 x 4 / 2
    assert player.device.allocated_bytes == ROOT + LAYER + 74_240


def test_a_block_is_never_empty() -> None:
    assert Player().block(0).size == 512
    assert Player().take(0) is None


def test_everything_alive_in_the_loss() -> None:
    law = LogitsLaw(
        kind="full",
        forward=(("logits", "act"), ("float copy", "upcast"), ("log-softmax", "fp32")),
        backward=(("log-softmax", "fp32"), ("a", "fp32"), ("b", "fp32")),
    )
    r = choices(method="full", optimizer="sgd", checkpointing="full", context=64)
    found = replay_run(LLAMA, replace(r, law=law))
    # 64 tokens: three inputs of 8,192; cosines and sines 2,048 each; the final norm's fp32 input 16,384, rstd
    # 512, 16-bit result 8,192 and output 8,192; three fp32 tensors of 64,000 logits
    kept = 3 * 8_192 + 2 * 2_048 + 16_384 + 512 + 2 * 8_192
    assert found.allocated_bytes == WEIGHTS + kept + 3 * 256_000


def buckets(vocab: int, **fields: Any) -> list[int]:
    """Return DDP's buckets of the toy with another vocabulary."""
    model = model_spec_from_config({**CONFIG, "vocab_size": vocab})
    r = choices(model, gpus(2), method="full", sharding="ddp", **fields)
    return Run(model, r, Player())._buckets()


def test_ddps_buckets_of_25_mib_after_a_first_of_1_mib() -> None:
    # last first: the head alone, then norm, layers and embeddings: 110,976 + 64 + 6,400,000 parameters x 2 B
    assert buckets(100_000) == [12_800_000, 13_022_080]
    # in fp32 the second is full (25 MiB are 26,214,400) and nothing is left for a third
    assert buckets(105_000, dtype="fp32") == [26_880_000, 27_324_160, 0]
    assert buckets(100_000, dtype="fp32") == [25_600_000, 26_044_160]
    # a head below 1 MiB waits for the layers: 1,024,000 + 128 + the last layer's down and up, 16,384 each
    assert buckets(8_000)[0] < 1_100_000
    assert sum(buckets(8_000)) == 2 * (110_976 + 64 + 2 * 512_000)


def test_quantised_experts_are_loaded_packed() -> None:
    r = choices(MIXTRAL, method="qlora", double_quant=False, switches={"kbit_upcast": "none"})
    r = replace(r, linear_experts=True)
    # a layer 7,168 + 37,120 + 18,688 (test_hand_terms.py); routers, norms and vocabularies in 16 bit
    rest = 2 * (3 * 384 + 128_064)
    found = sum(sum(tensor.blocks) for tensor in loaded(MIXTRAL, r))
    assert found == 3 * 62_976 + rest


TIED_WEIGHTS = 350_080 + 7 * 384


def test_a_tied_embedding_has_a_third_buffer() -> None:
    r = choices(TIED, context=8, checkpointing="full", method="full", optimizer="sgd")
    # the head's gradient, the embedding's own and their sum
    found = replay_run(TIED, r).allocated_bytes
    assert found == 2 * TIED_WEIGHTS + 2 * 128_000 + STREAM
    # accumulated: beside the sum of the micro-batches before
    again = replay_run(TIED, replace(r, grad_accum=2)).allocated_bytes
    assert again == found + 128_000


def wrapped(model: ModelSpec = LLAMA, **fields: Any) -> tuple[int, int]:
    """Return what two ranks' FSDP1 held while it wrapped the units, and what stays."""
    player = Player()
    Run(model, choices(model, gpus(2), **{"sharding": "fsdp", **fields}), player).load(0, 0)
    return player.device.peak_allocated_bytes, player.device.allocated_bytes


def test_units_are_made_flat_before_they_are_cut() -> None:
    # three layers of 36,992 B a rank, in 37,376; the root comes last: its three tensors, the one they are
    # joined in, both 256,128 in 256,512, and this rank's part of it
    layers, whole, cut = 3 * 37_376, 256_512, 128_512
    assert wrapped(method="full") == (layers + 2 * whole + cut, layers + cut)
    # litgpt has all tensors there before the first unit is cut: of a layer 73,728 and two norms, 512 each
    deep = model_spec_from_config({**CONFIG, "num_hidden_layers": 12}, name="toy-deep")
    everything = 12 * (73_728 + 2 * 512) + whole
    assert wrapped(deep, method="full")[0] == 12 * 37_376 + 2 * whole + cut
    assert wrapped(deep, method="full", framework="litgpt")[0] == everything + 74_240 + 37_376
    # the parts wait on the host
    assert wrapped(method="full", offload={"parameters": True})[1] == 0


def test_trained_parts_become_fp32_after_the_last_unit() -> None:
    # 73,984 B in 74,240, and the root's 256,128 in 256,512; the 16-bit ones go
    peak, stays = wrapped(method="full", mixed_precision="bf16")
    assert stays == 3 * 74_240 + 256_512
    assert peak == 3 * 37_376 + 2 * 256_512 + 128_512


def test_a_quantised_units_constants_stay_whole() -> None:
    r = choices(LLAMA, gpus(2), method="qlora", sharding="fsdp")
    units = by_unit(LLAMA, r)
    assert [len(unit) for unit in units] == [3, 9, 9, 9]
    player = Player()
    wrap_units(LLAMA, r, player)
    # a layer's codes 18,432 and fp32 norms 512, cut: 9,472 in 9,728; the root's fp32 512,256: 256,128 in
    # 256,512; absmax and code map of q, k, v and o (320 and 192) in 512, of the MLP's (576) in 1,024
    assert player.device.allocated_bytes == 3 * (9_728 + 4 * 512 + 3 * 1_024) + 256_512


def test_tensors_are_broadcast_in_buckets() -> None:
    # 250 MiB close a bucket; two are on their way; a tensor alone in one is not copied
    def held(*sizes: int) -> int:
        player = Player()
        _broadcast([size * MiB for size in sizes], player)
        assert player.device.allocated_bytes == 0
        return player.device.peak_allocated_bytes

    assert held(300, 400) == 0
    assert held(100, 100) == 200 * MiB
    assert held(200, 100, 300, 10, 20) == 300 * MiB
    assert held(200, 60, 200, 70, 200, 80) == (270 + 280) * MiB


def stack(tokens: int = 8, **fields: Any) -> tuple[Layers, Player]:
    """Return the toy's layers, and their device."""
    r = choices(method="lora", lora={"rank": 8}, context=tokens, **fields)
    player = Player()
    return Layers(LLAMA, r, op_settings(LLAMA, r), tokens, player), player


def test_inputs_come_back_from_the_host_in_full() -> None:
    layers, player = stack(checkpointing="offload", offload_keep_layers=1)
    out = layers.forward(player.block(1_024))
    # the last layer's input stays, and the output
    assert player.device.allocated_bytes == 2 * 1_024
    assert [held is None for held in layers.inputs] == [True, True, False]
    fetched = layers._fetch(0)
    assert fetched is not None
    assert fetched.size == 8 * 128
    assert out.size == 1_024


class Noting(Player):
    """A player that notes how many events each pass had."""

    def __init__(self) -> None:
        super().__init__()
        self.played: list[int] = []

    def play(self, layer: LayerEvents, tokens: int, blocks: Blocks) -> Blocks:
        """Note and play."""
        self.played.append(len(layer.events))
        return super().play(layer, tokens, blocks)


def test_a_layer_alone_in_its_segment_stops_early() -> None:
    layers, _ = stack(checkpointing="every-k", checkpoint_every=2)
    layers.player = player = Noting()
    out = layers.forward(player.block(1_024))
    assert player.device.allocated_bytes == (2 + 1) * 1_024  # ceil(3 / 2) inputs and the output
    player.played.clear()
    layers.backward(out, player.block(1_024), [])
    layer, settings = LLAMA.layers[0], layers.settings
    again, graph = recomputed_events(layer, 64, settings), kept_events(layer, 64, settings)
    once, twice = len(graph.forward.events), len(graph.backward.events)
    assert player.played == [len(again.events), once, once, twice, twice]


@pytest.mark.parametrize("pick", [recomputed_events, reentrant_events, recomputed_held_events])
@pytest.mark.parametrize("settings", [OpSettings(full=True), OpSettings(residual=4, full=True)])
def test_the_last_allocation_of_a_layers_backward_is_its_inputs_gradient(
    pick: Any, settings: OpSettings
) -> None:
    kept = kept_events(LLAMA.layers[0], 64, settings).backward
    for found in (kept, pick(LLAMA.layers[0], 64, settings)):
        sizes = [event.per_token for event in found.events if event.per_token > 0]
        # the first norm's, as wide as the stream
        assert sizes[-1] == 64 * settings.residual


def test_adapters_outside_the_layers_are_tensors_too() -> None:
    targets = ("q_proj", "lm_head")
    found = elements(choices(method="lora", lora={"rank": 8, "targets": targets}))
    # rank 8: A 8 x 64, B of q 64 x 8, of the head 1,000 x 8
    assert found == [*(3 * [512, 512]), 512, 8_000]


def test_a_layer_without_a_graph_reads_the_stream_in_full() -> None:
    for settings in (OpSettings(), OpSettings(residual=4)):
        events = forward_events(LLAMA.layers[0], 64, settings)
        made = [event.per_token for event in events.events if event.per_token > 0]
        # the middle and the output are as wide as the stream
        assert made[-1] == 64 * settings.residual


def test_which_points_can_be_the_largest() -> None:
    # of two points of one width the one with more constant bytes counts, gradients among them
    points = [Point(10, 5, 0), Point(10, 0, 9), Point(4, 5, 9), Point(2, 14, 0), Point(1, 20, 0)]
    assert envelope(points) == (Point(10, 0, 9), Point(4, 5, 9), Point(1, 20, 0))
