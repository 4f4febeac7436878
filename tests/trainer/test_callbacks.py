"""Callbacks: called in order, may stop, save and evaluate, and their errors cost no step."""

import json

import pytest

from planner.errors import UsageError, VramwiseError
from trainer import checkpoint as checkpoints

WATCH = """
class Watch:
    def __init__(self):
        self.heard = []

    def on_train_begin(self, run):
        self.heard.append(["begin", run.step, run.max_steps])

    def on_step_end(self, run, step, metrics):
        print("a line on stdout")
        self.heard.append(["step", step, run.step, metrics["step"]])
        if step == 0:
            run.save()
        if step == 1:
            run.evaluate()
        if step == 2:
            run.stop("enough")

    def on_evaluate(self, run, step, figures):
        self.heard.append(["evaluate", step, sorted(figures)[:1]])

    def on_save(self, run, step, path):
        self.heard.append(["save", step, path.name])

    def on_train_end(self, run):
        import json
        self.heard.append(["end", run.step])
        (run.output / "heard.json").write_text(json.dumps(self.heard))
"""


@pytest.fixture
def sft(document, tmp_path):
    """Return a function that makes an SFT run document with a callback of this text."""
    rows = [{"prompt": f"{n}+{n}=", "completion": f"{2 * n:>4}"} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows[:16])), encoding="utf-8")
    (tmp_path / "held.jsonl").write_text("\n".join(map(json.dumps, rows[16:])), encoding="utf-8")

    def make(text, *, name="Watch", **train):
        (tmp_path / "watch.py").write_text(text, encoding="utf-8")
        made = document(
            recipe={"task": "sft", "context": 24, "micro_batch_size": 4},
            train={"rewards": [], "callbacks": f"watch.py:{name}", "steps": 4, **train},
        )
        for key in ("num_generations", "prompt_length", "completion_length"):
            del made["recipe"][key]
        made["train"]["dataset"] = {"name": "rows.jsonl"}
        return made

    return make


def test_events_come_in_order_and_what_they_ask_for_happens(sft, train_run_of, tmp_path, capsys):
    made = sft(WATCH, validation="held.jsonl", eval_every=0, save_every=0, steps=9)
    result = train_run_of(made)
    assert (result.steps, result.stop_reason, result.stopped_by) == (3, "enough", None)
    heard = json.loads((tmp_path / "out" / "heard.json").read_text(encoding="utf-8"))
    assert heard == [
        ["begin", 0, 9],
        ["step", 0, 1, 0],
        ["save", 1, "step-00000001"],
        ["step", 1, 2, 1],
        ["evaluate", 2, ["best"]],
        ["step", 2, 3, 2],
        ["save", 3, "step-00000003"],
        ["end", 3],
    ]
    said = capsys.readouterr()
    assert said.out == "", "stdout is the verb's answer"
    assert "stopped after 3 steps: enough" in said.err


def weights(output, step):
    from safetensors.torch import load_file

    folder = output / "checkpoints" / f"step-{step:08d}"
    return load_file(folder / "adapter_model.safetensors")


def test_an_error_names_the_file_and_costs_no_step(sft, train_run_of, tmp_path):
    failing = "class Watch:\n    def on_step_end(self, run, step, metrics):\n        if step == 1:\n            raise ValueError('no\\nmore')\n"
    made = sft(failing, save_every=0)
    with pytest.raises(VramwiseError) as caught:
        train_run_of(made)
    told = caught.value
    assert told.message == (
        "train.callbacks: watch.py line 4: ValueError('no\\nmore') in on_step_end"
    )
    assert "--resume" in told.hint
    assert checkpoints.latest(tmp_path / "out").step == 2
    # the run that goes on is the one that was never interrupted: no sample twice, none left out
    whole = sft("class Watch:\n    def on_train_end(self, run): ...\n", save_every=0)
    train_run_of(whole, resume=True)
    whole["train"]["output"] = str(tmp_path / "whole")
    train_run_of(whole)
    resumed, straight = weights(tmp_path / "out", 4), weights(tmp_path / "whole", 4)
    assert all(resumed[name].equal(straight[name]) for name in straight)


@pytest.mark.parametrize(
    ("event", "step"),
    [("on_train_begin(self, run)", None), ("on_save(self, run, step, path)", 4)],
)
def test_an_error_anywhere_leaves_what_is_saved(event, step, sft, train_run_of, tmp_path):
    with pytest.raises(VramwiseError, match=r"watch.py line 3: SystemExit\(3\) in on_"):
        train_run_of(sft(f"class Watch:\n    def {event}:\n        raise SystemExit(3)\n"))
    if step is None:
        assert not (tmp_path / "out").exists(), "a failed start leaves nothing behind"
    else:
        assert checkpoints.latest(tmp_path / "out").step == step


def test_an_evaluation_without_a_validation_set_is_named(sft, train_run_of):
    asking = (
        "class Watch:\n    def on_step_end(self, run, step, metrics):\n        run.evaluate()\n"
    )
    with pytest.raises(VramwiseError, match=r"watch.py line 3: there is nothing to evaluate on"):
        train_run_of(sft(asking))


@pytest.mark.parametrize(
    ("text", "name", "message", "hint"),
    [
        ("x = (", "Watch", r"watch.py does not import: watch.py line 1: SyntaxError", None),
        ("1 / 0", "Watch", r"does not import: watch.py line 1: ZeroDivisionError", None),
        ("class Other: ...", "Watch", r"watch.py has no Watch", None),
        ("class Watch:\n  def on_step_ends(self): ...", "Watch", r"'on_step_ends'", "on_step_end"),
        (
            "class Watch:\n  def on_save(self): ...",
            "Watch",
            r"on_save: too many",
            "run, step, path",
        ),
        ("class Watch: ...", "Watch", r"watch.py:Watch has none of on_train_begin", "define one"),
        ("class Watch:\n  def __init__(self, a): ...", "Watch", r"when Watch is made", "arguments"),
    ],
)
def test_what_cannot_be_called_is_refused_before_the_model_loads(
    text, name, message, hint, sft, train_run_of, monkeypatch
):
    monkeypatch.setattr("trainer.sft.load_samples", lambda *a, **k: pytest.fail("too late"))
    with pytest.raises(UsageError, match=message) as caught:
        train_run_of(sft(text, name=name))
    assert (hint or "") in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("named", "message"),
    [("watch", "'watch' is not allowed"), ("no.py:Watch", "no such file")],
)
def test_a_name_is_a_file_and_what_is_in_it(named, message, sft, train_run_of):
    made = sft(WATCH)
    made["train"]["callbacks"] = [named]
    with pytest.raises(UsageError, match=message):
        train_run_of(made)
