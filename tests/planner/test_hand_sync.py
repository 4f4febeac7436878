"""Loading, pushing to the engine and saving on several GPUs, by hand on the toy model.

239,040 parameters, 2 B each; embeddings and head 64,000 each, a layer 36,992, what is outside layers 128,064.
"""

from typing import Any

import pytest

from planner.families import model_spec_from_config
from planner.plan import Plan, plan
from planner.run.runfile import make_recipe
from tests.planner.toys import CONFIG, LLAMA, gpus

WHOLE, OUTSIDE, TENSOR = 2 * 239_040, 2 * 128_064, 2 * 64_000
USUAL: dict[str, Any] = {
    "method": "full",
    "dtype": "bf16",
    "mixed_precision": "none",
    "checkpointing": "full",
    "context": 16,
    "micro_batch_size": 1,
}
GRPO: dict[str, Any] = {
    **USUAL,
    "task": "grpo",
    "num_generations": 8,
    "micro_batch_size": 8,
    "engine": {"kind": "vllm-push"},
}
BUCKETS = {"reduce": 1_000, "persistence": 64}


def planned(count: int = 4, **fields: Any) -> Plan:
    return plan(LLAMA, make_recipe(**fields), gpus(count))


def terms(result: Plan, phase: str) -> dict[str, int]:
    return {term.name: term.bytes for term in result.phase(phase).terms}


def names(result: Plan) -> list[str]:
    return [phase.name for phase in result.phases]


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        # TRL: a tensor at a time; all of a PEFT model under ZeRO-3, which merges it first
        ({"framework": "trl", "sharding": "zero3"}, TENSOR),
        ({"framework": "trl", "sharding": "zero3", "method": "lora"}, WHOLE),
        ({"framework": "trl", "sharding": "fsdp2"}, TENSOR),
        ({"framework": "trl", "sharding": "fsdp2", "method": "lora"}, TENSOR),
        # FSDP1's flat unit outside the layers is the largest
        ({"framework": "trl", "sharding": "fsdp"}, OUTSIDE),
        ({"framework": "ms-swift", "sharding": "zero3"}, WHOLE),
        # move_model_batches: a layer of three, 36,992, is less than what is outside them
        (
            {
                "framework": "ms-swift",
                "sharding": "zero3",
                "engine": {"kind": "vllm-push", "sync": 3},
            },
            OUTSIDE,
        ),
        (
            {
                "framework": "trl",
                "sharding": "fsdp2",
                "engine": {"kind": "vllm-push", "sync": "model"},
            },
            WHOLE,
        ),
        ({"framework": "verl", "sharding": "fsdp2"}, TENSOR + 2**31),
        ({"framework": "verl", "sharding": "fsdp2", "method": "lora"}, 2**31),
        ({"framework": "trl", "sharding": "zero2"}, 0),
        ({"framework": "trl", "sharding": "zero3", "engine": {"kind": "vllm-server"}}, TENSOR),
    ],
)
def test_what_is_whole_while_weights_go_to_the_engine(fields: dict[str, Any], sent: int) -> None:
    zero = fields["sharding"].startswith("zero")
    own = {k: v for k, v in BUCKETS.items() if k == "reduce" or fields["sharding"] == "zero3"}
    result = planned(
        **{**GRPO, "lora": {"rank": 8}, **fields}, **({"buckets": own} if zero else {})
    )
    assert names(result)[:3] == ["load", "sync", "rollout"]
    standing = 2 * 1_000 if fields["sharding"] == "zero3" else 0
    assert terms(result, "sync").get("communication", 0) == sent + standing


def test_our_trainer_folds_a_layers_adapters_where_the_engine_does_not_serve_them() -> None:
    """Folded, one unit is whole: embeddings and head, or a layer of 36,992 and its adapters of rank 8 (8 x 1,024:
    q and o 128 rows and columns, k and v 96, MLPs 192 each), while one weight's product and sum, 64 x 128 at most,
    are beside it."""
    lora = {**GRPO, "method": "lora", "framework": "vramwise", "sharding": "fsdp2"}
    server = {"kind": "vllm-server"}
    alone = planned(**lora, lora={"rank": 8})
    assert "communication" not in terms(alone, "sync")
    for more in (
        {"lora": {"rank": 8, "dora": True}},
        {"lora": {"rank": 8, "init": "pissa"}},
        {"lora": {"rank": 8}, "engine": server | {"transfer": "nccl"}},
    ):
        assert terms(planned(**{**lora, **more}), "sync")["communication"] == OUTSIDE
    small = model_spec_from_config({**CONFIG, "vocab_size": 100}, name="toy-small")
    recipe = make_recipe(**{**lora, "lora": {"rank": 8, "init": "pissa"}})
    whole = 36_992 + 8 * 1_024 + 2 * 64 * 128
    assert terms(plan(small, recipe, gpus(4)), "sync")["communication"] == 2 * whole
    folder = planned(**{**lora, "lora": {"rank": 8}, "engine": server})
    assert "communication" not in terms(folder, "sync")


def test_the_engines_copy_is_awake_and_its_pool_is_not() -> None:
    result = planned(**GRPO, framework="trl", sharding="fsdp2")
    sync, rollout = terms(result, "sync"), terms(result, "rollout")
    assert "kv_cache" not in sync
    assert sync["engine"] > 0
    asleep = planned(**{**GRPO, "engine": {"kind": "vllm-push", "sleep_level": 2}}, framework="trl")
    woken = terms(asleep, "sync")["engine"]
    # vLLM's own 16-bit copy, vocabularies padded to 1,024 rows, and what it has asleep
    copy = 2 * (110_592 + 2 * 1_024 * 64 + 7 * 64)
    assert woken == terms(asleep, "forward")["engine"] + copy
    assert rollout["kv_cache"] > 0


def test_one_gpu_or_a_shared_engine_has_no_such_phase() -> None:
    assert "sync" not in names(planned(1, **GRPO))
    shared = {**GRPO, "method": "lora", "engine": {"kind": "vllm-shared"}}
    assert "sync" not in names(planned(1, **shared, framework="unsloth"))
    assert "sync" not in names(planned(**{**GRPO, "engine": {"kind": "transformers"}}))


def test_transformers_generate_with_all_of_a_zero_3_model() -> None:
    fields = {**GRPO, "engine": {"kind": "transformers"}, "framework": "trl"}
    zero = planned(**fields, sharding="zero3", buckets={**BUCKETS, "live": 1, "reuse": 0})
    shard, window = 2 * 59_760, 2 * (64_000 + 7 * 64)
    assert terms(zero, "rollout")["weights"] == shard + WHOLE
    assert terms(zero, "score")["weights"] == shard + window
    own = planned(
        **{**fields, "framework": "verl"},
        sharding="zero3",
        buckets={**BUCKETS, "live": 1, "reuse": 0},
    )
    assert terms(own, "rollout")["weights"] == shard + window


def host(result: Plan, name: str = "weights") -> int:
    return sum(term.bytes for term in result.host_terms if term.name == name)


def test_how_ranks_get_their_shards() -> None:
    fields = {**USUAL, "framework": "hf-trainer", "sharding": "fsdp2"}
    plain, full, first, own = (
        planned(**fields, loads=loads) for loads in (None, "full", "rank0", "sharded")
    )
    shard = terms(plain, "load")["weights"]
    assert terms(plain, "load") == {"weights": shard} == terms(own, "load")
    # whole on every GPU until it is cut, and in the host memory of each of four processes
    assert terms(full, "load") == {"weights": shard, "overhead": WHOLE}
    # the first process alone reads it; the largest module goes round whole
    assert terms(first, "load") == {"weights": shard, "communication": TENSOR}
    assert [host(each) for each in (plain, full, first, own)] == [0, 4 * WHOLE, WHOLE, 0]
    flat = planned(**{**fields, "sharding": "fsdp"}, loads="rank0")
    # FSDP1 joins a unit's tensors and cuts the joined one
    assert terms(flat, "load")["communication"] == 2 * OUTSIDE
    # zero.Init gathers a module while it is filled
    zero = planned(**{**fields, "sharding": "zero3"}, loads="sharded")
    assert terms(zero, "load")["communication"] == TENSOR
    assert "4 ranks" in zero.phase("load").terms[-1].formula


def test_saving_gathers_a_module_and_the_first_rank_holds_all() -> None:
    fields = {**USUAL, "framework": "hf-trainer", "sharding": "zero3", "buckets": BUCKETS}
    before = planned(**fields)
    whole, parts = planned(**fields, save="whole"), planned(**fields, save="sharded")
    shard = 2 * 59_760
    assert terms(whole, "save")["weights"] == shard + TENSOR
    assert terms(parts, "save")["weights"] == shard
    # the bucket and a rank's gradients are there all the time
    for each in (whole, parts):
        assert terms(each, "save")["communication"] == 2 * 1_000
        assert terms(each, "save")["gradients"] == shard
    assert (host(before), host(whole), host(parts)) == (0, WHOLE, 4 * shard)
    # a node has no more than eight of sixteen ranks
    many = planned(16, **fields, save="sharded")
    assert host(many) == 8 * 2 * 14_940
