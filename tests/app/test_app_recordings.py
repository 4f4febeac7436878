"""The page Recording: real files in, figures out; hostile ones are one clear sentence."""

import json
import pickle
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

import app.runs
from app import recordings
from planner.errors import UsageError
from planner.plan import plan
from planner.units import GiB, MiB, format_bytes
from profiler.recording import Recording
from profiler.recording_parts import Event, LiveTensor, PhaseRecord

MAIN = Path(app.runs.__file__).with_name("main.py")
SNAPSHOT = {
    "segments": [
        {
            "device": 0,
            "address": 1 << 32,
            "total_size": 20 * MiB,
            "stream": 0,
            "segment_type": "large",
            "is_expandable": False,
            "segment_pool_id": (0, 0),
            "blocks": [
                {
                    "address": 1 << 32,
                    "size": 8 * MiB,
                    "requested_size": 8 * MiB,
                    "state": "active_allocated",
                    "frames": [{"filename": "torch/optim/adamw.py", "line": 3, "name": "step"}],
                },
                {
                    "address": (1 << 32) + 8 * MiB,
                    "size": 12 * MiB,
                    "requested_size": 0,
                    "state": "inactive",
                    "frames": [],
                },
            ],
        }
    ],
    "device_traces": [[]],
    "allocator_settings": {},
}


class Evil:
    def __reduce__(self) -> tuple:
        return (print, ("executed",))


def recording(**changes: object) -> Recording:
    phases = (
        PhaseRecord(
            name="forward", peak_bytes=3 * GiB, terms_bytes={"weights": GiB, "activations": 2 * GiB}
        ),
        PhaseRecord(
            name="step", peak_bytes=2 * GiB, terms_bytes={"weights": GiB, "optimizer": GiB}
        ),
    )
    fields = {
        "source": "torch",
        "subject": "train.py",
        "environment": {"gpu": "RTX 4090"},
        "phases": phases,
        "peak_bytes": 3 * GiB,
        "peak_phase": "forward",
        "largest": (
            LiveTensor(
                bytes=MiB,
                shape=(4, 8),
                dtype="bf16",
                term="weights",
                module="m",
                op="",
                phase="load",
            ),
        ),
        "timeline": (
            {"t_s": 0.0, "phase": "forward", "allocated_bytes": GiB},
            {"t_s": 1.0, "phase": "step", "allocated_bytes": 2 * GiB},
        ),
    }
    return Recording(**{**fields, **changes})  # type: ignore[arg-type]


def opened(name: str, content: bytes) -> AppTest:
    at = AppTest.from_file(str(MAIN), default_timeout=60).run()
    at.switch_page("app_pages/recording.py").run()
    at.file_uploader(key="recording_file").upload(name, content)
    at.run()
    assert not at.exception, at.exception[0].stack_trace
    return at


def as_json(found: Recording) -> bytes:
    return json.dumps(found.to_dict()).encode()


def test_a_recording_shows_its_peak_timeline_phases_and_tensors() -> None:
    at = opened("recording.json", as_json(recording()))
    assert at.metric[0].value == "3.00 GiB in forward"
    assert len(at.get("vega_lite_chart")) == 2
    assert at.dataframe[0].value["shape"][0] == "4 x 8"


def test_planned_stands_beside_measured() -> None:
    at = opened("recording.json", as_json(recording()))
    at.segmented_control(key="compare_with").set_value("the run of Will it fit?").run()
    run = app.runs.run_of(app.runs.DEFAULTS)
    result = plan(run.model, run.recipe, run.machine)
    frame = at.dataframe[0].value
    peak = frame[frame["phase"] == "peak"].iloc[0]
    assert peak["planned"] == format_bytes(result.peak_bytes)
    assert peak["measured"] == "3.00 GiB"


def test_planned_of_a_run_file_stands_beside_measured() -> None:
    at = opened("recording.json", as_json(recording()))
    at.segmented_control(key="compare_with").set_value("a run.yaml").run()
    text = b"model: qwen2.5-0.5b\nmachine: {gpu: rtx-4090}\n"
    at.file_uploader(key="planned_file").upload("run.yaml", text)
    at.run()
    assert not at.exception
    assert "Alive" not in at.header[0].value
    assert any("planned beside measured" in item.value for item in at.header)
    bad = opened("recording.json", as_json(recording()))
    bad.segmented_control(key="compare_with").set_value("a run.yaml").run()
    bad.file_uploader(key="planned_file").upload("run.yaml", b"model: /etc/passwd\n")
    bad.run()
    assert bad.error


def test_a_trace_without_a_clock_shows_its_allocations() -> None:
    events = (
        Event(kind="alloc", block=1, bytes=100, phase="load"),
        Event(kind="alloc", block=2, bytes=300, phase="forward"),
        Event(kind="free", block=2, bytes=300, phase="forward"),
    )
    found = recording(timeline=(), events=events, source="trace")
    assert [row["bytes"] for row in recordings.running_total(found)] == [100, 400, 100]
    at = opened("trace.json", as_json(found))
    assert len(at.get("vega_lite_chart")) == 2


def test_thinning_keeps_the_peak() -> None:
    events = [Event(kind="alloc", block=1, bytes=10**9, phase="x")]
    events += [Event(kind="free", block=1, bytes=10**9, phase="x")]
    events += [Event(kind="alloc", block=n, bytes=1, phase="x") for n in range(10_000)]
    rows = recordings.running_total(recording(events=tuple(events)))
    assert len(rows) <= recordings.MAX_POINTS
    assert max(row["bytes"] for row in rows) == 10**9


def test_metrics_of_a_run_show_memory_and_curves() -> None:
    lines = [
        {"step": n, "loss": 1.0 / (n + 1), "reward": 0.1 * n, "memory/forward/peak_bytes": GiB,
         "memory/forward/planned_bytes": GiB, "text": "x", "bad": None}
        for n in range(5)
    ]  # fmt: skip
    content = "\n".join(map(json.dumps, lines)) + '\n{"step": 5, "lo'
    at = opened("metrics.jsonl", content.encode())
    assert at.metric[0].value == "5"
    assert len(at.get("vega_lite_chart")) == 3


def test_a_snapshot_goes_through_the_safe_reader() -> None:
    at = opened("snapshot.pickle", pickle.dumps(SNAPSHOT))
    assert at.metric[0].value == "8.00 MiB in peak"


def test_a_vllm_log_becomes_a_recording() -> None:
    log = b"""INFO 11-29 10:00:00 [gpu_model_runner.py:2653] Model loading took 14.9596 GiB memory and 4.2 seconds
INFO 11-29 10:00:10 [gpu_worker.py:298] Available KV cache memory: 50.22 GiB
INFO 11-29 10:00:10 [kv_cache_utils.py:1087] GPU KV cache size: 411,392 tokens
"""
    at = opened("vllm.log", log)
    assert "rollout" in at.metric[0].value


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("evil.pickle", pickle.dumps(Evil())),
        ("evil.pickle", pickle.dumps({"segments": [Evil()]})),
        ("cut.pickle", pickle.dumps(SNAPSHOT)[:50]),
        ("foreign.pickle", pickle.dumps({"a": 1})),
        ("a.json", b"{"),
        ("a.json", b"[]"),
        ("a.json", b'{"phases": []}'),
        ("deep.json", b'{"a":' * 50_000),
        ("a.jsonl", b"no steps\n"),
        ("a.txt", b"/etc/passwd"),
        ("a.log", b"hello\n"),
        ("empty.json", b""),
    ],
)
def test_hostile_files_are_one_sentence(
    name: str, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    at = opened(name, content)
    assert at.error
    assert not at.metric
    assert "executed" not in capsys.readouterr().out


def test_values_of_a_hostile_timeline_are_not_trusted() -> None:
    rows = (
        {"t_s": "<b>", "allocated_bytes": 1},
        {"t_s": 1.0, "allocated_bytes": "x", "phase": ["a"]},
        {"t_s": float("inf"), "allocated_bytes": 1},
        {"t_s": 2.0, "allocated_bytes": -5},
        {"t_s": 3.0, "allocated_bytes": 7},
    )
    points = recordings.timeline_points(recording(timeline=rows))
    assert [point["bytes"] for point in points] == [7]


def test_too_large_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "MAX_JSON_BYTES", 1 << 20)
    with pytest.raises(UsageError, match="larger than 1 MiB"):
        recordings.read("a.json", b"{" + b" " * (1 << 20))
