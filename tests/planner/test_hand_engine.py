"""Engines beside a trainer, by hand: vLLM's own copy, slots, largest step, pool, and what sleeps.

The toy (tests/planner/toys.py) in vLLM 0.32: linears 110,592, norms 448, two vocabularies padded to 1,024 rows,
all in 16 bit: 221,184 + 896 + 2 x 131,072 = 484,224. One adapter slot of rank 8, A and B of every linear
(1,024 columns and rows a layer), of the head and of the embedding (1,064 each): 16 B x 5,200 = 83,200.
One step of 8,192 tokens: attention's output 64, residuals 128, gate, up and product 384: 576 x 2 B each.
"""

from dataclasses import replace
from typing import Any

import pytest

from planner.families import model_spec_from_config
from planner.machines.machine import make_machine
from planner.machines.vllm_overheads import Measured
from planner.plan import Plan
from planner.quant.schemes import chosen
from planner.quant.table import tensors
from planner.run.resolved import Resolved
from planner.terms.engine import (
    capture_sizes,
    captured,
    engine_costs,
    kv_sequence_bytes,
    outside_torch,
)
from planner.terms.vllm_blocks import VllmKv
from planner.terms.vllm_profile import layer_width, profile
from planner.terms.vllm_weights import vllm_weights
from planner.units import GiB
from tests.planner.toys import CONFIG, CUBLAS, LLAMA, choices, gpus, host, planned, terms

COPY, SLOT, STEP = 484_224, 83_200, 8_192 * 576 * 2
KERNELS = 85_899_346
WEIGHTS_SPREAD, PEAK_SPREAD = 0.015, 0.03
"""data/calibration/vllm.json: kernels_bytes, typical; spreads of weights and of the profile's peak."""
SEQUENCE = 16 * 384
"""16 tokens x 3 layers x (key + value) x 2 heads x 16 x 2 B."""


def grpo(kind: str, **engine: Any) -> Plan:
    """Return the plan of a GRPO run on 64 GiB, 8 sequences at once."""
    return planned(
        task="grpo",
        method="lora",
        lora={"rank": 8},
        num_generations=8,
        engine={"kind": kind, "cuda_graphs": False, **engine},
    )


def test_a_pushed_policy_has_a_second_copy() -> None:
    found = terms(grpo("vllm-push"), "rollout")
    assert found["engine"] == COPY + SLOT + KERNELS + STEP
    # as many as are generated at once
    assert found["kv_cache"] == 8 * SEQUENCE
    assert terms(grpo("vllm-push", max_num_seqs=3), "rollout")["kv_cache"] == 3 * SEQUENCE


def test_a_shared_policy_has_none() -> None:
    assert terms(grpo("vllm-shared"), "rollout")["engine"] == SLOT + KERNELS + STEP


def test_a_server_elsewhere_takes_nothing_here() -> None:
    found = terms(grpo("vllm-server"), "rollout")
    assert "engine" not in found
    assert "kv_cache" not in found


def test_a_stated_pool_and_a_share_of_the_card() -> None:
    assert terms(grpo("vllm-push", kv_bytes=10**9), "rollout")["kv_cache"] == 10**9
    [term] = [
        t
        for t in grpo("vllm-push", kv_bytes=10 * SEQUENCE).phase("rollout").terms
        if t.name == "kv_cache"
    ]
    assert term.formula == "the size stated: 10.0 sequences of 16 tokens x 6,144 B"
    pool = terms(grpo("vllm-push", gpu_memory_utilization=0.25), "rollout")["kv_cache"]
    assert pool == 16 * GiB - COPY - SLOT - KERNELS - STEP
    # a shared policy's weights count against the share too: 478,080
    pool = terms(grpo("vllm-shared", gpu_memory_utilization=0.25), "rollout")["kv_cache"]
    assert pool == 16 * GiB - 478_080 - SLOT - KERNELS - STEP


def test_what_stays_while_the_trainer_works() -> None:
    awake = grpo("vllm-push", sleep_level=0, kv_bytes=10**9)
    assert terms(awake, "backward")["engine"] == COPY + SLOT + KERNELS + 10**9
    assert host(awake) == {}
    for level in (1, 2):
        asleep = grpo("vllm-push", sleep_level=level, kv_bytes=10**9)
        for phase in ("score", "forward", "loss", "backward", "step"):
            assert terms(asleep, phase)["engine"] == SLOT + KERNELS
        assert host(asleep) == ({"engine": COPY} if level == 1 else {})


def test_a_pool_below_one_sequence_refuses() -> None:
    assert grpo("vllm-push", kv_bytes=SEQUENCE).problem == ""
    refused = grpo("vllm-push", kv_bytes=SEQUENCE - 1)
    assert refused.problem.startswith("vLLM's KV pool of")
    assert not refused.fits


def serving(machine: Any = None, **engine: Any) -> Plan:
    """Return the plan of a server on 64 GiB."""
    engine = {"cuda_graphs": False, "max_num_seqs": 4, "max_num_batched_tokens": 512, **engine}
    return planned(
        machine=machine or gpus(1),
        task="serve",
        framework="vllm",
        micro_batch_size=None,
        engine=engine,
    )


def test_a_server_by_its_lines() -> None:
    result = serving(gpu_memory_utilization=0.5)
    found = result.serving
    assert found is not None
    rotary = 4_096 * 16 * 2
    step = 512 * 576 * 2
    assert found.weights_bytes == COPY + rotary
    assert found.activation_peak_bytes == step + CUBLAS
    assert found.budget_bytes == 32 * GiB
    pool = 32 * GiB - (COPY + rotary) - CUBLAS - KERNELS - step
    assert found.kv.typical == pool
    # the interval is what the kernels may take more or less, and the spread of weights and profile
    either = int(WEIGHTS_SPREAD * (COPY + rotary) + PEAK_SPREAD * step)
    assert found.kv.low == pool - (214_748_364 - KERNELS) - either
    assert found.kv.high == pool + (KERNELS - 10_485_760) + either
    blocks = pool // (16 * 384)
    assert found.pool is not None
    assert found.pool.num_blocks == blocks
    assert found.kv_tokens == blocks * 16
    assert found.max_concurrency == blocks
    assert terms(result, "rollout") == {
        "weights": COPY + rotary,
        "kv_cache": pool,
        "engine": KERNELS + step,
        "overhead": CUBLAS,
    }
    assert terms(result, "load") == {"weights": COPY + rotary}


def test_a_server_holds_its_largest_phase() -> None:
    result = serving(gpu_memory_utilization=0.5)
    assert result.reserved_peak_bytes == sum(terms(result, "rollout").values())


def test_a_stated_pool_has_no_interval() -> None:
    found = serving(kv_bytes=10**9).serving
    assert found is not None
    assert found.kv == (10**9, 10**9, 10**9)
    assert found.budget_bytes == 0


@pytest.mark.parametrize(
    ("ranks", "stages", "each"), [(1, 1, 6_144), (2, 1, 3_072), (4, 1, 3_072), (1, 3, 2_048)]
)
def test_one_sequence_on_one_rank(ranks: int, stages: int, each: int) -> None:
    engine = {"tensor_parallel": ranks, "pipeline_parallel": stages}
    r = choices(LLAMA, gpus(4), task="serve", framework="vllm", engine=engine, context=15)
    assert kv_sequence_bytes(LLAMA, r) == each  # 15 tokens take a block of 16


def sizes(framework: str, sequences: int, **engine: Any) -> tuple[int, ...]:
    """Return the batch sizes that a release captures."""
    engine = {"max_num_seqs": sequences, **engine}
    return capture_sizes(choices(LLAMA, task="serve", framework=framework, engine=engine))


def test_captured_sizes_of_few_sequences() -> None:
    for sequences, expected in (
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 4)),
        (4, (1, 2, 4)),
        (5, (1, 2, 4, 8)),
        (8, (1, 2, 4, 8)),
        (9, (1, 2, 4, 8, 16)),
    ):
        assert sizes("vllm==0.7.3", sequences) == expected
    # V0 captures as many as it serves: 1, 2, 4 and 125 multiples of 8
    assert sizes("vllm==0.7.3", 1000)[-1] == 1000
    assert len(sizes("vllm==0.7.3", 1000)) == 128
    assert sizes("vllm", 1, max_num_batched_tokens=1) == (1,)


def test_engine_of_the_training_model_is_its_cache() -> None:
    r: Resolved = choices(task="grpo", engine={"kind": "transformers"}, num_generations=4)
    found = engine_costs(LLAMA, r, make_machine(vram="64GiB"), 0)
    assert found.kv.bytes == 4 * SEQUENCE
    assert (found.work.bytes, found.resident.bytes, found.host.bytes) == (0, 0, 0)


def test_tokens_of_a_pool_counted_both_ways() -> None:
    pool = VllmKv(
        num_blocks=100, bytes_per_block=50, blocks_per_sequence=8, max_model_len=128, groups=2
    )
    assert pool.concurrency == 12.5
    assert pool.tokens == 1600
    assert pool.bytes_per_sequence == 400
    assert pool.of_tokens(800).num_blocks == 50
    old = VllmKv(
        num_blocks=100, bytes_per_block=50, blocks_per_sequence=8, max_model_len=128, groups=2,
        block_tokens=32, prints="groups",
    )  # fmt: skip
    assert old.tokens == 50 * 32
    assert old.concurrency == 12.5
    assert old.of_tokens(320).num_blocks == 20
    one = VllmKv(
        num_blocks=100,
        bytes_per_block=50,
        blocks_per_sequence=8,
        max_model_len=100,
        prints="groups",
    )
    assert one.concurrency == 16.0  # 1,600 tokens of 100


def test_image_positions_make_the_rotary_table_four_times_as_long() -> None:
    images = replace(LLAMA, model_type="qwen2_5_vl")
    r = choices(images, task="serve", framework="vllm")
    assert vllm_weights(images, r).rotary == 4 * 4_096 * 16 * 2


def test_a_narrow_mlp_leaves_attention_the_widest() -> None:
    thin = model_spec_from_config({**CONFIG, "intermediate_size": 32})
    layer = thin.layers[0]
    # hidden, residual and output 3 x 64; q, k and v 128 and the context 64
    r = choices(thin, task="serve", framework="vllm")
    assert layer_width(thin, layer, r) == 192 + 192
    halved = choices(thin, gpus(2), task="serve", framework="vllm", engine={"tensor_parallel": 2})
    assert layer_width(thin, layer, halved) == 192 + 96


def test_rows_of_the_sampler() -> None:
    # 0.32: 16-bit logits alone and their rows' hidden states; many rows outgrow the layers
    engine = {"max_num_seqs": 4096, "max_num_batched_tokens": 8192, "cuda_graphs": False}
    r = choices(task="serve", framework="vllm==0.10.2", engine=engine)
    found = profile(LLAMA, r)
    # 38 B a logit; all tokens' hidden states stay, and those of the rows
    assert found.sampler == 4096 * 1000 * 38 + (8192 + 4096) * 64 * 2
    assert found.layers == STEP
    assert found.peak == found.sampler
    few = profile(LLAMA, replace(r, max_num_seqs=10_000, max_num_batched_tokens=512))
    assert few.logits == 512 * 1000  # no more rows than tokens


def test_vectors_are_never_stored_quantised() -> None:
    q = replace(LLAMA.layers[0].modules[0], shapes=((64, 64), (64,)))
    found = list(tensors(q, chosen("fp8", double_quant=False)))
    assert found == [((64, 64), True), ((64,), False)]


@pytest.mark.parametrize(
    ("low", "typical", "risk"),
    [
        # a request of 400 B: at the 5% of the pool, half way to its median, at the median, and beyond
        (400, 600, 0.0),
        (300, 500, 0.275),
        (200, 400, 0.5),
        (100, 300, 0.725),
        (100, 200, 1.0),
        (300, 300, 0.0),
    ],
)
def test_the_risk_that_a_pool_is_too_small(low: int, typical: int, risk: float) -> None:
    found = serving(gpu_memory_utilization=0.5).serving
    assert found is not None
    pool = VllmKv(
        num_blocks=9, bytes_per_block=50, blocks_per_sequence=8, max_model_len=128, groups=1
    )
    each = replace(found, pool=pool, kv=Measured(low, typical, 900))
    assert each.refusal_risk == pytest.approx(risk)
    assert replace(each, pool=None).refusal_risk == 0


def test_a_budget_with_the_context_and_graphs() -> None:
    machine = make_machine("h100-sxm")
    r = choices(task="serve", framework="vllm==0.8.5")
    # the context as measured has its kernels loaded; how many is what is uncertain
    context, most = machine.context_bytes, 214_748_364
    assert outside_torch(r, machine) == (context - most, context, context + most)
    found = serving(gpu_memory_utilization=0.5, cuda_graphs=True).serving
    assert found is not None
    engine = {"max_num_seqs": 4, "max_num_batched_tokens": 512, "gpu_memory_utilization": 0.5}
    drawing = choices(task="serve", framework="vllm", engine={**engine, "cuda_graphs": True})
    graphs = captured(LLAMA, drawing, estimated=True)
    assert graphs.low < graphs.typical < graphs.high
    rotary, step = 4_096 * 16 * 2, 512 * 576 * 2
    either = int(WEIGHTS_SPREAD * (COPY + rotary) + PEAK_SPREAD * step)
    pool = found.kv.typical
    more = (214_748_364 - KERNELS) + (graphs.high - graphs.typical) + either
    less = (KERNELS - 10_485_760) + (graphs.typical - graphs.low) + either
    assert (found.kv.low, found.kv.high) == (pool - more, pool + less)


def test_the_newer_runner_measures_its_graphs_and_the_older_one_reckons_them() -> None:
    engine = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
    known = {
        version: choices(task="serve", framework=f"vllm=={version}", engine=engine)
        for version in ("0.22.0", "0.32.0")
    }
    taken = {v: captured(LLAMA, r, estimated=True).typical for v, r in known.items()}
    drawn = {v: captured(LLAMA, r).typical for v, r in known.items()}
    assert taken["0.32.0"] == drawn["0.32.0"] == drawn["0.22.0"] < taken["0.22.0"]


def test_a_server_of_transformers_divides_its_weights() -> None:
    engine = {"kind": "transformers", "tensor_parallel": 7}
    found = planned(machine=gpus(7), task="serve", micro_batch_size=None, engine=engine)
    assert terms(found, "load") == {"weights": -(-478_080 // 7)}


def test_training_goes_on_beside_a_server_elsewhere() -> None:
    found = terms(grpo("vllm-server"), "rollout")
    # weights, adapters of 24,576 parameters in fp32 and their two states, two workspaces
    assert found == {
        "weights": 478_080,
        "adapters": 98_304,
        "optimizer": 196_608,
        "overhead": 2 * CUBLAS,
    }


def test_one_rank_of_transformers_holds_all() -> None:
    found = planned(task="serve", micro_batch_size=None, engine={"kind": "transformers"})
    (weights,) = found.phase("load").terms
    assert weights.bytes == 478_080
    assert "ranks" not in weights.formula


def test_no_more_sequences_than_are_generated() -> None:
    assert terms(grpo("vllm-push", max_num_seqs=100), "rollout")["kv_cache"] == 8 * SEQUENCE
