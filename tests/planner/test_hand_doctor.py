"""The doctor's arithmetic on a message: shares of the card and what fragmentation could have done, by hand."""

from dataclasses import replace

import pytest

from planner.doctor.budget import Budget, foreign_bytes, read_budget
from planner.doctor.context import read_context
from planner.doctor.scan import scan
from planner.doctor.serving import ServingReport, serving_report
from planner.doctor.vllm_log import VllmLog, read_vllm_line
from planner.units import GiB


def read(
    tried: str, free: str, proc: str, alloc: str, unalloc: str, total: str = "80.00 GiB"
) -> Budget:
    """Return the budget of a message of today's form."""
    text = (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total "
        f"capacity of {total} of which {free} is free. Including non-PyTorch memory, this process "
        f"has {proc} memory in use. Of the allocated memory {alloc} is allocated by PyTorch, and "
        f"{unalloc} is reserved by PyTorch but unallocated."
    )
    [event] = scan(text).events
    budget = read_budget(event)
    assert budget is not None
    return budget


def test_every_part_of_the_card() -> None:
    found = read("4.00 GiB", "1.00 GiB", "60.00 GiB", "50.00 GiB", "8.00 GiB")
    assert found.requested_bytes == 4 * GiB
    assert found.shortfall_bytes == 3 * GiB
    assert found.context_bytes == 2 * GiB  # 60 - 50 - 8
    assert found.other_bytes == 19 * GiB  # 80 - 1 - 60
    assert found.unaccounted_bytes == 21 * GiB  # 80 - 1 - 50 - 8
    assert foreign_bytes(found) == 19 * GiB
    assert not found.tiny_request


@pytest.mark.parametrize(
    ("tried", "free", "unalloc", "decides"),
    [
        ("4.00 GiB", "1.00 GiB", "8.00 GiB", True),  # 9 GiB in holes
        ("9.00 GiB", "1.00 GiB", "8.00 GiB", True),
        ("9.01 GiB", "1.00 GiB", "8.00 GiB", False),
        ("3.00 GiB", "1.00 GiB", "2.07 GiB", True),  # 2.583% of 80 GiB are 2.067
        ("3.00 GiB", "1.00 GiB", "2.06 GiB", False),  # less is ordinary
        ("20.00 MiB", "0 bytes", "8.00 GiB", False),  # the smallest segment says nothing
        ("22.00 MiB", "0 bytes", "8.00 GiB", True),
    ],
)
def test_when_fragmentation_decides(tried: str, free: str, unalloc: str, decides: bool) -> None:
    found = read(tried, free, "70.00 GiB", "60.00 GiB", unalloc)
    assert found.fragmentation_decides is decides
    assert found.tiny_request is (tried == "20.00 MiB")


def test_no_context_is_larger_than_the_largest_seen() -> None:
    def foreign(rest: int) -> int:
        return foreign_bytes(
            Budget(
                requested_bytes=GiB,
                total_bytes=80 * GiB,
                free_bytes=0,
                allocated_bytes=80 * GiB - rest,
                unallocated_bytes=0,
                context_bytes=None,
                other_bytes=None,
                unaccounted_bytes=rest,
                shortfall_bytes=GiB,
                fragmentation_decides=False,
                tiny_request=False,
            )
        )

    # data/calibration/doctor.json: 2.58 GiB, NCCL and vLLM's graphs beside it
    assert foreign(2_768_513_270) == 0
    assert foreign(2_768_513_271) == 2_768_513_271


def test_the_old_forms_unused_memory_is_a_difference() -> None:
    text = (
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 24.00 GiB total capacity; "
        "15.00 GiB already allocated; 1.00 GiB free; 20.00 GiB reserved in total by PyTorch)"
    )
    [event] = scan(text).events
    found = read_budget(event)
    assert found is not None
    assert found.unallocated_bytes == 5 * GiB
    assert found.unaccounted_bytes == 3 * GiB
    assert found.context_bytes is None
    assert found.fragmentation_decides


def test_a_process_holds_no_less_than_its_tensors() -> None:
    found = read("4.00 GiB", "1.00 GiB", "57.00 GiB", "50.00 GiB", "8.00 GiB")
    assert found.context_bytes == 0


ENGINE = """\
Initializing a V1 LLM engine (v0.10.0) with config: model='meta-llama/Llama-3.1-8B-Instruct', max_seq_len=8192
Model loading took 14.9596 GiB and 3.2 seconds
Available KV cache memory: 40.00 GiB
Maximum concurrency for 8,192 tokens per request: {concurrency}x
"""


def advice(concurrency: str) -> tuple[str, ...]:
    """Return the advice on 40 GiB of pool: 327,680 tokens of 131,072 B, 40 requests of 8,192."""
    text = ENGINE.format(concurrency=concurrency)
    log = VllmLog()
    for line in text.splitlines():
        log = read_vllm_line(log, line)
    found = serving_report(log, read_context(text, gpu="h100"))
    assert found is not None
    return found.advice


def test_a_printed_concurrency_within_two_percent_is_the_same() -> None:
    assert "327,680 tokens of KV cache hold 40.00 requests of 8,192 tokens" in advice("40.00")
    for printed, other in (("39.30", False), ("40.70", False), ("39.00", True), ("41.00", True)):
        assert any("the log says" in line for line in advice(printed)) is other


def report(pool: str) -> ServingReport:
    """Return the report on an engine with this pool."""
    text = ENGINE.format(concurrency="1.00").replace("40.00 GiB", pool)
    log = VllmLog()
    for line in text.splitlines():
        log = read_vllm_line(log, line)
    found = serving_report(log, read_context(text, gpu="h100"))
    assert found is not None
    return found


def test_requests_of_every_length() -> None:
    # 131,072 B a token: 0.5 GiB are 4,096 tokens, 40 GiB 327,680
    assert report("0.50 GiB").requests == ((1_024, 4), (2_048, 2), (4_096, 1))
    assert report("40.00 GiB").requests == (
        (8_192, 40),
        (16_384, 20),
        (32_768, 10),
        (65_536, 5),
        (131_072, 2),
        (262_144, 1),
    )


def test_a_pool_below_one_request_names_the_longest_that_starts() -> None:
    longest = "--max-model-len 4096 is the longest that starts"
    assert longest in report("0.50 GiB").advice
    assert not any("longest" in line for line in report("1.00 GiB").advice)  # exactly 8,192


def test_what_a_hundredth_of_the_card_is_worth() -> None:
    text = ENGINE.format(concurrency="40.00")
    log = VllmLog()
    for line in text.splitlines():
        log = read_vllm_line(log, line)
    log = replace(log, total_bytes=80 * GiB, gpu_memory_utilization=0.9)
    found = serving_report(log, read_context(text, gpu="h100"))
    assert found is not None
    # 0.8 GiB are 6,553 tokens of 131,072 B
    worth = "every 0.01 of --gpu-memory-utilization is 819.20 MiB, 6,553 tokens more"
    assert worth in found.advice
    assert found.budget_bytes == 72 * GiB
