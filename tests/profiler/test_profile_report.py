"""Reports and the command line: what is printed, what the page holds, exit codes, JSON on stdout."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from profiler.cli import register
from profiler.explain import as_measured, as_planned, explain, largest_difference
from profiler.launch import Sample
from profiler.live import line
from profiler.recording import Recording
from profiler.recording_parts import LiveTensor, PhaseRecord
from profiler.report import page, phase_spans, summary, terminal

ROOT = Path(__file__).parents[2]
MIB = 1024**2


def phase(name: str, **terms: int) -> PhaseRecord:
    return PhaseRecord(name=name, peak_bytes=sum(terms.values()), terms_bytes=terms)


def recording(**changes: Any) -> Recording:
    fields: dict[str, Any] = {
        "source": "torch",
        "subject": "python <train>.py",
        "environment": {"gpu": "X", "steps": 3, "exit_code": 0},
        "phases": (
            phase("forward", weights=10 * MIB, activations=30 * MIB),
            phase("step", weights=10 * MIB, optimizer=20 * MIB),
        ),
        "peak_bytes": 40 * MIB,
        "peak_phase": "forward",
        "timeline": (
            {"t_s": 0.0, "phase": "load", "allocated_bytes": 1, "host_bytes": None},
            {"t_s": 1.0, "phase": "forward", "allocated_bytes": 2, "host_bytes": 5},
            {"t_s": 2.0, "phase": "forward", "allocated_bytes": None, "host_bytes": 6},
            {"t_s": 3.0, "phase": "step", "allocated_bytes": 3, "host_bytes": 7},
        ),
        "largest": (
            LiveTensor(
                bytes=30 * MIB,
                shape=(4, 8),
                dtype="float32",
                term="activations",
                module="layers.0",
                op="aten.mm",
                phase="forward",
            ),
        ),
        "notes": ("a <note>",),
    }
    return Recording(**{**fields, **changes})


def text_of(renderable: Any) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


def test_the_terminal_report_shows_phases_terms_and_unknown() -> None:
    text = text_of(terminal(recording()))
    assert "peak" in text
    assert "40.00 MiB in forward" in text
    assert "optimizer steps" in text
    row = next(row for row in text.splitlines() if row.startswith("step"))
    assert "20.00 MiB" in row
    assert "peak seen by the driver  unknown" in text
    assert "note: a <note>" in text


def test_a_peak_that_is_not_known_is_not_shown_as_zero() -> None:
    rows = summary(recording(peak_bytes=0, peak_phase="", partial=True))
    assert rows["peak"] == "unknown"
    assert rows["complete"].startswith("no")


def test_the_page_is_self_contained_and_escapes_what_it_was_given() -> None:
    html = page(recording())
    assert "&lt;train&gt;" in html
    assert "<train>" not in html
    assert "a &lt;note&gt;" in html
    assert "layers.0" in html
    assert 'src="http' not in html
    assert html.count("plotly-graph-div") == 2


def test_neighbouring_rows_of_a_phase_are_one_span() -> None:
    assert phase_spans(recording()) == [(0.0, 1.0, "load"), (1.0, 3.0, "forward")]


def test_the_live_line_says_unknown_where_the_driver_is_silent() -> None:
    sample = Sample(
        monotonic_s=5.0, device_used_bytes=None, gpu_used_bytes=None, host_bytes=MIB, processes=2
    )
    shown = line(sample, 65.0, {}, {"a": 3 * MIB, "phase": "backward"})
    assert shown == "01:05  GPU unknown  torch 3.00 MiB  host 1.00 MiB  2 processes  backward"


def planned(model: Path) -> Any:
    from planner.machines.machine import make_machine
    from planner.models.hub import find_model
    from planner.plan import plan
    from planner.run.runfile import make_recipe

    recipe = make_recipe(method="full", context=64, micro_batch_size=1)
    return plan(find_model(str(model)), recipe, make_machine("rtx-4090"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 256,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_cpu_run_is_not_blamed_for_the_workspace_it_does_not_have(model: Path) -> None:
    plan = planned(model)
    on_cpu = as_measured(plan, recording(environment={"gpu": None}))
    assert any(term.name == "overhead" for phase in plan.phases for term in phase.terms)
    assert not any(term.name == "overhead" for phase in on_cpu.phases for term in phase.terms)
    assert on_cpu.peak_bytes < plan.peak_bytes
    assert as_measured(plan, recording()) is plan


def test_totals_are_compared_as_owned_and_rest(model: Path) -> None:
    from profiler.compare import compare

    plan = planned(model)
    totals = recording(largest=(), environment={"gpu": "X"})
    comparison = compare(as_measured(plan, totals), totals)
    owned = {"weights", "adapters", "gradients", "optimizer"}
    assert {cell.term for cell in comparison.cells} <= {*owned, "activations"}
    rest = sum(term.bytes for term in plan.phase("loss").terms if term.name not in owned)
    assert comparison.cell("loss", "activations").planned_bytes == rest


def test_the_libraries_in_a_cpu_heap_are_left_out_of_a_comparison() -> None:
    on_cpu = recording(
        largest=(),
        environment={"gpu": None},
        peak_bytes=150 * MIB,
        phases=(phase("forward", weights=10 * MIB, activations=30 * MIB, overhead=110 * MIB),),
    )
    assert as_planned(on_cpu).peak_bytes == 40 * MIB
    assert as_planned(recording()) == recording()


def test_the_largest_difference_is_named_with_formula_and_tensors(model: Path) -> None:
    from profiler.compare import compare

    plan, measured = planned(model), recording()
    comparison = compare(plan, measured)
    cell = largest_difference(comparison)
    assert cell is not None
    assert (cell.phase, cell.term) == ("forward", "activations")
    lines = "\n".join(explain(comparison, plan, measured))
    assert "largest difference: activations in forward" in lines
    assert "less than measured" in lines
    assert "4 x 8 float32, layers.0" in lines


def cli() -> typer.Typer:
    app = typer.Typer()
    register(app)
    app.command("other")(lambda: None)
    return app


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys, typer\n"
        "from profiler.cli import register\n"
        "from planner.errors import VramwiseError\n"
        "app = typer.Typer(); register(app); app.command('other')(lambda: None)\n"
        "try:\n    app()\n"
        "except VramwiseError as error:\n"
        "    print(error.message, error.hint, file=sys.stderr); sys.exit(error.exit_code)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "profile", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_json_is_one_document_and_the_commands_output_goes_to_stderr(tmp_path: Path) -> None:
    out = str(tmp_path / "o")
    done = run_cli("run", "--json", "--out", out, "--", "sh", "-c", "echo from the child; exit 5")
    assert done.returncode == 5
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    assert document["environment"]["exit_code"] == 5
    assert "from the child" in done.stderr
    names = {path.name for path in Path(out).iterdir()}
    assert names == {"journal", "recording.json", "timeline.parquet", "report.html"}


def test_options_of_the_command_are_the_commands(tmp_path: Path) -> None:
    done = run_cli("run", "--out", str(tmp_path / "o"), "sh", "-c", "echo $0", "--json")
    assert done.stdout == "--json\n"


def test_a_command_that_does_not_exist_is_a_usage_error(tmp_path: Path) -> None:
    done = run_cli("run", "--out", str(tmp_path / "o"), "--", "no-such-thing")
    assert done.returncode == 2
    assert "not on PATH" in done.stderr


def test_a_wrong_snapshot_choice_names_what_is_allowed() -> None:
    done = run_cli("run", "--snapshot", "always", "--", "true")
    assert done.returncode == 2
    assert "oom, peak or none" in done.stderr


def test_watch_replays_a_recorded_session_as_json(tmp_path: Path) -> None:
    calls = [
        ("nvmlDeviceGetCount", [], 1),
        ("nvmlDeviceGetHandleByIndex", [0], {"handle": "0"}),
        ("nvmlDeviceGetName", ["0"], "NVIDIA A40"),
    ]
    session = tmp_path / "s.jsonl"
    session.write_text(
        "\n".join(json.dumps({"call": c, "arguments": a, "answer": r}) for c, a, r in calls)
    )
    runner = CliRunner()
    done = runner.invoke(cli(), ["profile", "watch", "--replay", str(session), "--json"])
    document = json.loads(done.stdout)
    assert document["gpus"][0]["name"] == "NVIDIA A40"
    assert document["gpus"][0]["used_bytes"] is None
    shown = runner.invoke(cli(), ["profile", "watch", "--replay", str(session), "--once"])
    assert "unknown" in shown.stdout


def test_compare_explains_and_is_json(tmp_path: Path, model: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(
        f"model: {model}\nmachine: {{gpu: rtx-4090}}\n"
        "recipe: {method: full, context: 64, micro_batch_size: 1}\n"
    )
    recording().save(tmp_path / "r.json")
    runner = CliRunner()
    arguments = ["profile", "compare", str(run), str(tmp_path / "r.json")]
    shown = runner.invoke(cli(), arguments)
    assert "largest difference: activations in forward" in shown.stdout
    document = json.loads(runner.invoke(cli(), [*arguments, "--json"]).stdout)
    assert document["measured_peak_bytes"] == 40 * MIB
    assert document["explanation"]


def test_help_leaves_torch_alone() -> None:
    code = (
        "import sys, typer\nfrom profiler.cli import register\n"
        "app = typer.Typer(); register(app)\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
