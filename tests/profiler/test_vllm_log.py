"""vLLM start-up logs of three generations become Recordings and exact advice."""

from pathlib import Path

import pytest

from planner.doctor.diagnose import diagnose
from planner.doctor.serving import serving_report
from planner.errors import UsageError
from planner.units import GiB
from profiler.recording import Recording
from profiler.vllm_log import load_measured, read_vllm_log

V1 = """
(EngineCore_DP0 pid=12) INFO 10-02 12:00:01 [core.py:65] Initializing a V1 LLM engine (v0.10.2) with config: model='meta-llama/Llama-3.1-8B-Instruct', dtype=torch.bfloat16, max_seq_len=32768, tensor_parallel_size=1, quantization=None, enforce_eager=False, kv_cache_dtype=auto
(EngineCore_DP0 pid=12) INFO 10-02 12:00:11 [gpu_model_runner.py:51] Model loading took 14.9889 GiB memory and 3.2 seconds
(EngineCore_DP0 pid=12) INFO 10-02 12:00:31 [gpu_worker.py:298] Available KV cache memory: 4.39 GiB
(EngineCore_DP0 pid=12) INFO 10-02 12:00:31 [kv_cache_utils.py:87] GPU KV cache size: 35,952 tokens
(EngineCore_DP0 pid=12) INFO 10-02 12:00:31 [kv_cache_utils.py:91] Maximum concurrency for 32,768 tokens per request: 1.10x
(EngineCore_DP0 pid=12) INFO 10-02 12:00:41 [gpu_model_runner.py:82] Graph capturing finished in 12 secs, took 0.55 GiB
"""
V0 = """
INFO 12-02 09:00:00 worker.py:232] Memory profiling takes 1.53 seconds
INFO 12-02 09:00:00 worker.py:232] the current vLLM instance can use total_gpu_memory (23.58GiB) x gpu_memory_utilization (0.90) = 21.22GiB
INFO 12-02 09:00:00 worker.py:232] model weights take 14.99GiB; non_torch_memory takes 0.06GiB; PyTorch activation peak memory takes 2.36GiB; the rest of the memory reserved for KV Cache is 3.81GiB.
INFO 12-02 09:00:00 gpu_executor.py:76] # GPU blocks: 1952, # CPU blocks: 2048
"""
SUMMARY = "INFO 01-02 [gpu_worker.py:1] Free memory on device (139.00/139.80 GiB) on startup. Desired GPU memory utilization is (0.92, 128.62 GiB). Actual usage is 15.30 GiB for consumed memory (weights + non-torch), 2.10 GiB for peak activation, and 0.60 GiB for CUDAGraph memory. Replace gpu_memory_utilization config"


def test_v1_log_becomes_a_recording() -> None:
    recording = read_vllm_log(V1)
    assert recording.source == "vllm-log"
    assert recording.environment["vllm"] == "0.10.2"
    rollout = recording.phases[-1].terms_bytes
    assert rollout == {
        "weights": round(14.9889 * GiB),
        "kv_cache": round(4.39 * GiB),
        "engine": round(0.55 * GiB),
    }
    assert recording.peak_bytes == sum(rollout.values())
    assert not recording.partial
    assert "the log does not print overhead" in recording.notes


def test_v0_budget_closes() -> None:
    found = diagnose(V0, model="meta-llama/Llama-3.1-8B-Instruct")
    report = serving_report(found.scan.vllm, found.context)
    assert report is not None
    assert report.unexplained_bytes is not None
    assert abs(report.unexplained_bytes) < 0.02 * GiB
    assert report.budget_bytes == round(21.22 * GiB)
    planned = {name: value for name, _, value in report.rows}
    assert planned["weights"] == pytest.approx(14.99 * GiB, rel=0.01)


def test_requests_are_counted_from_the_log() -> None:
    found = diagnose(V1, gpu="rtx-4090")
    report = serving_report(found.scan.vllm, found.context)
    assert report is not None
    assert dict(report.requests)[4096] == 35952 // 4096
    assert report.kv_bytes_per_token == pytest.approx(131072, rel=0.01)
    assert found.failures[0].event is None


def test_a_cache_that_holds_less_than_one_request_gives_the_length_that_starts() -> None:
    text = V1.replace("35,952", "20,000").replace("1.10x", "0.61x")
    report = serving_report(diagnose(text).scan.vllm, diagnose(text).context)
    assert report is not None
    assert any("--max-model-len 20000" in sentence for sentence in report.advice)


def test_summary_line_of_new_releases() -> None:
    log = diagnose(SUMMARY).scan.vllm
    assert (log.gpu_memory_utilization, log.budget_bytes, log.activation_bytes) == (
        0.92,
        round(128.62 * GiB),
        round(2.10 * GiB),
    )
    assert log.graphs_bytes == round(0.60 * GiB)


def test_a_failed_start_is_partial() -> None:
    cut = (
        "\n".join(V1.splitlines()[:3]) + "\nValueError: No available memory for the cache blocks.\n"
    )
    assert read_vllm_log(cut).partial


def test_json_and_log_are_told_apart(tmp_path: Path) -> None:
    log, saved = tmp_path / "server.log", tmp_path / "recording.json"
    log.write_text(V1, encoding="utf-8")
    recording = load_measured(log)
    recording.save(saved)
    assert isinstance(load_measured(saved), Recording)
    assert load_measured(saved).peak_bytes == recording.peak_bytes
    with pytest.raises(UsageError, match="no vLLM start-up lines"):
        read_vllm_log("hello\n")
