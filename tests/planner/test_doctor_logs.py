"""Whole logs: streamed, coloured, interleaved, cut, with secrets, with two errors."""

import io
import tracemalloc
from collections.abc import Iterator

import pytest

from benchmarks.doctor_logs import KINDS, measure
from planner.doctor.diagnose import diagnose
from planner.doctor.reading import is_interesting, read_lines
from planner.doctor.report import diagnosis_text
from planner.doctor.scan import scan
from planner.doctor.vllm_log import VllmLog

MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.28 GiB. GPU {rank} has a total capacity of 79.15 GiB"
    " of which 5.12 GiB is free. Including non-PyTorch memory, this process has 74.02 GiB memory in use. Of the allocated"
    " memory 71.00 GiB is allocated by PyTorch, and 1.10 GiB is reserved by PyTorch but unallocated."
)


class Endless(io.RawIOBase):
    """A stream of `blocks` filler blocks, an error, and a note of the most that was asked for."""

    def __init__(self, blocks: int) -> None:
        self.parts = self._parts(blocks)
        self.rest = b""
        self.served = 0

    def _parts(self, blocks: int) -> Iterator[bytes]:
        yield b"model_name_or_path: Qwen/Qwen2.5-7B-Instruct\n"
        for number in range(blocks):
            yield b"\x1b[32m{'loss': 0.5, 'epoch': %d}\x1b[0m\n" % number * 5000
        yield (MESSAGE.format(rank=0) + "\n").encode()

    def read(self, size: int = -1) -> bytes:  # type: ignore[override]
        while len(self.rest) < size:
            part = next(self.parts, None)
            if part is None:
                break
            self.rest += part
        out, self.rest = self.rest[:size], self.rest[size:]
        self.served += len(out)
        return out


def test_a_long_log_is_streamed() -> None:
    stream = Endless(120)
    found = scan(stream)  # type: ignore[arg-type]
    assert stream.served > 20_000_000
    assert [event.kind for event in found.events] == ["cuda_oom"]
    assert found.lines == 120 * 5000 + 2
    assert found.events[0].line == found.lines
    assert len(found.prose) < 500_000
    assert found.prose.startswith("model_name_or_path")


def test_colours_and_overprinted_progress_bars_are_removed() -> None:
    text = "\r 10%|#   | 1/10\r 20%|##  | 2/10\x1b[31;1mCUDA out of memory. Tried to \x1b[0mallocate 462.00 MiB.\x1b[K\n"
    [event] = scan(text).events
    assert event.facts == {"tried_bytes": 462 * 2**20}


def test_interleaved_ranks_are_put_together_and_merged() -> None:
    lines = []
    for part in (
        "Traceback (most recent call last):",
        '  File "loss.py", line 1, in cross_entropy',
        MESSAGE,
    ):
        lines += [f"[rank{rank}]: {part.format(rank=rank)}" for rank in range(4)]
    found = diagnose(
        "\n".join(lines)
        + "\nmodel: Qwen/Qwen2.5-7B\nper_device_train_batch_size: 8\ncutoff_len: 2048"
    )
    [failure] = found.failures
    assert failure.event is not None
    assert failure.event.ranks == ("0", "1", "2", "3")
    assert found.context.gpus == 4
    assert failure.causes[0].category == "logits_vocab"
    assert failure.candidates[0].formula.startswith("8 * 2,04")


def test_two_errors_first_cause_first() -> None:
    text = (
        'Traceback (most recent call last):\n  File "gpu_model_runner.py", in _dummy_sampler_run\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.74 GiB. GPU 0 has a total capacity of 23.57 GiB of which 605.88 MiB is free.\n"
        "The above exception was the direct cause of the following exception:\n"
        "ValueError: No available memory for the cache blocks.\n"
    )
    found = diagnose(text, model="Qwen/Qwen2.5-1.5B")
    assert [failure.event.kind for failure in found.failures if failure.event] == [
        "cuda_oom",
        "vllm_no_blocks",
    ]
    assert found.failures[0].causes[0].category == "vllm_sampler_warmup"
    assert found.failures[0].candidates[0].formula.startswith("1,024 * 151,936 * 12 B")


def test_an_old_loading_line_is_not_the_phase_of_a_later_error() -> None:
    head = "Loading checkpoint shards: 100%\n" + "step\n" * 30
    stack = 'Traceback (most recent call last):\n  File "a.py", in training_step\n  File "b.py", in scaled_dot_product_attention\n'
    found = diagnose(head + stack + MESSAGE.format(rank=0))
    assert found.failures[0].phases[0] == "attention"


def test_secrets_are_never_echoed() -> None:
    text = f"export HF_TOKEN=hf_{'a' * 34}\nwandb api_key: {'b' * 40}\n{MESSAGE.format(rank=0)} token=hf_{'c' * 34}\n"
    found = diagnose(text)
    shown = diagnosis_text(found) + repr(found.context.text)
    assert "hf_aaa" not in shown
    assert "bbbb" not in shown
    assert "hf_ccc" not in shown


def test_a_line_of_megabytes_and_bytes_that_are_no_text() -> None:
    data = b"\xff\xfe" + b"x" * 3_000_000 + b"\n" + MESSAGE.format(rank=0).encode() + b"\n\x00\x80"
    found = scan(io.BytesIO(data))
    assert [event.kind for event in found.events] == ["cuda_oom"]


def test_many_errors_are_capped_and_said() -> None:
    text = "\n\n".join(
        MESSAGE.format(rank=0).replace("9.28", f"{9 + number / 100:.2f}") for number in range(900)
    )
    found = diagnose(text)
    assert len(found.failures) == 20
    assert any("880 further errors" in note for note in found.notes)


def test_nothing_to_read_is_unknown_not_a_guess() -> None:
    for text in ("", "Segmentation fault (core dumped)", "RuntimeError: CUDA error: out of memory"):
        cause = diagnose(text).failures[0].causes[0]
        assert (cause.category, cause.certainty.value) == ("unknown", "unknown")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "seed",
    [
        "1",
        "9,",
        "1.",
        "(",
        " ",
        "CUDA out of memory. ",
        "Process 1 has ",
        "batch 1",
        "train embed",
        "1: 2 GB ",
    ],
)
def test_hostile_lines_take_linear_time(seed: str) -> None:
    """A quadratic pattern takes minutes on these."""
    line = seed * (15_000 // len(seed))
    found = diagnose(f"CUDA out of memory. {line}\n{line}\n")
    assert found.failures[0].causes[0].certainty.value != "proven by arithmetic"


@pytest.mark.parametrize(
    "line",
    [
        "CUDA out of memory. Tried to allocate 1.00 GiB",
        "Allocation on device 0 would exceed allowed memory.",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "std::bad_alloc",
        "MemoryError",
        "numpy: Unable to allocate 3.5 GiB for an array",
        "max seq len (4096) is larger than the maximum number of tokens that can be stored in KV cache (1216)",
        "Free memory on device (1.0/2.0 GiB) on startup is less than desired GPU memory utilization (0.9, 1.8 GiB)",
        "Sleep mode freed 1.00 GiB memory, 2.00 GiB memory is still in use.",
        "slurmstepd: error: Detected 1 oom_kill event",
        "Memory on the node (IP: 1) was 4.00GB / 5.00GB",
        "MA 1.0 GB Max_MA 1.0 GB CA 1.0 GB Max_CA 1 GB",
        "failed (exitcode: -9)",
        "Model loading took 14.99 GiB memory and 3.2 seconds",
        "Graph capturing finished in 12 secs, took 0.55 GiB",
        "GPU KV cache size: 35,952 tokens",
    ],
)
def test_no_block_with_something_to_say_is_skipped(line: str) -> None:
    """Far into a log, blocks without any anchor are dropped unread."""
    assert is_interesting(b"nothing here\n" + line.encode() + b"\n")
    assert not is_interesting(b"{'loss': 0.5, 'epoch': 1.0}\n" * 9)
    found = scan(line)
    assert found.events or found.vllm != VllmLog()


def test_refusals_broken_by_a_narrow_terminal() -> None:
    text = (
        "(EngineCore pid=316) ValueError: To serve at least one request with the model's max seq len (100000), (4.26 GiB KV cach\n"
        "e is needed, which is larger than the available KV cache memory (4.25 GiB). Based on the avai\n"
    )
    [event] = scan(text).events
    assert event.facts["max_seq_len"] == 100000
    assert event.facts["available_bytes"] == round(4.25 * 2**30)


def test_a_message_broken_by_a_rich_traceback() -> None:
    text = (
        "│ ❱  905 │   │   │   return t.to(device, dtype if t.is_floating_point() else None)\n"
        "RuntimeError: CUDA out of memory. Tried to allocate 162.00 MiB (GPU 2; 79.35 GiB\n"
        "total capacity; 77.00 GiB already allocated; 146.19 MiB free; 77.01 GiB reserved\n"
        "in total by PyTorch) If reserved memory is >> allocated memory try setting \n"
        "model: opt-66b\n"
    )
    found = diagnose(text)
    assert found.parsed["reserved_bytes"] == round(77.01 * 2**30)
    assert found.failures[0].causes[0].category == "full_copy_per_gpu"


def test_rank_bars_of_other_launchers() -> None:
    text = "\n".join(
        f"rank:  {rank} | 2022-04-03 18:44:26,615 CRITICAL | {MESSAGE.format(rank=rank)}"
        for rank in range(3)
    )
    [event] = scan(text).events
    assert event.ranks == ("0", "1", "2")


CAUGHT = "caught CUDA out of memory, skipping batch {}\n"
FATAL = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.06 GiB is free.\n"


def repeated(lines: int, middle: str = "", end: str = "") -> io.BytesIO:
    """Return a log that says the same of every step, with something of its own in the middle and at the end."""
    half = "".join(CAUGHT.format(step) for step in range(lines // 2))
    return io.BytesIO((half + middle + half + end).encode())


def test_a_message_of_every_step_is_not_read_at_every_step() -> None:
    source = repeated(200_000)
    numbers = [line.number for line in read_lines(source)]
    assert len(numbers) < 60_000  # the beginning, some windows, the end
    assert numbers[-1] == 200_000


@pytest.mark.parametrize(
    ("middle", "kind"),
    [
        (FATAL, "cuda_oom"),
        ("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0.\n", "host_killed"),
        ("ValueError: Free memory on device (3.22/4.0 GiB) on startup is less than desired GPU memory utilization (0.9, 3.6 GiB).\n", "vllm_free_memory"),
    ],
)  # fmt: skip
def test_what_is_new_among_repeated_messages_is_found(middle: str, kind: str) -> None:
    found = scan(repeated(48_000, middle))
    event = next(event for event in found.events if event.line == 24_001)
    assert event.kind == kind
    if kind == "cuda_oom":
        assert event.cuda is not None
        assert event.cuda.printed["tried"] == "2.50 GiB"


def test_the_end_of_repeated_messages_is_read_whole() -> None:
    numbered = "".join(
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {step}.00 GiB.\n"
        for step in range(2, 40)
    )
    found = scan(repeated(48_000, end=numbered))
    tried = [event.cuda.printed.get("tried") for event in found.events if event.cuda]
    assert "39.00 GiB" in tried


def test_a_line_without_an_end_is_not_kept() -> None:
    source = io.BytesIO(b"tensor(0.25), " * 1_500_000 + b"\n" + FATAL.encode())
    tracemalloc.start()
    try:
        (event,) = scan(source).events
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert event.cuda is not None
    assert peak < 16 * 2**20  # of 21 MB


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_memory_does_not_follow_the_size_of_a_log(kind: str) -> None:
    found = measure(kind, 150 * 10**6)
    assert found["error_found"]
    assert found["rss_mib"] < 150
