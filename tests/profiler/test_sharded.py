"""A rank of a fake process group allocates what a rank of a real one does, byte for byte."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.allocator.caching import replay
from planner.errors import UnsupportedError
from planner.units import KiB
from profiler.attribute import assign_terms
from profiler.compare import Comparison
from profiler.sharded import Shard, process_group
from profiler.torch_recorder import record
from profiler.trace import run_subject, trace
from tests.profiler.sharded_cases import CASES, subject
from tests.profiler.sharded_plans import CONFIGS, beside
from tests.profiler.sharded_rank import peaks

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("ranks")
FAST = ("accumulated without sync", "lora")


Peaks = dict[str, dict[str, int]]


def run_on_gloo(names: list[str], folder: Path) -> list[Peaks]:
    """Run cases that take as many ranks on as many of gloo; every rank's peaks."""
    size = CASES[names[0]].ranks
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.profiler.sharded_rank", str(rank), str(folder / "store"), ",".join(names)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    said = [rank.communicate(timeout=3600)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size
    return [json.loads(each.splitlines()[-1]) for each in said]


def on_a_fake_group(name: str, rank: int = 0) -> dict[str, int]:
    step = subject(CASES[name], rank=rank)
    tracker = run_subject(step)
    assign_terms(tracker.events, vocab=step.vocab, embedding=step.trained_embedding)
    return peaks(tracker.events)


def test_a_fake_rank_allocates_what_a_real_one_does(tmp_path: Path) -> None:
    """Both ranks: the second has a row less of a vocabulary that two don't divide."""
    real = run_on_gloo(list(FAST), tmp_path)
    for rank in range(2):
        assert {name: on_a_fake_group(name, rank) for name in FAST} == real[rank]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", sorted({case.ranks for case in CASES.values()}))
def test_every_setting_on_a_fake_rank_equals_a_real_one(ranks: int, tmp_path: Path) -> None:
    names = [name for name, case in CASES.items() if case.ranks == ranks]
    assert {name: on_a_fake_group(name) for name in names} == run_on_gloo(names, tmp_path)[0]


PLANS = [
    ("llama", 8, {"method": "full"}),
    ("qwen2-moe", 64, {"method": "lora"}),  # 8 experts: each is padded eightfold
    (
        "llama",
        2,
        {"method": "full", "parallel": {"tensor": 2}},
    ),  # transformers' tp_plan, as DTensors
    (
        "gemma2",
        2,
        {"method": "full", "parallel": {"tensor": 2}},
    ),  # tied: embedding and head are one
]
MORE = [
    (family, ranks, {"method": method})
    for family in CONFIGS
    for ranks in (2, 8, 64, 512)
    for method in ("full", "lora", "qlora")
    # k-bit preparation makes fused experts fp32, which grouped_mm refuses
    if (family, method) != ("qwen2-moe", "qlora")
] + [
    ("llama", 8, {"method": "full", "mixed_precision": "bf16"}),
    ("llama", 8, {"method": "full", "gradient_accumulation": 4}),
    ("llama", 8, {"method": "full", "checkpointing": "none"}),
    ("llama", 8, {"method": "full", "offload": {"parameters": True}}),
    ("llama", 8, {"method": "qlora", "offload": {"parameters": True}}),
    ("llama", 8, {"method": "full", "parallel": {"data_replicate": 2}}),
    ("llama", 8, {"method": "full", "reshard_after_forward": False}),
    ("llama", 8, {"method": "full", "reshard_after_forward": 2, "checkpointing": "none"}),
    ("llama", 8, {"method": "full", "parallel": {"data_replicate": 8}}),
    ("llama", 8, {"method": "full", "parallel": {"data_replicate": 2}, "reduce_dtype": "fp32"}),
    ("llama", 8, {"method": "full", "reduce_dtype": "fp32", "gradient_accumulation": 4}),
    ("llama", 8, {"method": "full", "gradient_accumulation": 4, "accumulate_sync": True}),
    ("llama", 8, {"method": "full", "context": 256}),
    ("llama", 2, {"method": "full", "parallel": {"tensor": 2}, "checkpointing": "none"}),
    ("llama", 8, {"method": "lora", "framework": "vramwise"}),
    ("llama", 8, {"method": "qlora", "framework": "vramwise"}),
    ("llama", 8, {"method": "full", "framework": "vramwise"}),
    ("llama", 8, {"method": "lora", "checkpointing": "none"}),
]


@pytest.mark.parametrize(("family", "ranks", "fields"), PLANS)
def test_the_plan_of_a_rank_is_its_trace(family: str, ranks: int, fields: dict[str, Any]) -> None:
    compared = beside(family, ranks, **fields)
    assert abs(compared.peak.error or 0) < 0.005
    assert compared.planned_phase == compared.measured_phase
    assert_every_phase(compared)


@pytest.mark.parametrize(
    ("family", "ranks", "fields", "words"),
    [
        ("qwen2-moe", 2, {"parallel": {"tensor": 2}}, "names no experts"),
        ("llama", 4, {"parallel": {"tensor": 2}}, "shard 2 x tensor 2 cannot be traced"),
        ("llama", 2, {"parallel": {"tensor": 2}, "method": "lora"}, "tensor: 2 with lora cannot"),
        ("llama", 2, {"parallel": {"context": 2}}, "parallel.context: 2 cannot be traced"),
    ],
)
def test_layouts_that_no_trace_runs_are_refused(
    family: str, ranks: int, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedError, match=words):
        beside(family, ranks, **{"method": "full", **fields})


def assert_every_phase(compared: Comparison) -> None:
    """Within 1%, or a few cosines' worth of a toy."""
    for total in compared.totals:
        assert total.planned_bytes is not None
        assert total.measured_bytes is not None
        planned = total.planned_bytes
        if total.phase == "load":  # a trace begins with weights that are quantised already
            made = [
                cell for cell in compared.cells if (cell.phase, cell.term) == ("load", "overhead")
            ]
            planned -= sum(cell.planned_bytes or 0 for cell in made)
        room = max(total.measured_bytes // 100, 64 * KiB)
        assert abs(planned - total.measured_bytes) <= room, total


@pytest.mark.slow
@pytest.mark.parametrize(("family", "ranks", "fields"), MORE)
def test_plan_and_trace_at_every_size(family: str, ranks: int, fields: dict[str, Any]) -> None:
    compared = beside(family, ranks, **fields)
    print(family, ranks, fields, f"{compared.peak.error:+.3%}")
    assert abs(compared.peak.error or 0) < 0.01
    assert_every_phase(compared)


def test_a_followed_run_counts_this_ranks_part_and_what_is_gathered() -> None:
    """Two linears of 64 x 64 in fp32, each a unit, on two ranks: 8,192 B of each here."""
    from torch.distributed.fsdp import fully_shard

    with process_group(Shard(ranks=2)):
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(2)))
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        with record(model, optimizer, follow=True) as live:
            for _ in range(2):
                model(torch.zeros(4, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    weights = {phase.name: phase.terms_bytes.get("weights", 0) for phase in live.recording.phases}
    assert weights["load"] == weights["step"] == 2 * 8_192
    assert weights["forward"] == 2 * 8_192 + 16_384  # one unit at a time is whole


def test_buffers_of_other_streams_serve_no_other() -> None:
    """All-gathers' and reduce-scatters' blocks come from pools of their own: more is reserved."""
    recording = trace(subject(CASES["full"]))
    made = {(event.stream, event.term) for event in recording.events if event.kind == "alloc"}
    assert {term for stream, term in made if stream == 1} == {"communication"}
    assert {term for stream, term in made if stream == 2} == {"gradients"}
    one = replay([replace(event, stream=0) for event in recording.events])
    assert (recording.peak_reserved_bytes or 0) > one.peak_reserved_bytes
