"""The trainer's benchmarks run at tiny sizes, compute what their rivals compute, and say what they promise."""

import json

import pytest
import torch

from benchmarks import cpu_speed, grpo_table, ranks_overhead, sft_vs_hf, trainer_vs_trl
from benchmarks.side_by_side import HEAD, REST, Meter, check, completion_ids, prompts
from planner.units import GiB
from profiler.storages import StorageTracker
from trainer.small_model import small_tokenizer

TINY = [
    *("--json", "--rounds", "1", "--steps", "1", "--layers", "1", "--hidden", "64"),
    *("--prompt-tokens", "24", "--completion-tokens", "24", "--micro-batch", "2"),
]


def document_of(main, arguments, capsys):
    main(arguments)
    return json.loads(capsys.readouterr().out)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("main", "arguments", "rival"),
    [
        (trainer_vs_trl.main, ["--vocab", "4096", "--generations", "4"], "trl"),
        (sft_vs_hf.main, ["--vocab", "16384", "--batch", "4"], "hf"),
    ],
    ids=["trl", "hf"],
)
def test_a_trainer_beside_ours(main, arguments, rival, capsys):
    # losses and gradient norms of the two are compared inside
    made = document_of(main, [*TINY, *arguments], capsys)
    ours, theirs = made["rows"]["vramwise"], made["rows"][rival]
    assert made["peak_ratio"] == round(ours["peak_bytes"] / theirs["peak_bytes"], 4)
    assert made["peak_ratio"] < 1, "this vocabulary alone makes the other's peak"
    assert made["step_time_ratio"] > 0
    weights = 4 * 64 * made["vocab"]
    assert weights < ours["peak_outside_head_bytes"] <= ours["peak_bytes"]
    assert ours["steps_timed"] == theirs["steps_timed"] == 1
    assert ours["grad_norm"] > 0


def test_the_table_traces_every_phase(capsys):
    made = document_of(
        grpo_table.main,
        ["--json", "--layers", "1", "--only", "vramwise", "--sequences", "1"],
        capsys,
    )
    rows = {row["implementation"]: row for row in made["rows"]}
    assert set(rows) == {"vramwise, bf16 LoRA", "vramwise, QLoRA"}
    for row in rows.values():
        peaks = {phase["name"]: phase["peak_bytes"] for phase in row["phases"]}
        assert {"load", "forward", "loss", "backward", "step"} <= set(peaks)
        assert row["peak_bytes"] == max(peaks.values())
    lora, qlora = rows.values()
    assert lora["peak_bytes"] > qlora["peak_bytes"] > 2 * GiB
    assert made["targets"] == []


def test_targets_are_for_one_sequence():
    row = {"implementation": "vramwise, QLoRA", "peak_bytes": 12 * GiB}
    one, eight = ({**row, "sequences_per_micro_batch": n} for n in (1, 8))
    (found,) = grpo_table.targets([eight, one])
    assert found["met"] is False
    assert grpo_table.targets([{**one, "peak_bytes": 11 * GiB}])[0]["met"] is True


def test_data_is_ragged_and_the_same_for_both():
    class Options:
        prompt_tokens, completion_tokens = 64, 96

    texts = prompts(16, Options)
    assert len(set(texts)) == 16
    assert len(texts[0]) == 64
    lengths = [len(completion_ids(texts[0], number, Options)) for number in range(32)]
    assert lengths[0] == max(lengths) == 96
    assert min(lengths) < 24
    assert completion_ids(texts[1], 3, Options) == completion_ids(texts[1], 3, Options)
    ids = small_tokenizer()(texts[1])["input_ids"]
    assert len(ids) == len(texts[1])


def test_the_meter_counts_from_the_first_step_on():
    import torch

    model = torch.nn.Linear(256, 256, bias=False)
    meter = Meter(tracker=StorageTracker())
    with meter.tracker:
        torch.ones(1 << 20)  # before the first step: not counted
        meter.step(model)
        with meter.tracker.in_phase(HEAD):
            inside = torch.ones(1 << 18)
            del inside
        outside = torch.ones(1 << 16)
        del outside
    weight = 256 * 256 * 4
    assert meter.peaks() == {HEAD: weight + 4 * (1 << 18), REST: weight + 4 * (1 << 16)}
    meter.starts = [0.0, 1.0, 3.0, 6.0]
    assert meter.seconds() == [2.0, 3.0]


def test_a_different_loss_is_noticed():
    same = {"loss": 1.0, "grad_norm": 2.0}
    check({"vramwise": same, "trl": same})
    with pytest.raises(AssertionError, match="grad_norm"):
        check({"vramwise": same, "trl": {**same, "grad_norm": 2.1}})


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_the_plumbing_of_two_ranks_is_a_share_of_a_step(capfd):
    ranks_overhead.main(["--json", "--steps", "2", "--hidden", "64", "--layers", "2"])
    made = json.loads(capfd.readouterr().out.strip().splitlines()[-1])
    parts = made["pass_s"] + made["step_s"] + made["told_s"]
    assert 0 < made["overhead_ratio"] < 1
    assert 0 < parts <= made["seconds_per_step"] * 1.5, "medians of one run"


def test_the_speed_model_is_held_against_a_real_step(capsys, tmp_path, monkeypatch):
    """One shape, once: what is predicted and what is timed are of the same step. How near they are no test says."""
    tiny = cpu_speed.Shape("tiny", 64, 1, 1, 32)
    monkeypatch.setattr(cpu_speed, "SHAPES", (tiny,))
    monkeypatch.setattr("profiler.speed_probe.CPU_SIDES", (64, 128))
    monkeypatch.setattr("sys.argv", ["cpu_speed", "--rounds", "1", "--json", str(tmp_path / "j")])
    threads = torch.get_num_threads()
    try:
        cpu_speed.main()
    finally:
        torch.set_num_threads(threads)
    (row,) = json.loads((tmp_path / "j").read_text())["rows"]
    assert row["predicted_s"] > 0
    assert row["measured_s"] > 0
    assert "tiny" in capsys.readouterr().out
