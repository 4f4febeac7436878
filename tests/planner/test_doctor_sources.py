"""Logs as people keep them: encodings, wrappings, compressed files and a directory of one file a rank."""

import bz2
import gzip
import io
import json
import lzma
from pathlib import Path

import pytest

import planner.verbs.explain
from planner.doctor.diagnose import Diagnosis, diagnose
from planner.doctor.report import diagnosis_dict, diagnosis_text
from planner.doctor.sources import open_log
from planner.errors import UsageError

MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 15.66 GiB. GPU 0 has a total capacity of 79.10 GiB"
    " of which 9.06 GiB is free. Including non-PyTorch memory, this process has 70.03 GiB memory in use. Of the allocated"
    " memory 68.92 GiB is allocated by PyTorch, and 606.13 MiB is reserved by PyTorch but unallocated."
)
LOG = (
    "Traceback (most recent call last):\n"
    '  File "loss.py", line 5, in ForCausalLMLoss\n'
    f"    logits = logits.float()\n{MESSAGE}\n"
)
BUS = "RuntimeError: DataLoader worker (pid 3) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory.\n"


def each_line(before: str) -> str:
    return "".join(f"{before}{line}\n" for line in LOG.splitlines())


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xfe" + LOG.encode("utf-16-le"),
        b"\xfe\xff" + LOG.encode("utf-16-be"),
        LOG.encode("utf-16-le"),
        LOG.encode("utf-16-be"),
        b"\xef\xbb\xbf" + LOG.replace("\n", "\r\n").encode(),
        LOG.replace("OutOfMemoryError", "\x1b[0;31mOutOfMemoryError\x1b[0m").encode(),
        LOG.replace("OutOfMemoryError", "\\u001b[0;31mOutOfMemoryError\\u001b[0m").encode(),
        json.dumps({"traceback": LOG.split("\n")}, indent=1).encode(),
        (
            "<pre>" + LOG.replace('"', "&quot;").replace("Tried to", '<span class="ansi-bold">Tried</span> to') + "</pre>"
        ).encode(),
        each_line("> ").encode(),
        each_line("[default3]:[rank3]: ").encode(),
        each_line("(WorkerDict pid=12, ip=10.0.0.1) [rank3]: ").encode(),
        each_line("2025-12-03T11:15:20.7959561Z ").encode(),
        ("$ python train.py\n" + LOG).encode(),
        ("```\n" + LOG + "```\n").encode(),
        ("\rstep 1/9" * 40_000 + "\n" + LOG).encode(),
    ],
    ids=[
        *("utf-16", "utf-16-be", "utf-16 unmarked", "utf-16-be unmarked", "windows", "coloured"),
        *("colours written out", "notebook", "html", "quoted", "tee", "ray", "stamped", "prompt", "fence", "bar"),
    ],
)  # fmt: skip
def test_however_it_is_pasted(data: bytes) -> None:
    (failure,) = diagnose(io.BytesIO(data)).failures
    assert failure.budget is not None
    assert failure.budget.requested_bytes == 16_814_796_964
    assert failure.causes[0].category == "logits_vocab"


def test_a_frame_of_module_level_is_no_tag() -> None:
    (failure,) = diagnose(
        io.BytesIO(f'  File "a.py", line 3, in <module>\n<b>{MESSAGE}</b>\n'.encode())
    ).failures
    assert failure.event is not None
    assert "<module>" in failure.event.stack[0]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_compressed_log(tmp_path: Path, pack: object) -> None:
    path = tmp_path / "train.log.packed"
    path.write_bytes(pack(LOG.encode()))  # type: ignore[operator]
    with open_log(path) as source:
        assert diagnose(source).failures[0].causes[0].category == "logits_vocab"


def test_a_damaged_archive_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "train.log.gz"
    path.write_bytes(gzip.compress(LOG.encode() * 50)[:200])
    with pytest.raises(UsageError, match="cannot read"):
        planner.verbs.explain.explain(str(path))


def ranks(tmp_path: Path) -> Path:
    """Write what torchrun's --log-dir leaves: one file a rank, only two of which say why."""
    said = {0: "RuntimeError: another rank is gone\n", 1: LOG, 2: BUS}
    for rank, text in said.items():
        folder = tmp_path / "job" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text("step 1\nstep 2\n")
        (folder / "stderr.log").write_text(text)
    return tmp_path


def read(path: Path) -> Diagnosis:
    with open_log(path) as source:
        return diagnose(source)


def test_ranks_of_a_directory_are_told_apart(tmp_path: Path) -> None:
    found = read(ranks(tmp_path))
    said = [
        (error["causes"][0]["category"], error["ranks"])
        for error in diagnosis_dict(found)["errors"]
    ]
    assert said == [("logits_vocab", ["1"]), ("host_shared_memory", ["2"])]
    text = diagnosis_text(found)
    assert "rank 1): CUDA out of memory" in text
    assert "rank 2): " in text
    assert found.scan.ranks == {0, 1, 2}


def test_files_named_by_rank_and_packed_ones(tmp_path: Path) -> None:
    (tmp_path / "train-rank7.log.gz").write_bytes(gzip.compress(LOG.encode()))
    (tmp_path / "notes.md").write_text(BUS)
    found = read(tmp_path)
    assert [failure.event.streams for failure in found.failures if failure.event] == [("7",)]


def test_lines_with_their_rank_keep_it(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_text(each_line("[rank5]: "))
    (failure,) = read(tmp_path).failures
    assert failure.event is not None
    assert failure.event.streams == ("5",)


def test_a_directory_without_logs_says_what_is_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="directory without logs"):
        open_log(tmp_path)
