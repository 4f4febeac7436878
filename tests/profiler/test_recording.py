"""Recordings survive a round trip and refuse what is not one."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from planner.errors import UsageError
from profiler.recording import Recording
from profiler.recording_parts import Event, LiveTensor, PhaseRecord


def sample() -> Recording:
    tensor = LiveTensor(
        bytes=4096,
        shape=(2, 4),
        dtype="fp32",
        term="logits",
        module="lm_head",
        op="mm",
        phase="loss",
    )
    events = (
        Event(kind="alloc", block=1, bytes=4096, phase="loss", op="mm", term="logits"),
        Event(kind="free", block=1, bytes=4096, phase="backward"),
    )
    phase = PhaseRecord(name="loss", peak_bytes=4096, terms_bytes={"logits": 4096}, host_bytes=0)
    return Recording(
        source="trace",
        subject="hf-sft",
        environment={"torch": "2.13.0"},
        phases=(phase,),
        peak_bytes=4096,
        peak_phase="loss",
        largest=(tensor,),
        events=events,
        timeline=({"t_s": 0.5, "phase": "loss"},),
        notes=("one",),
    )


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    sample().save(path)
    assert Recording.load(path) == sample()


def test_events_can_be_left_out() -> None:
    assert Recording.from_dict(sample().to_dict(events=False)).events == ()


def change(*path: Any, value: Any) -> dict[str, Any]:
    document = copy.deepcopy(json.loads(json.dumps(sample().to_dict())))
    target = document
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    return document


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "document"),
        (None, "document"),
        ({}, "schema_version"),
        (change("schema_version", value=2), "schema_version"),
        (change("schema_version", value=True), "schema_version"),
        (change("peak_bytes", value=-1), "peak_bytes"),
        (change("peak_bytes", value="much"), "peak_bytes"),
        (change("peak_bytes", value=2**61), "peak_bytes"),
        (change("peak_bytes", value=1.5), "peak_bytes"),
        (change("subject", value=3), "subject"),
        (change("environment", value=[]), "environment"),
        (change("extra", value=1), "extra"),
        (change("phases", value={}), "phases"),
        (change("phases", value=["loss"]), "phases[0]"),
        (change("phases", 0, "terms_bytes", value={"logits": "x"}), "terms_bytes.logits"),
        (change("phases", 0, "name", value=None), "phases[0].name"),
        (change("phases", value=[sample().to_dict()["phases"][0]] * 2), "phases"),
        (change("events", 0, "kind", value="burn"), "events[0].kind"),
        (change("events", 1, "bytes", value=None), "events[1].bytes"),
        (change("largest", 0, "shape", value=[1, -2]), "shape[1]"),
        (change("notes", value=[1]), "notes[0]"),
        (change("partial", value="no"), "partial"),
    ],
)
def test_hostile_documents_name_the_field(document: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        Recording.from_dict(document, label="x.json")
    assert words in caught.value.message
    assert caught.value.message.startswith("x.json")


def test_missing_field() -> None:
    document = sample().to_dict()
    del document["peak_phase"]
    with pytest.raises(UsageError, match="peak_phase"):
        Recording.from_dict(document)


@pytest.mark.parametrize("cut", [0, 1, 50, -1])
def test_truncated_file(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "cut.json"
    path.write_text(json.dumps(sample().to_dict())[:cut], encoding="utf-8")
    with pytest.raises(UsageError, match=r"cut\.json"):
        Recording.load(path)


def test_not_text_and_not_there(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError):
        Recording.load(path)
    with pytest.raises(UsageError):
        Recording.load(tmp_path / "none.json")


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(UsageError):
        Recording.load(path)
