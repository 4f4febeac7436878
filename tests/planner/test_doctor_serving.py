"""A vLLM log beside the plan of its own settings: hand-computed tokens, shares and refusals."""

import pytest

from planner.doctor.context import read_context
from planner.doctor.serving import planned_engine, serving_report
from planner.doctor.state import served_bytes
from planner.doctor.vllm_log import VllmLog, read_vllm_line
from planner.units import GiB

HEALTHY = """\
Initializing a V1 LLM engine (v0.10.0) with config: model='meta-llama/Llama-3.1-8B-Instruct', max_seq_len=8192, dtype=torch.bfloat16, tensor_parallel_size=1, pipeline_parallel_size=1, quantization=None, enforce_eager=False, kv_cache_dtype=auto
Model loading took 14.9596 GiB and 3.2 seconds
Available KV cache memory: 53.20 GiB
"""


def read(text: str) -> VllmLog:
    log = VllmLog()
    for line in text.splitlines():
        log = read_vllm_line(log, line)
    return log


def report(text: str, gpu: str = "h100"):
    return serving_report(read(text), read_context(text, gpu=gpu))


def test_a_healthy_pool_holds_its_tokens_by_hand():
    # 32 layers x 2 tensors x 8 heads x 128 x 2 B = 131,072 B a token, in blocks of 16 tokens
    found = report(HEALTHY)
    pool = round(53.20 * GiB)
    tokens = pool // (131_072 * 16) * 16
    assert tokens == pytest.approx(435_814, abs=16)
    said = f"{tokens:,} tokens of KV cache hold {tokens / 8192:.2f} requests of 8,192 tokens"
    assert said in found.advice
    assert found.kv_bytes_per_token == pytest.approx(131_072, rel=1e-4)
    assert dict(found.requests)[8192] == tokens // 8192 == 53


def test_two_ranks_share_the_cache_by_hand():
    # 8 key heads over 2 ranks: half the bytes a token on each, so twice the tokens
    halved = report(HEALTHY.replace("tensor_parallel_size=1", "tensor_parallel_size=2"))
    assert halved.kv_bytes_per_token == pytest.approx(65_536, rel=1e-4)


def test_the_planned_column_is_the_plan_of_the_logs_own_settings():
    rows = {name: (logged, planned) for name, logged, planned in report(HEALTHY).rows}
    for name in ("weights", "activation", "KV cache", "CUDA graphs", "non-torch"):
        assert rows[name][1], name
    logged, planned = rows["weights"]
    assert planned == pytest.approx(logged, rel=0.01)
    assert rows["KV cache"][1] == pytest.approx(53.2 * GiB, rel=0.05)


def test_settings_of_the_log_reach_the_plan():
    text = HEALTHY.replace("quantization=None", "quantization=fp8, max_num_seqs=64").replace(
        "pipeline_parallel_size=1", "pipeline_parallel_size=2"
    )
    log = read(text)
    resolved = planned_engine(log, read_context(text, gpu="h100")).resolved
    assert (resolved.pipeline_parallel, resolved.max_num_seqs) == (2, 64)
    assert resolved.quantization == "fp8"
    assert not resolved.framework.versions or "0.10" in resolved.framework_asked


def test_a_rank_serves_its_share_of_the_weights():
    context = read_context("vllm serve meta-llama/Llama-3.1-8B-Instruct --tensor-parallel-size 2")
    whole = read_context("vllm serve meta-llama/Llama-3.1-8B-Instruct")
    norms_and_rotary = 0.05 * GiB
    assert served_bytes(context) == pytest.approx(served_bytes(whole) / 2, abs=norms_and_rotary)


def test_a_log_without_an_engine_has_no_report():
    assert serving_report(VllmLog(), read_context("nothing here")) is None
