"""Messages of every form and version: the numbers to the byte, and what contradicts itself."""

import pytest

from planner.doctor.budget import read_budget
from planner.doctor.cuda_message import parse_cuda
from planner.doctor.events import match_event
from planner.doctor.scan import scan
from planner.doctor.sizes import allocator_of, printed, segment_bytes
from planner.units import GiB, MiB

TAIL = " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.63 GiB. GPU 7 has a total capacity of 79.11 GiB"
    " of which 2.61 GiB is free. Including non-PyTorch memory, this process has 76.40 GiB memory in use. Of the allocated"
    " memory 72.15 GiB is allocated by PyTorch, with 50.00 MiB allocated in private pools (e.g., CUDA Graphs), and"
    " 3.49 GiB is reserved by PyTorch but unallocated."
) + TAIL
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 502.00 MiB (GPU 1; 39.59 GiB total capacity; 35.54 GiB already"
    " allocated; 276.19 MiB free; 37.22 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory"
)
ASYNC = (
    "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\n"
    "Currently allocated     : 16.08 GiB\nRequested               : 4.83 GiB\nDevice limit            : 22.20 GiB\n"
    "Free (according to CUDA): 11.12 MiB\nPyTorch limit (set by user-supplied memory fraction)\n                        : 22.20 GiB"
)


def test_new_form() -> None:
    message = parse_cuda(NEW)
    assert message is not None
    assert message.gpu == 7
    assert message.get("tried") == round(2.63 * GiB)
    assert message.get("alloc") == round(72.15 * GiB)
    assert message.get("private") == 50 * MiB
    assert message.get("unalloc") == round(3.49 * GiB)
    assert message.get("proc") == round(76.40 * GiB)
    assert message.text.endswith("to avoid fragmentation.")
    assert message.contradictions == ()


def test_old_form_gives_unused_memory_by_difference() -> None:
    [event] = scan(OLD).events
    budget = read_budget(event)
    assert budget is not None
    assert budget.unallocated_bytes == round(37.22 * GiB) - round(35.54 * GiB)
    assert (
        budget.fragmentation_decides
    )  # 276 MiB + 1.68 GiB hold 502 MiB, and 1.68 GiB is 4.2 % of the card


@pytest.mark.parametrize("word", ["CUDA", "HIP"])
def test_hip_reads_as_cuda(word: str) -> None:
    message = parse_cuda(NEW.replace("CUDA out", f"{word} out"))
    assert message is not None
    assert message.get("tried") == round(2.63 * GiB)


def test_misspelt_capacity_of_torch_2_1() -> None:
    message = parse_cuda(NEW.replace("capacity", "capacty"))
    assert message is not None
    assert message.get("total") == round(79.11 * GiB)


def test_async_allocator_over_several_lines() -> None:
    [event] = scan(ASYNC).events
    assert event.facts == {
        "allocated_bytes": round(16.08 * GiB),
        "tried_bytes": round(4.83 * GiB),
        "limit_bytes": round(22.20 * GiB),
        "free_bytes": round(11.12 * MiB),
        "fraction_limit_bytes": round(22.20 * GiB),
    }


def test_process_lines_own_one_is_the_smallest_that_can_hold_the_allocator() -> None:
    text = NEW.replace(
        "Including non-PyTorch memory, this process has 76.40 GiB memory in use.",
        "Process 11 has 300.00 MiB memory in use. Process 12 has 76.00 GiB memory in use.",
    )
    message = parse_cuda(text)
    assert message is not None
    assert message.others_bytes == (300 * MiB,)
    assert message.get("proc_named") == 76 * GiB


def test_zero_bytes_in_a_container_is_ignored() -> None:
    text = NEW.replace("has 76.40 GiB memory in use", "has 0 bytes memory in use").replace(
        "72.15", "48.15"
    )
    [event] = scan(text).events
    budget = read_budget(event)
    assert budget is not None
    assert budget.context_bytes is None
    assert budget.unaccounted_bytes == pytest.approx(24.86 * GiB, abs=2 * MiB)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("2.61 GiB is free", "92.61 GiB is free"), "more memory is free"),
        (
            ("72.15 GiB is allocated", "172.15 GiB is allocated"),
            "PyTorch holds more than the card has",
        ),
        (
            ("76.40 GiB memory in use", "6.40 GiB memory in use"),
            "PyTorch holds more than its process",
        ),
    ],
)
def test_contradictions_are_said(change: tuple[str, str], said: str) -> None:
    message = parse_cuda(NEW.replace(*change))
    assert message is not None
    assert any(said in sentence for sentence in message.contradictions)


def test_truncated_line_keeps_what_is_there() -> None:
    message = parse_cuda(
        "CUDA out of memory. Tried to allocate 462.00 MiB. GPU 1 has a total capacity of 79.1"
    )
    assert message is not None
    assert message.facts == {"tried_bytes": 462 * MiB}


@pytest.mark.parametrize(
    ("request_bytes", "shown"),
    [
        (1, "2.00 MiB"),
        (MiB, "2.00 MiB"),
        (MiB + 1, "20.00 MiB"),
        (10 * MiB - 512, "20.00 MiB"),
        (10 * MiB, "10.00 MiB"),
        (32001 * 4096 * 4, "502.00 MiB"),
        (5120 * 13696 * 2, "134.00 MiB"),
        (128256 * 8192 * 2, "1.96 GiB"),
    ],
)
def test_rounding_of_the_caching_allocator(request_bytes: int, shown: str) -> None:
    assert printed(segment_bytes(request_bytes)) == shown


def test_power_of_two_rounding_of_unsloth() -> None:
    unsloth = allocator_of("[32:256,64:128,256:64,>:32]")
    assert printed(segment_bytes(262208 * 2560 * 4, unsloth)) == "2.56 GiB"
    # ">" holds from the last size named on: 32 divisions of 256 MiB are steps of 8 MiB
    assert printed(segment_bytes(297 * MiB, unsloth)) == "304.00 MiB"
    assert printed(segment_bytes(600 * MiB, unsloth)) == "608.00 MiB"


@pytest.mark.parametrize(
    ("line", "kind", "fact"),
    [
        (
            "ValueError: To serve at least one request with the model's max seq len (1048576), (22.5 GiB KV cache is needed,"
            " which is larger than the available KV cache memory (17.39 GiB). Based on the available memory, the estimated"
            " maximum model length is 810208. Try increasing",
            "vllm_kv_len",
            ("estimated_len", 810208),
        ),
        (
            "The model's max seq len (4096) is larger than the maximum number of tokens that can be stored in KV cache (3664).",
            "vllm_kv_len",
            ("kv_tokens", 3664),
        ),
        (
            "Free memory on device cuda:0 (31.44/47.38 GiB) on startup is less than desired GPU memory utilization (0.95, 45.01 GiB).",
            "vllm_free_memory",
            ("gpu_memory_utilization", 0.95),
        ),
        (
            "Sleep mode freed 41.47 GiB memory, 16.93 GiB memory is still in use.",
            "sleep_line",
            ("freed_bytes", round(41.47 * GiB)),
        ),
        (
            "[123.4] Out of memory: Killed process 991 (python3) total-vm:1kB, anon-rss:2048kB, file-rss:0kB",
            "host_killed",
            ("process_rss_bytes", 2048 * 1024),
        ),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:83] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 1234567 bytes.",
            "host_alloc",
            ("host_tried_bytes", 1234567),
        ),
        (
            "MA 55.83 GB         Max_MA 56.0 GB         CA 60.0 GB         Max_CA 60 GB",
            "device_usage",
            ("allocated_bytes", round(55.83 * GiB)),
        ),
        (
            "CPU Virtual Memory:  used = 458.07 GB, percent = 95.0%",
            "host_usage",
            ("host_used_bytes", round(458.07 * GiB)),
        ),
    ],
)
def test_refusals_and_notices(line: str, kind: str, fact: tuple[str, object]) -> None:
    found = match_event(line)
    assert found is not None
    assert found[0] == kind
    assert found[2][fact[0]] == fact[1]


def test_plain_lines_are_no_events() -> None:
    text = "INFO loss 0.3\nstep 12 killed the old rate schedule\nstatus: ok\n"
    assert scan(text).events == []
