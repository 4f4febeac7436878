import json
import math

import pytest

from trainer import metrics as report


def test_every_step_is_a_line_and_nan_is_null(tmp_path):
    log = report.MetricsLog(tmp_path)
    log.write(0, {"reward": 0.5, "kl": math.nan})
    log.write(1, {"reward": 0.75})
    log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 0, "reward": 0.5, "kl": None},
        {"step": 1, "reward": 0.75},
    ]


def test_a_resume_drops_the_steps_that_are_done_again_and_a_cut_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"st', encoding="utf-8")
    log = report.MetricsLog(tmp_path, first_step=2)
    log.write(2, {"again": 1})
    log.close()
    assert report.read_metrics(path) == [{"step": 0}, {"step": 1}, {"step": 2, "again": 1}]


def test_each_reward_has_mean_deviation_silence_and_time():
    metrics = report.reward_metrics({"a": [1.0, 3.0, None], "b": [None] * 3}, {"a": 0.1, "b": 0.2})
    assert metrics["rewards/a/mean"] == 2
    assert metrics["rewards/a/std"] == pytest.approx(math.sqrt(2))
    assert metrics["rewards/a/silent_frac"] == pytest.approx(1 / 3)
    assert math.isnan(metrics["rewards/b/mean"])
    assert metrics["rewards/b/seconds"] == 0.2


def test_lengths_tell_finished_from_cut():
    metrics = report.length_metrics([2, 4, 8], [True, True, False])
    assert metrics["completions/mean_finished_length"] == 3
    assert metrics["completions/truncated_frac"] == pytest.approx(1 / 3)
    assert metrics["completions/max_length"] == 8


def test_completions_go_to_parquet_and_to_a_table(tmp_path):
    import pandas
    from rich.console import Console

    columns = {"prompt": ["p", "q"], "completion": ["[bold]x", "y"], "reward": [1.0, 0.25]}
    path = report.save_completions(tmp_path, 7, columns)
    frame = pandas.read_parquet(path)
    assert frame["completion"].tolist() == columns["completion"]
    assert frame["step"].tolist() == [7, 7]
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.completions_table(columns, rows=1))
    text = console.export_text()
    assert "[bold]x" in text
    assert "0.250" not in text
