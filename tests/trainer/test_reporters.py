"""Trackers: the real packages, offline, read back; what fails is said once and the run goes on."""

import importlib.util
import json
import os
import socket
import sqlite3
import sys
import threading
import time
from pathlib import Path

import pytest

from planner.errors import UsageError
from trainer.config import parse_run
from trainer.reporters import reports as reports_module
from trainer.reporters.courier import Courier
from trainer.reporters.protocol import RunFacts, Started, markdown

OWN = """
def own(completions, log_metric, log_extra, trainer_state, **columns):
    log_metric("seen_before", trainer_state.num_input_tokens_seen)
    log_extra("length", [len(each) for each in completions])
    return [float(len(each)) for each in completions]
"""
OFF = ("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_MODE", "MLFLOW_TRACKING_URI", "RANK")


@pytest.fixture(autouse=True, scope="module")
def at_home(tmp_path_factory):
    """Nothing leaves this machine, and nothing is written outside the tests' folders."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in OFF:
            patch.delenv(name, raising=False)
        patch.setenv("NETRC", str(home / "netrc"))
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("DO_NOT_TRACK", "true")
        yield home


@pytest.fixture(scope="module")
def reported(small_model, tmp_path_factory):
    """A run with a resume, reported to all but MLflow; returns (folder, results)."""
    for name in ("tensorboard", "wandb"):
        pytest.importorskip(name)
    names = ["wandb", *(["trackio"] if importlib.util.find_spec("trackio") else [])]
    return run_reported(small_model, tmp_path_factory.mktemp("reported"), names)


def run_reported(small_model, folder, names):
    """Make two GRPO steps, and a third after a resume; return (folder, results)."""
    from trainer.run import train_parsed

    (folder / "own.py").write_text(OWN, encoding="utf-8")
    arithmetic = {"name": "arithmetic", "options": {"digits": 1, "size": 64}}
    held = {"name": "arithmetic", "options": {"digits": 1, "size": 4, "seed": 1}}
    document = {
        "model": str(small_model),
        "recipe": {
            "task": "grpo",
            "dtype": "fp32",
            "num_generations": 4,
            "micro_batch_size": 8,
            "prompt_length": 40,
            "completion_length": 6,
            "lora": {"rank": 4},
        },
        "train": {
            "output": "out",
            "dataset": arithmetic,
            "validation": held,
            "eval_every": 2,
            "rewards": ["own.py:own"],
            "steps": 2,
            "report_to": names,
            "tensorboard": "wandb" in names,
            "project": "sums",
            "run_name": "first",
        },
    }
    results = []
    for steps in (2, 3):
        document["train"]["steps"] = steps
        run, train = parse_run(document, root=folder)
        results.append(train_parsed(run, train, root=folder, resume=steps == 3))
    return folder, results


def steps_of(results):
    return [step for result in results for step in result.metrics]


def run_ids(folder):
    last = sorted((folder / "out" / "checkpoints").glob("step-*"))[-1]
    return json.loads((last / "state.json").read_text(encoding="utf-8"))["reports"]


def test_tensorboard_has_what_metrics_jsonl_has(reported):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, results = reported
    board = EventAccumulator(str(folder / "out" / "tensorboard"))
    board.Reload()
    tags = set(board.Tags()["scalars"])
    logged = steps_of(results)[-1]
    numbers = {name for name, value in logged.items() if isinstance(value, int | float)} - {"step"}
    memory = {name for name in numbers if name.startswith("memory/")}
    assert any(name.endswith("planned_bytes") for name in memory)
    assert {f"train/{name}" for name in numbers - memory} | memory <= tags
    points = [(each.step, each.value) for each in board.Scalars("train/reward")]
    assert points == [(n, pytest.approx(m["reward"])) for n, m in enumerate(steps_of(results))]
    assert [each.step for each in board.Scalars("eval/reward")] == [2, 3]
    texts = {
        tag: board.Tensors(tag)[0].tensor_proto.string_val[0] for tag in board.Tags()["tensors"]
    }
    assert b"peak_bytes" in texts["run.yaml/text_summary"]
    assert b"| prompt | completion |" in texts["completions/text_summary"]
    assert b"| length |" in texts["completions/text_summary"], "log_extra"
    assert b"planned_bytes | measured_bytes" in texts["memory/rehearsal/text_summary"]


def test_what_rewards_log_and_see_reaches_the_trackers(reported):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, results = reported
    steps = steps_of(results)
    board = EventAccumulator(str(folder / "out" / "tensorboard"))
    board.Reload()
    trained = [step["train_tokens"] for step in steps]
    seen = [0, trained[0], trained[0] + trained[1]]
    assert [each.value for each in board.Scalars("train/seen_before")] == seen
    assert [each.value for each in board.Scalars("eval/seen_before")] == [
        sum(trained[:2]),
        sum(trained),
    ]


def test_wandb_keeps_offline_runs_of_one_id(reported):
    folder, results = reported
    run_id = run_ids(folder)["wandb"]
    stores = sorted((folder / "out" / "wandb").glob(f"offline-run-*-{run_id}/*.wandb"))
    assert len(stores) == 2, "both go to one run when they are synced"
    told = [wandb_records(path) for path in stores]
    assert told[0]["config"]["recipe"]["task"] == "grpo"
    assert told[0]["config"]["plan"]["peak_bytes"] > 0
    assert (told[0]["project"], told[0]["name"]) == ("sums", "first")
    rows = [row for each in told for row in each["history"]]
    rewards = [(r["train/global_step"], r["train/reward"]) for r in rows if "train/reward" in r]
    assert rewards == [(n, step["reward"]) for n, step in enumerate(steps_of(results))]
    assert [r["train/global_step"] for r in rows if "eval/reward" in r] == [2, 3]
    tables = [row for row in rows if "completions/path" in row]
    assert [row["completions/nrows"] for row in tables] == [8, 8, 8]
    made = json.loads(
        (stores[0].parent / "files" / tables[0]["completions/path"]).read_text(encoding="utf-8")
    )
    assert made["columns"][:2] == ["prompt", "completion"]


def test_trackio_has_one_run(reported):
    trackio = pytest.importorskip("trackio")
    folder, results = reported
    (run,) = {each.name: each for each in trackio.Api().runs("sums")}.values()
    assert run.name == run_ids(folder)["trackio"] == "first"
    (database,) = Path(os.environ["TRACKIO_DIR"]).glob("sums*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics order by id").fetchall()
        config = connection.execute("select config from configs").fetchall()
    told = [(step, json.loads(figures)) for step, figures in rows]
    rewards = [(step, each["train/reward"]) for step, each in told if "train/reward" in each]
    assert rewards == [(n, step["reward"]) for n, step in enumerate(steps_of(results))]
    assert [step for step, each in told if "eval/reward" in each] == [2, 3]
    assert [step for step, each in told if "completions" in each] == [0, 1, 2]
    assert json.loads(config[0][0])["recipe.task"] == "grpo"


@pytest.mark.slow  # MLflow's import and the making of its tables take 10 s
def test_mlflow_has_one_run_in_its_sqlite_file(small_model, tmp_path):
    for name in ("mlflow", "sqlalchemy"):
        pytest.importorskip(name)
    folder, results = run_reported(small_model, tmp_path, ["mlflow"])
    run_id = run_ids(folder)["mlflow"]
    with sqlite3.connect(folder / "mlflow.db") as connection:
        ask = connection.execute
        assert ask("select run_uuid, status from runs").fetchall() == [(run_id, "FINISHED")]
        assert ask("select name from experiments where name = 'sums'").fetchall()
        rewards = ask("select step, value from metrics where key = 'train/reward' order by step")
        assert rewards.fetchall() == [(n, s["reward"]) for n, s in enumerate(steps_of(results))]
        passes = ask("select step from metrics where key = 'eval/pass_at_1' order by step")
        assert passes.fetchall() == [(2,), (3,)]
        params = dict(ask("select key, value from params").fetchall())
    assert params["recipe.task"] == "grpo"
    assert params["plan.peak_phase"]
    (artifacts,) = (folder / "mlartifacts").glob(f"{run_id}/artifacts")
    table = json.loads(
        (artifacts / "completions" / "step-00000002.json").read_text(encoding="utf-8")
    )
    assert table["columns"][:2] == ["prompt", "completion"]
    assert len(table["data"]) == 8
    assert (artifacts / "memory" / "rehearsal" / "step-00000000.json").exists()


@pytest.fixture
def sft(document, tmp_path):
    """Return a function that makes an SFT run document."""
    rows = [{"prompt": f"{n}+{n}=", "completion": f"{2 * n:>4}"} for n in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

    def make(**train):
        made = document(recipe={"task": "sft", "context": 24}, train={"rewards": [], **train})
        for key in ("num_generations", "prompt_length", "completion_length"):
            del made["recipe"][key]
        made["train"]["dataset"] = {"name": "rows.jsonl"}
        return made

    return make


def test_a_tracker_that_is_not_installed_is_one_line(sft, train_run_of, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trackio", None)  # what import finds is that there is none
    result = train_run_of(sft(report_to="trackio"))
    assert result.steps == 2
    said = capsys.readouterr().err
    assert sum("trackio" in line for line in said.splitlines()) == 1
    assert 'trackio is not installed: pip install "vramwise[trackio]"' in said


class Raises:
    """Starts, and raises at the second step."""

    def start(self, facts):
        return Started(run_id="r", where="nowhere")

    def log(self, step, figures):
        if step:
            raise ConnectionError("the\nline is cut")

    def table(self, step, name, columns): ...

    def finish(self, *, failed): ...


class Hangs(Raises):
    """Starts, and never comes back from a step."""

    def log(self, step, figures):
        threading.Event().wait(60)


class NeverStarts(Raises):
    def start(self, facts):
        threading.Event().wait(60)


class SlowToStart(Raises):
    """Prints, as trackers do, and gets everything in the end."""

    def start(self, facts):
        print("on stdout")
        threading.Event().wait(1.0)
        return Started(run_id="r", where="there by now")

    def log(self, step, figures):
        print("on stdout")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Raises, ["ConnectionError: the line is cut; the run goes on without it"]),
        (Hangs, ["not done in time; about 3 entries are not sent"]),
        (
            NeverStarts,
            [
                "still starting; the run goes on, what it logs waits for it",
                "not done in time; about 4 entries are not sent",
            ],
        ),
        (
            SlowToStart,
            ["still starting; the run goes on, what it logs waits for it", "there by now"],
        ),
    ],
)
def test_a_tracker_that_fails_is_told_once_and_dropped(
    kind, said, sft, train_run_of, monkeypatch, capsys
):
    monkeypatch.setattr(reports_module, "make_reporter", lambda name: kind())
    monkeypatch.setattr(reports_module, "START_LIMIT_S", 0.2)
    monkeypatch.setattr(reports_module, "FINISH_LIMIT_S", 5.0 if kind is SlowToStart else 0.2)
    result = train_run_of(sft(report_to="wandb", steps=4))
    assert result.steps == 4
    captured = capsys.readouterr()
    told = [line for line in captured.err.splitlines() if line.startswith("wandb")]
    assert told[-len(said) :] == [f"wandb: {each}" for each in said]
    assert captured.out == "", "stdout is the verb's answer"


def test_a_call_without_an_answer_gives_the_tracker_up(monkeypatch, tmp_path):
    monkeypatch.setattr("trainer.reporters.courier.CALL_LIMIT_S", 0.0)
    courier = Courier("wandb", lambda name: Hangs())
    courier.start(RunFacts(project=None, name="a", output=tmp_path, config={}))
    assert courier.waits.wait(10)
    courier.log(0, {})
    while courier._busy_since is None:
        time.sleep(0.01)
    courier.check()
    assert courier.failed == "no answer within 0 s"


def test_a_start_has_longer(monkeypatch, tmp_path):
    monkeypatch.setattr("trainer.reporters.courier.CALL_LIMIT_S", 0.0)
    courier = Courier("wandb", lambda name: NeverStarts())
    courier.start(RunFacts(project=None, name="a", output=tmp_path, config={}))
    while courier._busy_since is None:
        time.sleep(0.01)
    courier.check()
    assert not courier.failed
    monkeypatch.setattr("trainer.reporters.courier.GIVE_UP_S", 0.0)
    courier.check()
    assert courier.failed == "no answer within 0 s"


def test_wandb_without_a_network_is_an_offline_run(
    sft, train_run_of, monkeypatch, capsys, tmp_path
):
    pytest.importorskip("wandb").teardown()  # it reads its environment once
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr("trainer.reporters.wandb.INIT_LIMIT_S", 1)
    assert train_run_of(sft(report_to="wandb")).steps == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "wandb" in line]
    assert said.startswith("wandb: offline, ")
    assert list((tmp_path / "out" / "wandb").glob("offline-run-*/*.wandb"))


def test_only_the_first_process_reports(sft, train_run_of, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(reports_module, "make_reporter", lambda name: Raises())
    train_run_of(sft(report_to="wandb"))
    assert "wandb" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("train", "message", "hint"),
    [
        ({"report_to": "wandbb"}, "unknown train.report_to 'wandbb'", "did you mean wandb?"),
        ({"report_to": ["comet_ml"]}, "unknown train.report_to 'comet_ml'", "allowed: mlflow, t"),
        ({"project": "p"}, "train.project: 'p' has no effect without train.report_to", "mlflow"),
        ({"run_name": "r"}, "train.run_name: 'r' has no effect without train.report_to", "mlflow"),
    ],
)
def test_names_are_refused(sft, tmp_path, train, message, hint):
    with pytest.raises(UsageError) as caught:
        parse_run(sft(**train), root=tmp_path)
    assert caught.value.message == message
    assert hint in caught.value.hint


def test_none_is_no_tracker(sft, tmp_path):
    assert parse_run(sft(report_to="none"), root=tmp_path)[1].trackers == ()


def test_a_table_in_markdown_holds_what_looks_like_markup():
    assert (
        markdown({"a": ["x|y\nz"], "b": [1.5]}) == "| a | b |\n| --- | --- |\n| x\\|y<br>z | 1.5 |"
    )


def leveldb_log(data, block=1 << 15):
    """Yield the records of a LevelDB log (wandb's is one, after a header of 7 bytes that counts)."""
    place, parts = 7, b""
    data = b"\0" * 7 + data
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def wandb_records(path):
    """Return what a run's file holds: records of wandb's own protocol."""
    from wandb.proto import wandb_internal_pb2

    found = {"history": [], "config": {}, "name": "", "project": ""}
    for data in leveldb_log(path.read_bytes()[7:]):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            found["name"], found["project"] = record.run.display_name, record.run.project
            for item in record.run.config.update:
                found["config"][item.key] = json.loads(item.value_json)
        if record.WhichOneof("record_type") == "history":
            row = {}
            for item in record.history.item:
                row[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            found["history"].append(row)
    return found
