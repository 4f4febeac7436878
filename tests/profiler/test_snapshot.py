"""Snapshots: hostile pickles run nothing; every format is read; peak, terms and fragmentation are right."""

import copyreg
import io
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest

from planner.errors import UsageError
from planner.units import GiB, MiB
from profiler.safe_pickle import load_plain, scan
from profiler.snapshot import from_data, read_snapshot
from profiler.snapshot_analysis import analyse, fragmentation, to_recording
from profiler.snapshot_replay import trials
from profiler.snapshot_report import document, findings

CANARY = "vramwise_canary"


class Call:
    """Pickles as REDUCE: calling `function(*arguments)` when it is read."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.arguments


class StateCall:
    """Pickles as NEWOBJ + BUILD with a state that has a __setstate__ to reach."""

    def __getstate__(self) -> dict[str, Any]:
        return {"x": 1}


def touch(path: Path) -> str:
    return f"touch {path}"


def reduce_chain(path: Path) -> bytes:
    """getattr(__import__('os'), 'system')(cmd): every link is a REDUCE of the one before."""
    return (
        b"\x80\x04cbuiltins\ngetattr\n(cbuiltins\n__import__\n(X\x02\x00\x00\x00ostR"
        b"X\x06\x00\x00\x00systemtR(X"
        + struct.pack("<I", len(touch(path)))
        + touch(path).encode()
        + b"tR."
    )


def persistent(path: Path) -> bytes:
    buffer = io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return touch(path) if value == "me" else None

    Pickler(buffer, protocol=4).dump({"segments": ["me"]})
    return buffer.getvalue()


def exploits(path: Path) -> dict[str, bytes]:
    command = touch(path)
    write = f"open({str(path)!r}, 'w').close()"
    return {
        "os.system": pickle.dumps(Call(os.system, command), protocol=4),
        "os.system in protocol 0": pickle.dumps(Call(os.system, command), protocol=0),
        "builtins.eval": pickle.dumps({"segments": Call(eval, write)}, protocol=4),
        "builtins.exec in protocol 2": pickle.dumps(Call(exec, write), protocol=2),
        "reduce chain": reduce_chain(path),
        "inst": b"(S'" + command.encode() + b"'\nios\nsystem\n.",
        "obj": b"(cos\nsystem\nS'" + command.encode() + b"'\no.",
        "stack_global": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c"
        + bytes([len(command)])
        + command.encode()
        + b"\x85R.",
        "newobj": pickle.dumps(StateCall(), protocol=4),
        "newobj_ex": b"\x80\x04cbuiltins\nobject\n)}\x92.",
        "persistent id": persistent(path),
        "persistent id in protocol 0": b"P" + command.encode() + b"\n.",
        "next buffer": b"\x80\x05\x97.",
    }


NAMES = list(exploits(Path("x")))


@pytest.mark.parametrize("name", NAMES)
def test_an_exploit_is_refused_with_its_offset_and_runs_nothing(name: str, tmp_path: Path) -> None:
    canary = tmp_path / CANARY
    payload = exploits(canary)[name]
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(payload)
    with pytest.raises(UsageError, match="refused at byte"):
        read_snapshot(file)
    assert not canary.exists()


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "reduce chain", "stack_global"])
def test_the_exploits_are_real(name: str, tmp_path: Path) -> None:
    """The ordinary unpickler runs them: so the refusals above mean something."""
    canary = tmp_path / CANARY
    pickle.loads(exploits(canary)[name])
    assert canary.exists()


def test_an_extension_that_is_already_cached_is_refused(tmp_path: Path) -> None:
    canary = tmp_path / CANARY
    code = 240
    copyreg.add_extension(os.system.__module__, "system", code)
    try:
        payload = pickle.dumps(Call(os.system, touch(canary)), protocol=2)
        assert b"\x82" + bytes([code]) in payload
        pickle.loads(payload)  # now it is in the cache, and find_class would not be asked
        assert canary.exists()
        canary.unlink()
        file = tmp_path / "s.pickle"
        file.write_bytes(payload)
        with pytest.raises(UsageError, match="EXT1"):
            read_snapshot(file)
        assert not canary.exists()
    finally:
        copyreg.remove_extension(os.system.__module__, "system", code)
        copyreg.clear_extension_cache()  # type: ignore[attr-defined]


def test_an_exploit_hidden_inside_a_number_is_data_and_behind_it_is_not(tmp_path: Path) -> None:
    """The scan must step over arguments exactly as the unpickler does."""
    number = int.from_bytes(b"cos\nsys", "little")
    plain = pickle.dumps({"segments": [], "x": number}, protocol=4)
    assert b"cos\nsys" in plain
    file = tmp_path / "s.pickle"
    file.write_bytes(plain)
    assert load_plain(file) == {"segments": [], "x": number}
    # a string that claims one byte less lets its last byte become an opcode
    file.write_bytes(b"\x80\x04\x8c\x03abccos\nsystem\n.")
    with pytest.raises(UsageError, match="GLOBAL"):
        load_plain(file)


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        pytest.param(b"\x80\x04}r\xff\xff\xff\x7f.", "memory bomb", id="memo slot 2^31"),
        pytest.param(b"\x80\x04\x8d" + b"\xff" * 7 + b"\x3f.", "longer", id="8 EiB string"),
        pytest.param(b"\x80\x04\x8b\xff\xff\xff\x7f.", "longer", id="2 GiB integer"),
        pytest.param(b"\x80\x04\x95" + b"\xff" * 7 + b"\x3f.", "FRAME", id="endless frame"),
        pytest.param(b"\x80\x04]" + b"(" * 50, "cut short|end mark", id="no end"),
        pytest.param(b"not a pickle", "refused", id="text"),
        pytest.param(b"", "empty", id="empty file"),
        pytest.param(b"\x80\x04.", "damaged", id="nothing on the stack"),
        pytest.param(b"\x80\x04K\x01\x85s.", "damaged", id="stack underflow"),
    ],
)
def test_bombs_and_damage_are_one_line(tmp_path: Path, payload: bytes, expected: str) -> None:
    file = tmp_path / "s.pickle"
    file.write_bytes(payload)
    with pytest.raises(UsageError) as caught:
        read_snapshot(file)
    text = f"{caught.value.message} {caught.value.hint}"
    assert any(part in text for part in expected.split("|")), text


def test_a_bomb_of_empty_dicts_is_stopped_by_the_memory_it_would_take() -> None:
    # 64 MiB of "}" would become 4 GiB of dicts
    needed = scan(b"\x80\x04(" + b"}" * (4 * MiB) + b"l.")
    assert needed > 4 * MiB * 64


def test_a_file_that_needs_more_memory_than_is_free_is_refused(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "s.pickle"
    file.write_bytes(pickle.dumps({"segments": [{} for _ in range(1000)]}))
    monkeypatch.setattr(
        "profiler.safe_pickle.psutil.virtual_memory", lambda: type("M", (), {"available": 1000})()
    )
    with pytest.raises(UsageError, match="needs about"):
        read_snapshot(file)


def test_shared_references_do_not_explode(tmp_path: Path) -> None:
    """A billion laughs: 40 lists, each twice the one before, is small; and it is no snapshot."""
    level: list[Any] = []
    for _ in range(40):
        level = [level, level]
    file = tmp_path / "s.pickle"
    file.write_bytes(pickle.dumps({"segments": [{"blocks": level, "total_size": 1}]}))
    with pytest.raises(UsageError, match=r"segments\[0\]\.blocks\[0\] is"):
        read_snapshot(file)


def test_the_scan_agrees_with_the_unpickler_on_plain_data(tmp_path: Path) -> None:
    data = {
        "a": [1, -1, 255, 65536, 2**40, 2**62, -(2**40), 1.5, None, True, False],
        "b": (1,),
        "c": (1, 2),
        "d": (1, 2, 3),
        "e": tuple(range(9)),
        "f": "x" * 1000,
        "h": {i: str(i) for i in range(3000)},
    }
    for protocol in (2, 3, 4, 5):
        file = tmp_path / f"{protocol}.pickle"
        file.write_bytes(pickle.dumps(data, protocol=protocol))
        assert load_plain(file) == data


STACKS = {
    "weights": [
        ("/lib/transformers/modeling_utils.py", 4000, "from_pretrained"),
        ("/me/train.py", 5, "main"),
    ],
    "forward": [
        ("/lib/transformers/models/llama/modeling_llama.py", 155, "forward"),
        ("/lib/torch/nn/modules/module.py", 1780, "_call_impl"),
        ("/me/train.py", 20, "main"),
    ],
    "loss": [
        ("/lib/torch/nn/functional.py", 3500, "cross_entropy"),
        ("/lib/transformers/loss/loss_utils.py", 36, "ForCausalLMLoss"),
    ],
    "backward": [
        ("/lib/torch/autograd/graph.py", 829, "_engine_run_backward"),
        ("/me/train.py", 21, "main"),
    ],
    "optimizer": [("/lib/torch/optim/adamw.py", 120, "_init_group"), ("/me/train.py", 22, "main")],
    "cache": [("/lib/transformers/cache_utils.py", 101, "update"), ("/me/train.py", 9, "main")],
}


def frames(kind: str) -> list[dict[str, Any]]:
    return [{"filename": f, "line": n, "name": name} for f, n, name in STACKS[kind]]


class Gpu:
    """Writes a snapshot as torch 2.1 and newer do: every tensor its own segment of 2 MiB units."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.blocks: dict[int, dict[str, Any]] = {}
        self.next = 0x7F0000000000

    def alloc(self, size: int, kind: str) -> int:
        address, self.next = self.next, self.next + 1 * GiB
        event = {
            "action": "alloc",
            "addr": address,
            "size": size,
            "stream": 0,
            "frames": frames(kind),
        }
        self.events.append({**event, "time_us": len(self.events)})
        given = -(-size // 512) * 512
        self.blocks[address] = {
            "address": address,
            "size": given,
            "requested_size": size,
            "state": "active_allocated",
            "frames": frames(kind),
        }
        return address

    def free(self, address: int) -> None:
        size = self.blocks.pop(address)["requested_size"]
        for action in ("free_requested", "free_completed"):
            event = {"action": action, "addr": address, "size": size, "stream": 0, "frames": []}
            self.events.append({**event, "time_us": len(self.events)})

    def data(self, **extra: Any) -> dict[str, Any]:
        segments = []
        for address, block in self.blocks.items():
            total = -(-block["size"] // (2 * MiB)) * 2 * MiB
            blocks = [block]
            if total > block["size"]:
                rest = {"address": address + block["size"], "size": total - block["size"]}
                blocks.append({**rest, "requested_size": 0, "state": "inactive", "frames": []})
            segments.append(
                {
                    "device": 0,
                    "address": address,
                    "total_size": total,
                    "stream": 0,
                    "segment_type": "large",
                    "segment_pool_id": (0, 0),
                    "is_expandable": False,
                    "allocated_size": block["size"],
                    "active_size": block["size"],
                    "blocks": blocks,
                }
            )
        return {
            "segments": segments,
            "device_traces": [self.events],
            "allocator_settings": {},
            **extra,
        }


def training_step() -> Gpu:
    """Two weights, a cache that dies, activations, logits, gradients, states: peak at the logits."""
    gpu = Gpu()
    for _ in range(2):
        gpu.alloc(4 * MiB, "weights")
    gpu.free(gpu.alloc(3 * MiB, "cache"))
    activations = [gpu.alloc(6 * MiB, "forward") for _ in range(2)]
    logits = gpu.alloc(16 * MiB, "loss")
    gradients = [gpu.alloc(4 * MiB, "backward")]
    temporary = gpu.alloc(5 * MiB, "backward")
    gpu.free(logits)
    gradients.append(gpu.alloc(4 * MiB, "backward"))
    for address in (temporary, *activations):
        gpu.free(address)
    for _ in range(2):
        gpu.alloc(8 * MiB, "optimizer")
    for address in gradients:
        gpu.free(address)
    return gpu


def test_the_peak_of_the_history_is_found_with_its_owners() -> None:
    analysis = analyse(from_data(training_step().data()))
    assert analysis.from_history
    # weights 8, activations 12 and a temporary 5, logits 16, the first gradient 4
    assert analysis.peak_bytes == 45 * MiB
    assert analysis.terms_bytes() == {
        "activations": 17 * MiB,
        "logits": 16 * MiB,
        "weights": 8 * MiB,
        "gradients": 4 * MiB,
    }
    top = analysis.at_peak[0]
    assert (top.owner.term, top.bytes) == ("logits", 16 * MiB)
    assert "loss_utils.py:36 ForCausalLMLoss" in analysis.places_bytes()


def test_a_history_cut_off_at_its_start_still_gives_the_peak() -> None:
    """The ring buffer has lost the weights' allocations: they predate what is left."""
    gpu = training_step()
    data = gpu.data()
    data["device_traces"] = [gpu.events[5:]]
    for segment in data["segments"]:
        if segment["total_size"] == 4 * MiB:
            segment["blocks"][0]["frames"] = []
    analysis = analyse(from_data(data))
    assert analysis.peak_bytes == 45 * MiB
    assert analysis.terms_bytes()["weights"] == 8 * MiB
    assert "allocated before the history began" in analysis.places_bytes()


def test_without_a_history_the_moment_of_the_dump_is_shown_as_such() -> None:
    data = training_step().data()
    data["device_traces"] = [[]]
    analysis = analyse(from_data(data))
    assert not analysis.from_history
    assert analysis.peak_bytes == 24 * MiB
    assert to_recording(analysis, subject="x").partial


def test_vocab_sized_tensors_are_logits_when_the_vocabulary_is_known() -> None:
    gpu = Gpu()
    gpu.alloc(4 * MiB, "weights")
    gpu.free(gpu.alloc(64 * 32000 * 4, "forward"))
    assert "logits" not in analyse(from_data(gpu.data())).terms_bytes()
    terms = analyse(from_data(gpu.data()), vocab=32000).terms_bytes()
    assert terms["logits"] == 64 * 32000 * 4


def test_fragmentation_is_split_into_what_can_and_cannot_go_back() -> None:
    def block(address: int, size: int, active: bool) -> dict[str, Any]:
        state = "active_allocated" if active else "inactive"
        asked = size - 100 if active else 0
        return {
            "address": address,
            "size": size,
            "requested_size": asked,
            "state": state,
            "frames": [],
        }

    def segment(
        address: int, *blocks: dict[str, Any], pool: tuple[int, int] = (0, 0)
    ) -> dict[str, Any]:
        total = sum(each["size"] for each in blocks)
        return {
            "device": 0,
            "address": address,
            "total_size": total,
            "stream": 0,
            "segment_pool_id": pool,
            "segment_type": "large",
            "blocks": list(blocks),
            "is_expandable": False,
        }

    data = {
        "segments": [
            segment(
                0,
                block(0, 4 * MiB, True),
                block(4 * MiB, 6 * MiB, False),
                block(10 * MiB, 2 * MiB, True),
            ),
            segment(1 * GiB, block(1 * GiB, 20 * MiB, False)),
            segment(2 * GiB, block(2 * GiB, 8 * MiB, True), pool=(1, 0)),
        ],
        "device_traces": [
            [{"action": "oom", "addr": 0, "size": 24 * MiB, "device_free": 1 * MiB, "frames": []}]
        ],
    }
    snapshot = from_data(data)
    parts = fragmentation(snapshot)
    assert parts.reserved_bytes == 40 * MiB
    assert parts.allocated_bytes == 14 * MiB
    assert parts.split_bytes == 6 * MiB
    assert parts.releasable_bytes == 20 * MiB
    assert parts.largest_free_bytes == 20 * MiB
    assert parts.private_bytes == 8 * MiB
    assert parts.rounding_bytes == 3 * 100
    lines = findings(analyse(snapshot))
    # 26 MiB are free in the pool, but no piece is as large as the 24 MiB asked
    assert any("fragmentation, not a lack of memory" in line for line in lines)
    assert document(analyse(snapshot))["ooms"] == [
        {"requested_bytes": 24 * MiB, "free_bytes": 1 * MiB}
    ]


def test_the_format_before_2_1_is_read() -> None:
    segment = {
        "device": 0,
        "address": 4096,
        "total_size": 4 * MiB,
        "stream": 0,
        "segment_type": "large",
        "allocated_size": 2 * MiB,
        "active_size": 2 * MiB,
        "blocks": [
            {
                "size": 2 * MiB,
                "state": "active_allocated",
                "history": [{"addr": 4096, "real_size": 2 * MiB - 7, "frames": frames("weights")}],
            },
            {"size": 2 * MiB, "state": "inactive"},
        ],
    }
    analysis = analyse(from_data({"segments": [segment], "device_traces": []}))
    assert analysis.snapshot.format == "before torch 2.1"
    assert analysis.terms_bytes() == {"weights": 2 * MiB}
    assert analysis.fragmentation.rounding_bytes == 7
    assert [block.address for block in analysis.snapshot.segments[0].blocks] == [
        4096,
        4096 + 2 * MiB,
    ]


def test_what_torch_itself_writes_on_a_cpu_is_read(tmp_path: Path) -> None:
    """torch's own converter of memory profiles writes the snapshot format without a GPU."""
    import torch
    from torch.cuda._memory_viz import _profile_to_snapshot
    from torch.profiler import ProfilerActivity, profile

    model = torch.nn.Linear(256, 1024, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    activities = [ProfilerActivity.CPU]
    with profile(
        activities=activities, profile_memory=True, with_stack=True, record_shapes=True
    ) as run:
        for _ in range(2):
            model(torch.randn(16, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    file = tmp_path / "cpu.pickle"
    file.write_bytes(pickle.dumps(_profile_to_snapshot(run)))
    analysis = analyse(read_snapshot(file))
    weight = 256 * 1024 * 4
    assert analysis.snapshot.format == "torch.profiler"
    terms = analysis.terms_bytes()
    assert terms["weights"] == weight
    assert terms["gradients"] == weight
    # exp_avg, exp_avg_sq, the update's two temporaries, and the step counter
    assert terms["optimizer"] == pytest.approx(4 * weight, rel=0.01)


def test_several_devices_the_fullest_is_taken_and_any_can_be_asked_for() -> None:
    data = training_step().data()
    other = training_step().data()["segments"]
    for segment in other:
        segment["device"] = 1
        segment["total_size"] *= 2
    data["segments"] += other
    assert from_data(data).device == 1
    assert from_data(data, device=0).device == 0
    with pytest.raises(UsageError, match="--device: 7") as caught:
        from_data(data, device=7)
    assert caught.value.hint == "devices: 0, 1"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(lambda d: d.update(segments=3), "no list `segments`", id="no segments"),
        pytest.param(lambda d: d["segments"].append(7), r"segments\[4\] is 7", id="segment"),
        pytest.param(
            lambda d: d["segments"][0].update(total_size="x"), "total_size is 'x'", id="size"
        ),
        pytest.param(lambda d: d["segments"][0].update(blocks=None), "blocks is None", id="blocks"),
        pytest.param(lambda d: d.update(device_traces=5), "device_traces is 5", id="traces"),
        pytest.param(
            lambda d: d["device_traces"][0].append("x"), "a dict with an action", id="event"
        ),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, change: Any, expected: str) -> None:
    data = training_step().data()
    change(data)
    file = tmp_path / "s.pickle"
    file.write_bytes(pickle.dumps(data))
    with pytest.raises(UsageError, match=expected):
        read_snapshot(file)


def test_a_run_that_only_fragmentation_killed_would_have_fitted_with_expandable_segments() -> None:
    """10 MiB sit in the cached segment of a freed 100 MiB tensor; then 95 MiB are asked, 20 free.

    cudaMalloc needs a second segment: 100 + 95. The expandable segment grows by 5 MiB behind the
    90 free ones, one page of 20 MiB.
    """
    gpu = Gpu()
    gpu.free(gpu.alloc(100 * MiB, "forward"))
    small = gpu.alloc(10 * MiB, "forward")
    data = gpu.data()
    (segment,) = data["segments"]
    rest = {"address": small + 10 * MiB, "size": 90 * MiB, "requested_size": 0, "frames": []}
    segment["blocks"].append({**rest, "state": "inactive"})
    segment["total_size"] = 100 * MiB
    oom = {"action": "oom", "addr": 0, "size": 95 * MiB, "device_free": 20 * MiB, "frames": []}
    data["device_traces"][0].append(oom)
    answers = {trial.setting: trial.fits for trial in trials(from_data(data))}
    assert answers["expandable_segments:False"] is False
    assert answers["expandable_segments:True"] is True


def test_without_an_error_the_replay_compares_reserved_memory() -> None:
    found = trials(from_data(training_step().data()))
    assert all(trial.fits is None for trial in found)
    assert all(trial.peak_reserved_bytes >= 45 * MiB for trial in found)
    data = training_step().data()
    data["device_traces"] = [[]]
    assert trials(from_data(data)) == []
