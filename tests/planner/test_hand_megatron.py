"""Megatron-LM's ranks by hand: shares of matrices, the distributed optimizer, pipeline schedules, experts.

Parts of the two-hands model (toys.py) over 2 tensor ranks: q 32x64 = 2,048, k and v 16x64 = 1,024 each, o 64x32 =
2,048, gate, up 64x64 and down 64x64 = 4,096 each, norms 128 whole: a layer 18,560. The vocabulary of 1,000 is padded
to 1,024 (a multiple of 2 x 128): 512 rows of 64 = 32,768, of embedding and head each.
"""

from itertools import pairwise
from json import loads

import pytest

from app.cli import main
from planner.errors import UnsupportedError, UsageError
from planner.models.hub import find_model
from planner.models.rank_part import Cuts, stage_part, tensor_part
from planner.plan import plan, plans_of_ranks
from planner.run.pipeline import Stage, layers_of
from planner.run.resolve import resolve
from planner.run.runfile import make_recipe
from planner.units import GB
from tests.planner.toys import LLAMA, MIXTRAL, gpus

HALF_LAYER = 18_560
HALF_ROWS = 512 * 64
TOKENS = 16


def recipe(**fields):
    usual = {"task": "sft", "method": "full", "framework": "megatron", "sharding": "megatron"}
    return make_recipe(**{**usual, "context": TOKENS, **fields})


def ranks(model, count, **fields):
    machine = gpus(count)
    return plans_of_ranks(model, resolve(model, recipe(**fields), machine), machine)


def size(result, phase, name):
    return sum(term.bytes for term in result.phase(phase).terms if term.name == name)


def test_half_of_every_matrix_and_all_of_every_norm() -> None:
    part = tensor_part(LLAMA, Cuts(tensor=2, vocab_padding=128))
    assert part.layers[0].parameters == HALF_LAYER
    assert part.parameters == 3 * HALF_LAYER + 2 * HALF_ROWS + 64
    assert (part.vocab, part.layers[0].mixer.num_heads, part.layers[0].mlp.intermediate) == (
        512,
        2,
        64,
    )


def test_the_distributed_optimizer_takes_6_bytes_and_12_over_the_ranks_that_hold_the_same() -> None:
    (one,) = ranks(LLAMA, 8, parallel={"tensor": 2})
    count = 3 * HALF_LAYER + 2 * HALF_ROWS + 64
    assert size(one, "step", "weights") == 2 * count
    assert size(one, "step", "gradients") == size(one, "forward", "gradients") == 4 * count
    assert size(one, "step", "optimizer") == 12 * count // 4
    (plain,) = ranks(LLAMA, 8, sharding="ddp", parallel={"tensor": 2})
    assert size(plain, "step", "optimizer") == 12 * count
    assert size(plain, "step", "gradients") == 4 * count  # the reduction's buffer is the gradients
    assert size(plain, "step", "communication") == 0


def test_ranks_of_one_sequence_hold_the_same_weights() -> None:
    (one,) = ranks(LLAMA, 8, parallel={"tensor": 2, "context": 2})
    count = 3 * HALF_LAYER + 2 * HALF_ROWS + 64
    assert size(one, "step", "optimizer") == 12 * count // 4  # 2 x 2 ranks


def test_experts_states_are_divided_over_the_ranks_that_hold_the_same_experts() -> None:
    """4 experts over 4 ranks of 8: one of 3 x 8,192 = 24,576 a layer; 2 ranks hold each."""
    (one,) = ranks(MIXTRAL, 8, parallel={"expert": 4})
    routed = 3 * 24_576
    rest = MIXTRAL.parameters - 4 * routed + 2 * 24 * 64  # rows 1,000 -> 1,024
    assert size(one, "step", "weights") == 2 * (rest + routed)
    assert size(one, "step", "optimizer") == pytest.approx(12 * rest / 8 + 12 * routed / 2, abs=16)


def test_experts_over_ranks_may_all_be_asked_of_one() -> None:
    machine = gpus(4)
    even = plan(MIXTRAL, recipe(parallel={"expert": 4}), machine)
    assert even.imbalance_bytes > 0
    assert any("experts over 4 ranks" in note for note in even.assumptions)
    assert plan(MIXTRAL, recipe(), machine).imbalance_bytes == 0


def simulated(stages, number, chunks, micro_batches):
    """Run a stage's forwards and backwards one by one: warm-up, then one of each, then what is left."""
    behind = stages - 1 - number
    warm = behind if chunks == 1 else 2 * behind + (chunks - 1) * stages
    total = chunks * micro_batches
    warm = min(warm, total)
    alive = most = warm
    for _ in range(total - warm):
        alive += 1
        most = max(most, alive)
        alive -= 1
    return most


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_forwards_without_their_backward(stages, chunks, micro_batches) -> None:
    for number in range(stages):
        stage = Stage(stages, number, chunks, micro_batches)
        assert stage.chunks_in_flight == simulated(stages, number, chunks, micro_batches)
    assert Stage(4, 0, 1, 8).chunks_in_flight == 4
    assert Stage(4, 3, 8, 4).chunks_in_flight == 29  # 7 groups of 4, and its own


@pytest.mark.parametrize(("layers", "stages", "chunks"), [(12, 4, 3), (32, 4, 8), (126, 8, 2)])
def test_every_layer_is_on_one_stage(layers, stages, chunks) -> None:
    held = [layers_of(layers, stages, number, chunks) for number in range(stages)]
    assert sorted(place for own in held for place in own) == list(range(layers))
    assert len(held[0]) == len(held[-1]) <= max(map(len, held)) <= len(held[0]) + 1


def test_the_first_stage_holds_most_graphs_and_the_last_the_logits() -> None:
    model = find_model("llama-3.2-1b")
    machine = gpus(4)
    each = plans_of_ranks(
        model,
        resolve(
            model,
            recipe(context=2048, gradient_accumulation=8, parallel={"pipeline": 4}),
            machine,
        ),
        machine,
    )
    graphs = [size(one, "forward", "activations") for one in each]
    assert all(before > after for before, after in pairwise(graphs))
    assert [size(one, "loss", "logits") > 0 for one in each] == [False, False, False, True]
    assert size(each[-1], "loss", "logits") == 2048 * 128_256 * 6  # 16-bit logits, fp32 ones
    assert plan(
        model, recipe(context=2048, gradient_accumulation=8, parallel={"pipeline": 4}), machine
    ).peak_bytes == max(one.peak_bytes for one in each)


def test_stages_share_the_parameters_and_a_tied_head_is_a_copy() -> None:
    model = find_model("llama-3.2-1b")
    assert model.tied
    parts = [
        stage_part(model, layers_of(16, 2, number, 1), first=number == 0, last=number == 1)
        for number in (0, 1)
    ]
    assert sum(part.parameters for part in parts) == model.parameters + 128_256 * 2048


def test_tokens_are_shared_by_context_and_by_sequence() -> None:
    model, machine = find_model("llama-3.2-1b"), gpus(4)

    def kept(**parallel):
        asked = recipe(context=8192, parallel=parallel)
        (one,) = plans_of_ranks(model, resolve(model, asked, machine), machine)
        return size(one, "forward", "activations")

    whole, parted = kept(), kept(context=4)
    assert parted == pytest.approx(whole / 4, rel=0.01)
    replicated, divided = kept(tensor=4), kept(tensor=4, sequence=True)
    # without sequence parallelism every rank keeps x, norm(x), twice a layer, and the last norm's pair
    spared = (16 * 4 + 2) * 8192 * 2048 * 2 * 3 // 4
    assert replicated - divided == pytest.approx(spared, rel=0.02)


def test_the_last_stage_keeps_what_its_head_gathers() -> None:
    model = find_model("llama-3.2-1b")
    with_buffer, without = (
        ranks(
            model,
            4,
            context=2048,
            gradient_accumulation=2,
            parallel={"tensor": 2, "pipeline": 2, "sequence": sequence},
        )
        for sequence in (True, False)
    )
    gained = [
        size(one, "step", "overhead") - size(other, "step", "overhead")
        for one, other in zip(with_buffer, without, strict=True)
    ]
    assert gained == [0, 2048 * 2048 * 2]


def test_one_buffer_is_as_large_as_whoever_asks_for_most() -> None:
    """8 tokens a rank of 2; experts over 2 x 2 ranks get 32 rows of 64, the head 16: 64 x 2 bytes each."""
    divided = {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 2}

    def kept(law):
        (one,) = ranks(MIXTRAL, 4, framework=law, parallel=divided)
        return size(one, "step", "overhead")

    (neither,) = ranks(MIXTRAL, 1, framework="megatron-separate-wgrad")
    assert kept("megatron-separate-wgrad") - size(neither, "step", "overhead") == 32 * 64 * 2
    assert kept("megatron-separate-wgrad") - kept("megatron-alltoall") == 16 * 64 * 2


def test_overlapped_all_to_all_leaves_each_layer_its_input_and_its_gradient() -> None:
    both = [
        ranks(MIXTRAL, 2, framework=law, parallel={"expert": 2})[0]
        for law in ("megatron-overlapped-experts", "megatron-alltoall")
    ]
    layers, stream = MIXTRAL.num_layers, TOKENS * 64 * 2
    left = [size(one, "step", "activations") for one in both]
    assert left[0] - left[1] == layers * 2 * stream
    assert both[0].phase("loss").total_bytes == both[1].phase("loss").total_bytes


@pytest.mark.parametrize(
    ("parallel", "kept"),
    [
        ({}, [TOKENS + 28]),  # tokens, positions and labels of 8 bytes, 4 of the loss mask
        ({"pipeline": 3}, [TOKENS + 16, 0, TOKENS + 12]),
        ({"context": 2}, [(TOKENS + 28) // 2]),
    ],
)
def test_0_18_keeps_the_masks_of_a_step_on_the_gpu(parallel, kept) -> None:
    old, new = (
        ranks(LLAMA, 6, framework=law, gradient_accumulation=4, parallel=parallel)
        for law in ("megatron==0.18.2", "megatron")
    )
    more = [
        size(one, "loss", "overhead") - size(other, "loss", "overhead")
        for one, other in zip(old, new, strict=True)
    ]
    assert more == [4 * TOKENS * each for each in kept]


def test_fused_gradients_leave_no_tensor_of_their_own() -> None:
    (fused,), (apart,) = ranks(LLAMA, 1), ranks(LLAMA, 1, framework="megatron-separate-wgrad")
    rows = 1_024  # of the vocabulary, padded to a multiple of 128
    assert size(fused, "loss", "logits") == TOKENS * rows * 6
    # the head's gradient before it is added to the buffer, beside the logits' and its input's
    assert size(apart, "loss", "logits") == TOKENS * (rows + 64) * 2 + rows * 64 * 2
    assert size(apart, "forward", "gradients") == size(fused, "forward", "gradients")


@pytest.mark.parametrize(
    ("model", "fields", "error", "words"),
    [
        (LLAMA, {"sharding": "zero3"}, UsageError, "zero3 is not what Megatron-LM divides by"),
        (LLAMA, {"method": "lora"}, UnsupportedError, "method: lora cannot be planned"),
        (LLAMA, {"framework": "trl"}, UsageError, "megatron is not what TRL"),
        (
            LLAMA,
            {"framework": "trl", "sharding": "ddp", "parallel": {"tensor": 2}},
            UnsupportedError,
            "parallel.tensor: 2 cannot be planned under TRL",
        ),
        (
            MIXTRAL,
            {"framework": "torchtitan", "sharding": "fsdp2", "parallel": {"expert": 2}},
            UnsupportedError,
            "parallel.expert: 2 cannot be planned under torchtitan",
        ),
        (
            MIXTRAL,
            {"parallel": {"tensor": 2, "expert": 2}},
            UsageError,
            "trains experts over 2 tensor ranks with sequence parallelism only",
        ),
        (
            LLAMA,
            {"task": "dpo", "parallel": {"tensor": 2}},
            UnsupportedError,
            "cannot be planned for dpo",
        ),
        (
            LLAMA,
            {
                "framework": "hf-trainer",
                "sharding": "fsdp2",
                "parallel": {"tensor": 2, "sequence": True},
            },
            UnsupportedError,
            "divides no tokens",
        ),
    ],
)
def test_what_is_not_divided_so_is_refused_by_name(model, fields, error, words) -> None:
    with pytest.raises(error) as refused:
        plan(model, recipe(**fields), gpus(8))
    assert words in refused.value.message


def test_the_command_line_answers_with_the_fullest_stage_of_512_gpus(capsys) -> None:
    line = (
        "plan llama-3.1-405b --task sft --method full --context 8192 --gpu h100 --gpus 512 --shard megatron "
        "--framework megatron --tensor-parallel 8 --sequence-parallel --pipeline-parallel 8 "
        "--grad-accum 16 --checkpointing full --json"
    )
    assert main(line.split()) == 0
    answer = loads(capsys.readouterr().out)
    assert "part" not in answer["model"]
    step = {term["name"]: term["bytes"] for term in answer["phases"][-1]["terms"]}
    assert 6 * GB < step["gradients"] / 4 < 6.6 * GB  # elements: 405B over 64, an end more or less
    assert answer["peak_phase"] in {"forward", "loss", "backward"}


@pytest.mark.parametrize("name", ["nemotron-h-8b", "mamba-2.8b"])
def test_a_layer_without_an_mlp_is_refused_by_name(name):
    with pytest.raises(UnsupportedError, match=f"framework: Megatron-LM .* for {name} yet"):
        plan(find_model(name, offline=True), recipe(sharding="none"), gpus(1))
