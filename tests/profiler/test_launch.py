"""`profile run` on real subprocesses: exit codes, crashes, kills, forks, ranks, signals, bad input."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from planner.errors import UsageError
from planner.units import MiB
from profiler.assemble import recordings, save_timeline
from profiler.gpu_reading import GpuReading, ProcessReading
from profiler.journal import read_journals
from profiler.launch import STARTUP, Launch, LaunchSettings, launch

ROOT = Path(__file__).parents[2]

LOOP = """
    import torch
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 256)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    def step():
        with torch.no_grad():
            model(torch.randn(8, 256))
        model(torch.randn(64, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
WEIGHTS_BYTES = 4 * (256 * 2048 + 2048 + 2048 * 256 + 256)


def script(folder: Path, body: str, *, loop: bool = True) -> list[str]:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(LOOP if loop else "") + textwrap.dedent(body))
    return [sys.executable, str(path)]


def run(folder: Path, body: str, *, loop: bool = True, **settings: object) -> Launch:
    return launch(
        script(folder, body, loop=loop),
        LaunchSettings(out=folder / "out", **settings),  # type: ignore[arg-type]
    )


def test_phases_terms_and_the_exit_code_of_a_training_loop(tmp_path: Path) -> None:
    result = run(tmp_path, "for _ in range(4): step()\nraise SystemExit(7)")
    assert result.exit_code == 7
    (recording,) = recordings(result)
    assert recording.source == "torch"
    assert not recording.partial
    assert recording.environment["steps"] == 4
    phases = {phase.name: phase for phase in recording.phases}
    assert set(phases) >= {"load", "score", "forward", "loss", "backward", "step"}
    assert phases["forward"].terms_bytes["weights"] == WEIGHTS_BYTES
    assert phases["backward"].terms_bytes["gradients"] == WEIGHTS_BYTES
    # two states a parameter, and four step counters of 4 bytes
    assert phases["step"].terms_bytes["optimizer"] == 2 * WEIGHTS_BYTES + 4 * 4
    assert "gradients" not in phases["score"].terms_bytes
    assert recording.peak_device_bytes is None or recording.environment["gpus"]
    assert recording.host_peak_bytes is not None
    assert recording.host_peak_bytes > WEIGHTS_BYTES
    for phase in recording.phases:
        assert sum(phase.terms_bytes.values()) == phase.peak_bytes


def test_following_every_storage_is_exact(tmp_path: Path) -> None:
    result = run(tmp_path, "for _ in range(2): step()", follow=True)
    (recording,) = recordings(result)
    phases = {phase.name: phase for phase in recording.phases}
    forward = phases["forward"].terms_bytes
    assert forward["weights"] == pytest.approx(WEIGHTS_BYTES, abs=4 * 512)
    # largest inside ReLU: input 64 x 256, hidden 64 x 2048 before and after it, all fp32;
    # what went into ReLU is gone before the output comes
    assert forward["activations"] == 4 * 64 * (256 + 2048 + 2048)
    assert recording.largest[0].bytes == 4 * 256 * 2048


def test_without_hooks_there_are_totals_but_no_phases(tmp_path: Path) -> None:
    body = """
    import os, time
    assert "VRAMWISE_JOURNAL" not in os.environ
    held = bytearray(200 << 20)
    time.sleep(0.5)
    """
    result = run(tmp_path, body, loop=False, hooks=False)
    assert result.exit_code == 0
    assert result.journals == []
    (recording,) = recordings(result)
    assert recording.phases == ()
    assert recording.peak_bytes > 200 * MiB
    assert any("no phases" in note for note in recording.notes)


def test_a_command_that_is_not_python(tmp_path: Path) -> None:
    result = launch(["sh", "-c", "exit 3"], LaunchSettings(out=tmp_path))
    assert result.exit_code == 3
    assert recordings(result)[0].phases == ()


def test_a_crash_keeps_the_recording(tmp_path: Path) -> None:
    result = run(tmp_path, "for _ in range(3): step()\nraise RuntimeError('boom')")
    assert result.exit_code == 1
    (recording,) = recordings(result)
    assert recording.environment["steps"] == 3


def test_kill_9_keeps_what_was_written_and_says_partial(tmp_path: Path) -> None:
    body = "for _ in range(3): step()\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    result = run(tmp_path, body)
    assert result.exit_code == 128 + signal.SIGKILL
    (recording,) = recordings(result)
    assert recording.partial
    assert recording.environment["steps"] == 3
    assert {"forward", "backward", "step"} <= {phase.name for phase in recording.phases}
    assert any("partial" in note for note in recording.notes)


def test_a_fork_writes_its_own_journal_and_leaves_the_parents_alone(tmp_path: Path) -> None:
    body = """
    step()
    import os
    if os.fork() == 0:
        step(); step()
        raise SystemExit(0)
    os.wait()
    step()
    """
    result = run(tmp_path, body)
    assert result.exit_code == 0
    by_steps = sorted(journal.steps for journal in result.journals)
    assert len({journal.pid for journal in result.journals}) == 2
    # the fork goes on counting from the step that it inherited
    assert by_steps == [2, 3]
    assert all(journal.ended for journal in result.journals)


def test_a_forked_worker_that_runs_no_model_writes_nothing(tmp_path: Path) -> None:
    body = """
    from torch.utils.data import DataLoader, TensorDataset
    data = TensorDataset(torch.randn(8, 256))
    for (batch,) in DataLoader(data, batch_size=4, num_workers=2):
        step()
    """
    result = run(tmp_path, body)
    assert result.exit_code == 0
    assert len([journal for journal in result.journals if journal.peaks]) == 1


def test_torchrun_with_two_ranks_gives_one_recording_a_rank(tmp_path: Path) -> None:
    body = """
    import torch.distributed as dist
    dist.init_process_group("gloo")
    for _ in range(1 + dist.get_rank()): step()
    dist.barrier()
    dist.destroy_process_group()
    """
    command = script(tmp_path, body)
    result = launch(
        [
            command[0],
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            "--master-port=0",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:0",
            command[1],
        ],
        LaunchSettings(out=tmp_path / "out"),
    )
    assert result.exit_code == 0
    whole, *ranks = recordings(result)
    assert [each.environment["rank"] for each in ranks] == [0, 1]
    assert [each.environment["steps"] for each in ranks] == [1, 2]
    assert whole.peak_bytes == max(each.peak_bytes for each in ranks)
    assert max(sample.processes for sample in result.samples) >= 3


def test_an_existing_sitecustomize_still_runs(tmp_path: Path, monkeypatch) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("import builtins\nbuiltins.THEIRS = 'was here'\n")
    monkeypatch.setenv("PYTHONPATH", str(theirs))
    out = tmp_path / "seen.txt"
    body = f"""
    import sys
    armed = any(type(finder).__name__ == "_WaitFor" for finder in sys.meta_path)
    assert sys.modules["sitecustomize"].__file__.startswith({str(theirs)!r})
    open({str(out)!r}, "w").write(THEIRS + str(armed))
    """
    result = run(tmp_path, body, loop=False)
    assert result.exit_code == 0
    assert out.read_text() == "was hereTrue"


def test_hooks_wait_for_torch_and_leave_no_trace_without_it(tmp_path: Path) -> None:
    body = """
    import sys
    assert "torch" not in sys.modules
    import json.tool
    """
    result = run(tmp_path, body, loop=False)
    assert result.exit_code == 0
    assert list((tmp_path / "out" / "journal").iterdir()) == []


def test_a_full_disk_ends_the_journal_and_not_the_program(tmp_path: Path) -> None:
    # a limit on file size is what a full disk looks like to one process
    body = """
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
    for _ in range(3): step()
    print("trained on")
    """
    result = run(tmp_path, body)
    assert result.exit_code == 0
    (journal,) = read_journals(tmp_path / "out" / "journal")
    assert not journal.ended
    assert recordings(result)[0].partial


def test_a_broken_hook_is_noted_and_the_program_goes_on(tmp_path: Path) -> None:
    body = """
    import vramwise_child, sys
    child = sys.modules["vramwise_child"]
    sys.modules["vramwise_meters"].static_terms = None
    for _ in range(2): step()
    """
    result = run(tmp_path, body)
    assert result.exit_code == 0
    assert any("recording stopped" in note for note in recordings(result)[0].notes)


def test_a_journal_torn_in_its_last_line_is_read_up_to_there(tmp_path: Path) -> None:
    lines = ['{"e": "start", "rank": null, "t": 1}', '{"e": "peak", "phase": "forward", "peak": 9,']
    (tmp_path / "process-12.jsonl").write_text("\n".join(lines))
    (journal,) = read_journals(tmp_path)
    assert journal.pid == 12
    assert journal.peaks == {}
    assert "torn" in journal.errors[0]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        pytest.param(["no-such-command-x"], "not on PATH", id="unknown"),
        pytest.param(["./no-such-file"], "not in this folder", id="path"),
        pytest.param([], "nothing to run", id="empty"),
        pytest.param([str(ROOT / "pyproject.toml")], "cannot run", id="not executable"),
    ],
)
def test_a_command_that_cannot_start_is_a_usage_error(
    tmp_path: Path, command: list[str], expected: str
) -> None:
    with pytest.raises(UsageError, match=expected) as caught:
        launch(command, LaunchSettings(out=tmp_path / "out"))
    assert caught.value.hint or expected == "nothing to run"


def test_an_output_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--out"):
        launch(["true"], LaunchSettings(out=tmp_path / "file" / "out"))


DRIVER = """
import sys
from pathlib import Path
from profiler.assemble import recordings
from profiler.launch import LaunchSettings, launch
result = launch(sys.argv[2:], LaunchSettings(out=Path(sys.argv[1])))
recordings(result)[0].save(Path(sys.argv[1]) / "recording.json")
raise SystemExit(result.exit_code)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_command_and_keeps_its_recording(tmp_path: Path, number: int) -> None:
    ready = tmp_path / "ready"
    body = f"""
    import time
    step()
    open({str(ready)!r}, "w").close()
    time.sleep(60)
    """
    command = script(tmp_path, body)
    parent = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path / "out"), *command],
        cwd=ROOT,
        start_new_session=True,
        stderr=subprocess.DEVNULL,
        # a test run in the background ignores SIGINT, and children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    if number == signal.SIGINT:
        os.killpg(parent.pid, number)  # as a terminal does: to everybody in the group
    else:
        parent.send_signal(number)
    code = parent.wait(timeout=30)
    assert code != 0
    document = json.loads((tmp_path / "out" / "recording.json").read_text())
    assert document["environment"]["steps"] == 1
    assert any("interrupted" in note for note in document["notes"])


class OneGpu:
    """A reader that gives the process tree 100 MiB more at every look."""

    def __init__(self, seen: list[int]) -> None:
        self.looks = 0
        self.seen = seen

    def read(self) -> list[GpuReading]:
        self.looks += 1
        processes = tuple(
            ProcessReading(pid=pid, used_bytes=self.looks * 100 * MiB) for pid in self.seen
        )
        return [GpuReading(index=0, label="0", name="X", total_bytes=1, processes=processes)]

    def versions(self) -> dict[str, str]:
        return {"driver": "1.2"}

    def close(self) -> None: ...
    def __enter__(self) -> "OneGpu":
        return self

    def __exit__(self, *_: object) -> None: ...


def test_the_drivers_view_of_the_tree_goes_into_the_recording(tmp_path: Path) -> None:
    seen: list[int] = []
    gpus = OneGpu(seen)
    pid_file = tmp_path / "pid"

    def note(sample: object) -> None:
        if not seen and pid_file.exists() and pid_file.read_text():
            seen.append(int(pid_file.read_text()))

    command = ["sh", "-c", f"echo $$ > {pid_file}; sleep 1"]
    result = launch(
        command, LaunchSettings(out=tmp_path / "o", rate_hz=20), on_sample=note, gpus=gpus
    )
    (recording,) = recordings(result)
    assert recording.source == "nvml"
    assert recording.peak_bytes == gpus.looks * 100 * MiB
    assert recording.environment["driver"] == "1.2"


def test_the_timeline_is_parquet_with_unknown_as_null(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    result = run(tmp_path, "for _ in range(2): step()")
    (recording,) = recordings(result)
    save_timeline(recording, tmp_path / "t.parquet")
    table = pq.read_table(tmp_path / "t.parquet").to_pydict()
    assert len(table["t_s"]) == len(recording.timeline) > 4
    assert sorted(table["t_s"]) == table["t_s"]
    assert set(table["phase"]) >= {"load", "forward", "backward"}
    if not recording.environment["gpus"]:
        assert set(table["device_used_bytes"]) == {None}


def test_the_startup_hook_is_plain_old_python() -> None:
    """The child may run Python 3.9: no match statement, no newer syntax, standard library only."""
    import ast

    for path in STARTUP.glob("*.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, 9))
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module.split(".")[0]]
            foreign = set(names) - set(sys.stdlib_module_names) - {"profiler"}
            assert not foreign, f"{path.name} imports {foreign}"


def test_a_process_that_has_vanished_is_unknown_and_its_orphans_stay_in_the_tree() -> None:
    from profiler.process_tree import ProcessTree

    gone = subprocess.Popen(["true"])
    gone.wait()
    assert ProcessTree(gone.pid).rss_bytes() is None
    # the shell starts a sleeper and dies: the sleeper gets another parent and is still ours
    shell = subprocess.Popen(["sh", "-c", "sleep 30 & echo $!; sleep 0.5"], stdout=subprocess.PIPE)
    assert shell.stdout is not None
    orphan = int(shell.stdout.readline())
    tree = ProcessTree(shell.pid)
    tree.refresh()
    shell.wait()
    try:
        tree.refresh()
        assert orphan in tree.pids
        assert (tree.rss_bytes() or 0) > 0
    finally:
        os.kill(orphan, signal.SIGKILL)
