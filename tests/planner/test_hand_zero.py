"""DeepSpeed's buffers on the toy model, by hand: four ranks, buckets of a few thousand elements.

The toy has 239,040 parameters in bf16; a rank's part is 59,760. Seven norms of 64 are under a persistence
threshold of 100 elements: 448 stay whole, 238,592 are gathered. The largest module has 64,000.
"""

from typing import Any

import pytest

from planner.errors import UsageError
from planner.importers.launch import from_deepspeed
from planner.models.hub import find_model
from planner.plan import Plan, plan
from planner.run.recipe import BucketsSection, Sharding
from planner.run.runfile import make_recipe
from planner.run.zero import zero
from planner.terms.window import persistent, prefetched, window
from planner.terms.zero import passing_buckets, standing_bucket
from tests.planner.toys import LLAMA, choices, gpus

SMALL = {
    "reduce": 10_000,
    "prefetch": 6_000,
    "live": 100_000,
    "reuse": 0,
    "persistence": 100,
    "sub_group": 30_000,
}
FEW = {"reduce": 10_000}
FULL: dict[str, Any] = {
    "method": "full",
    "framework": "hf-trainer",
    "checkpointing": "full",
    "optimizer": "adamw",
    "dtype": "bf16",
    "mixed_precision": "none",
    "context": 16,
    "micro_batch_size": 1,
}


def of(scheme: str, **fields: Any) -> Any:
    usual = SMALL if scheme == "zero3" else FEW
    buckets = {**usual, **fields.pop("buckets", {})}
    return choices(LLAMA, gpus(4), **{**FULL, **fields}, sharding=scheme, buckets=buckets)


def planned(scheme: str, **fields: Any) -> Plan:
    usual = SMALL if scheme == "zero3" else FEW
    buckets = {**usual, **fields.pop("buckets", {})}
    recipe = make_recipe(**{**FULL, **fields}, sharding=scheme, buckets=buckets)
    return plan(LLAMA, recipe, gpus(4))


def terms(result: Plan, phase: str) -> dict[str, int]:
    return {term.name: term.bytes for term in result.phase(phase).terms}


def test_the_window_fills_up_to_live_parameters() -> None:
    r = of("zero3")
    assert persistent(LLAMA, r) == 448
    assert window(LLAMA, r).bytes == 2 * (100_000 + 448)
    # less than the largest module, embeddings or head, cannot be
    assert window(LLAMA, of("zero3", buckets={"live": 10})).bytes == 2 * (64_000 + 448)
    # all of a model that is smaller; nothing is divided below the threshold
    assert window(LLAMA, of("zero3", buckets={"live": 10**9})).bytes == 2 * 239_040
    everything = of("zero3", buckets={"persistence": 64_000})
    assert (persistent(LLAMA, everything), window(LLAMA, everything).bytes) == (
        239_040,
        2 * 239_040,
    )
    # what comes again within 300,000 elements stays: with recomputation every layer passes three times
    assert window(LLAMA, of("zero3", buckets={"reuse": 300_000})).bytes == 2 * (100_000 + 448)
    assert window(LLAMA, of("zero3", buckets={"reuse": 450_000})).bytes == 2 * (150_000 + 448)
    said = window(LLAMA, r).formula
    assert "4 ranks' shards" in said
    assert "100,000 elements" in said


def test_a_group_is_prefetched_until_its_bucket_is_full() -> None:
    # o 4,096 is not enough, with gate's 8,192 it is: 12,288, the most of any start
    assert prefetched(LLAMA, of("zero3")) == 12_288
    # the MLP's three and a head that still had to come: 3 x 8,192 + 64,000
    assert prefetched(LLAMA, of("zero3", buckets={"prefetch": 24_577})) == 3 * 8_192 + 64_000
    assert prefetched(LLAMA, of("zero3", buckets={"prefetch": 1})) == 0  # one comes in place
    assert prefetched(LLAMA, of("zero3", buckets={"live": 0})) == 0


@pytest.mark.parametrize(
    ("scheme", "buckets", "standing", "passing"),
    [
        ("zero1", {}, 0, 2 * 20_000),
        ("zero2", {}, 0, 2 * 20_000),  # the bucket, and a copy when it spans two ranks' parts
        ("zero2", {"overlap": True}, 0, 3 * 20_000),
        ("zero2", {"contiguous": False}, 0, 20_000),
        ("zero2", {"dtype": "fp32"}, 0, 20_000 + 40_000),
        ("zero3", {}, 20_000, 20_000),
        ("zero3", {"overlap": True}, 20_000, 20_000),
        ("zero3", {"dtype": "fp32"}, 40_000, 40_000),
        ("zero3", {"reduce": 10**9}, 2 * 10**9, 2 * 239_040),
    ],
)
def test_buckets(scheme: str, buckets: dict[str, Any], standing: int, passing: int) -> None:
    r = of(scheme, buckets=buckets)
    assert (standing_bucket(LLAMA, r).bytes, passing_buckets(LLAMA, r)) == (standing, passing)


def test_stage_3_holds_bucket_and_gradients_all_the_time() -> None:
    result = planned("zero3")
    part = 2 * 59_760
    assert terms(result, "load")["weights"] == part
    for phase in ("forward", "loss"):
        found = terms(result, phase)
        assert found["weights"] == part + 2 * (100_000 + 448)
        assert found["gradients"] == part
        assert found["communication"] == 20_000 + 2 * 12_288
    # the embedding's whole gradient is on its way at the end
    back = terms(result, "backward")
    assert back["gradients"] == part + 2 * 64_000
    assert back["communication"] == 20_000 + 20_000  # nothing is left to prefetch
    step = terms(result, "step")
    assert (step["weights"], step["gradients"], step["communication"]) == (part, part, 20_000)
    # master and two states in fp32; 30,000 elements at once: fp32 gradients and torch's roots
    assert step["optimizer"] == 12 * 59_760 + 2 * 4 * 30_000
    plain = terms(planned("zero3", optimizer="sgd"), "step")
    assert plain["optimizer"] == 4 * 59_760 + (4 + 2) * 30_000
    # a sub-group of 0 is a tensor's: 64,000 / 4
    single = terms(planned("zero3", buckets={"sub_group": 0}), "step")
    assert single["optimizer"] == 12 * 59_760 + 2 * 4 * 16_000


def test_stage_2_fills_a_part_and_gives_it_back() -> None:
    part = 2 * 59_760
    result = planned("zero2")
    assert "gradients" not in terms(result, "forward")
    assert terms(result, "backward")["gradients"] == part + 2 * 64_000
    assert terms(result, "backward")["communication"] == 2 * 20_000
    # fp32 gradients 4 B; flat ones 2 B while they are made, and given back before the roots' 4 B
    assert terms(result, "step")["optimizer"] == (12 + 4 + 2) * 59_760
    assert terms(planned("zero2", optimizer="sgd"), "step")["optimizer"] == (4 + 4 + 2) * 59_760
    # the next micro-batch fills a part of its own, which is added to the first
    twice = planned("zero2", gradient_accumulation=2)
    assert terms(twice, "forward")["gradients"] == part
    assert terms(twice, "backward")["gradients"] == 2 * part + 2 * 64_000


def test_stage_1_reduces_whole_gradients_at_the_end() -> None:
    result = planned("zero1")
    assert terms(result, "backward")["gradients"] == 2 * 239_040 + 2 * 59_760
    assert terms(result, "step")["gradients"] == 2 * 59_760


def test_weights_are_cast_and_autocast_is_off() -> None:
    r = of("zero2", dtype="fp32", mixed_precision="bf16")
    assert (r.dtype, r.autocast, r.master_weights) == ("bf16", "", True)
    alone = choices(LLAMA, gpus(1), **{**FULL, "dtype": "fp32", "mixed_precision": "bf16"})
    assert (alone.dtype, alone.autocast) == ("fp32", "bf16")
    kept = of("zero2", master_weights=False)
    assert not kept.master_weights


def test_autos_come_from_the_hidden_size() -> None:
    auto = BucketsSection(reduce="auto", prefetch="auto", persistence="auto")
    found = zero(Sharding.ZERO3, auto, BucketsSection(), 4_096)
    assert found is not None
    assert (found.reduce, found.prefetch, found.persistence) == (16_777_216, 15_099_494, 40_960)
    usual = zero(Sharding.ZERO3, BucketsSection(), BucketsSection(), 4_096)
    assert usual is not None
    assert (usual.reduce, usual.prefetch, usual.live) == (500_000_000, 50_000_000, 1_000_000_000)
    assert (usual.persistence, usual.sub_group, usual.buckets) == (100_000, 1_000_000_000, 1)
    assert zero(Sharding.FSDP, BucketsSection(), BucketsSection(), 4_096) is None


def test_a_frameworks_own_configs_are_its_default() -> None:
    swift = choices(LLAMA, gpus(4), **{**FULL, "framework": "ms-swift"}, sharding="zero2").zero
    axolotl = choices(LLAMA, gpus(4), **{**FULL, "framework": "axolotl"}, sharding="zero3").zero
    assert swift.reduce == 200_000_000
    assert (axolotl.reduce, axolotl.live, axolotl.sub_group) == (64 * 64, 0, 0)
    stated = choices(
        LLAMA, gpus(4), **{**FULL, "framework": "axolotl"}, sharding="zero3", buckets={"live": 7}
    )
    assert stated.zero.live == 7


def test_zero_3_peaks_above_zero_2_where_it_does() -> None:
    """DeepSpeed#3734: a 560M model on 4 GPUs; and 13B on 8, whose window held the whole model."""
    small, large = find_model("bloom-560m"), find_model("llama-2-13b")
    fields = {**FULL, "dtype": "fp16", "context": 512}

    def peaks(model: Any, count: int, **buckets: Any) -> list[int]:
        return [
            plan(
                model,
                make_recipe(**fields, sharding=scheme, **(buckets if scheme == "zero3" else {})),
                gpus(count),
            ).peak_bytes
            for scheme in ("zero2", "zero3")
        ]

    second, third = peaks(small, 4)
    assert third > second
    # what is divided is less all the same: 2 B of weights on every rank against a quarter
    second, third = peaks(large, 8)
    assert third < second
    # a window of all 13 x 10^9 weights is 24 x 10^9 B more than one of 10^9, in the forward already
    assert peaks(large, 8, buckets={"live": 2 * 10**10})[1] > third + 15 * 10**9


def test_buckets_of_nothing_are_refused_by_name() -> None:
    cases = [
        ({"sharding": "fsdp", "buckets": {"reduce": 5}}, "buckets.reduce: fsdp is not DeepSpeed's"),
        ({"sharding": "zero2", "buckets": {"live": 5}}, "buckets.live: zero2 divides no weights"),
        ({"buckets": {"overlap": True}}, "buckets.overlap: none is not DeepSpeed's"),
    ]
    for fields, said in cases:
        with pytest.raises(UsageError, match=said):
            plan(LLAMA, make_recipe(**{**FULL, **fields}), gpus(4))
    with pytest.raises(UsageError, match=r"buckets\.live"):
        make_recipe(buckets={"live": "auto"})


STAGE_3 = {
    "stage": 3,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": 2e7,
    "param_persistence_threshold": 50,
    "sub_group_size": 1e8,
}


def test_a_deepspeed_json_says_all_its_buckets() -> None:
    launch = from_deepspeed({"zero_optimization": STAGE_3, "communication_data_type": "fp32"})
    assert launch.buckets == {
        "reduce": "auto",
        "allgather": 500_000_000,
        "prefetch": 20_000_000,
        "live": 1_000_000_000,
        "reuse": 1_000_000_000,
        "persistence": 50,
        "sub_group": 100_000_000,
        "contiguous": True,
        "dtype": "fp32",
    }
    second = from_deepspeed({"zero_optimization": {"stage": 2, "overlap_comm": True}})
    assert second.buckets == {
        "reduce": 500_000_000,
        "allgather": 500_000_000,
        "overlap": True,
        "contiguous": True,
    }
    assert from_deepspeed({"zero_optimization": {"stage": 0}}).buckets == {}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"zero_optimization": {"stage": 4}}, "stage: 4 does not exist"),
        ({"zero_optimization": {"stage": "three"}}, "stage: 'three' is no stage"),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "offload_param: device cpu contradicts stage 2",
        ),
        (
            {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer: device cpu contradicts stage 0",
        ),
        (
            {
                "zero_optimization": {
                    "stage": 2,
                    "cpu_offload": True,
                    "offload_optimizer": {"device": "none"},
                }
            },
            "cpu_offload: is the old spelling of offload_optimizer",
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "max_live_parameters": 1,
                    "stage3_max_live_parameters": 2,
                }
            },
            "stage3_max_live_parameters 2 and max_live_parameters 1 are one field",
        ),
        (
            {"zero_optimization": {"stage": 3, "sub_group_size": "auto"}},
            "sub_group_size: auto",
        ),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": -1}}, "reduce_bucket_size: -1"),
        (
            {"zero_optimization": {"stage": 1, "reduce_bucket_size": 1e400}},
            "reduce_bucket_size: inf",
        ),
        ({"communication_data_type": "int8", "zero_optimization": {"stage": 1}}, "'int8'"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "both are true"),
        (
            {
                "train_batch_size": 30,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2,
            },
            "train_batch_size: 30 is no multiple",
        ),
    ],
)
def test_contradictions_in_a_deepspeed_json_are_refused_by_name(
    document: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        from_deepspeed(document)
