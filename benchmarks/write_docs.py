"""Write what is generated: docs/cli.md, tree.md, trl-fields.md, accuracy.md, the README's example and picture, config.toml.

`python -m benchmarks.write_docs` rewrites them, `--check` fails when one is not as it would be
written. The README's example output and tree are checked by tests/test_docs.py.
"""

import argparse
import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from app.serve import config_toml

ROOT = Path(__file__).parents[1]
CLI_PAGE = ROOT / "docs" / "cli.md"
TREE_PAGE = ROOT / "docs" / "tree.md"
TRL_PAGE = ROOT / "docs" / "trl-fields.md"
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "plan.svg"
CONFIG = (ROOT / ".streamlit" / "config.toml", ROOT / "app" / ".streamlit" / "config.toml")
WHY = "\n\nWhat is alive at the peak"
"""Where the README's example is cut in two: the answer on its first screen, the reasons further down."""
PLAIN = {"COLUMNS": "100", "TERMINAL_WIDTH": "100", "NO_COLOR": "1", "TERM": "dumb"}
PROFILE_VERBS = ("run", "watch", "snapshot", "compare", "calibrate")
VERBS: tuple[tuple[str, ...], ...] = (
    ("plan",),
    ("compare",),
    ("advise",),
    ("recommend",),
    ("frontier",),
    ("published",),
    ("accuracy",),
    ("frameworks",),
    ("models",),
    ("gpus",),
    ("explain",),
    ("trace",),
    *(("profile", verb) for verb in PROFILE_VERBS),
    ("init",),
    ("train",),
    ("eval",),
    ("merge",),
    ("push",),
    ("quantize",),
    ("demo",),
    ("app",),
    ("completion",),
)


def help_text(verb: tuple[str, ...]) -> str:
    """Return the plain text of `vramwise VERB --help` at 100 columns."""
    return output([*verb, "--help"])


def cli_page() -> str:
    """Return docs/cli.md: the help of every verb."""
    parts = [
        "# Command line",
        "",
        "Made from the commands themselves by `make docs`; do not edit.",
        "",
        "Answers go to stdout, prose and progress to stderr; `--json` gives one document with integer",
        "`_bytes` keys. Exit codes: 0 ok, 1 failure, 2 usage, 3 does not fit (with `--check`), 4 no GPU,",
        "5 missing extra.",
    ]
    for verb in VERBS:
        parts += ["", f"## vramwise {' '.join(verb)}", "", "```text", help_text(verb), "```"]
    return "\n".join(parts) + "\n"


def tree_page() -> str:
    """Return docs/tree.md: every module of the four packages with its docstring's first line."""
    parts = [
        "# The tree",
        "",
        "Made from the modules' own first lines by `make docs`; do not edit.",
        "",
    ]
    for package in ("planner", "profiler", "trainer", "app", "benchmarks"):
        parts.append("```text")
        for path in sorted((ROOT / package).rglob("*.py"), key=lambda item: item.parts):
            lines = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split(
                "\n"
            )
            name = str(path.relative_to(ROOT))
            if path.name == "__init__.py" and not lines[0]:
                continue
            parts.append(f"{name:42} {lines[0]}".rstrip())
        parts += ["```", ""]
    return "\n".join(parts)


def trl_page() -> str:
    """Return docs/trl-fields.md: every field of TRL's configs -> ours, or why not."""
    from planner.importers.trl_fields import KINDS, inherited_defaults, table, version

    parts = [
        "# TRL's fields here",
        "",
        f"Every field of TRL {version()}'s configs, made from data/importers/trl_fields.json by `make docs`; do not",
        "edit. `vramwise train trl.yaml` goes by this table ([training.md](training.md), TRL's configs), and",
        "tests/trainer/test_trl_fields.py holds it against the installed dataclasses and the importer.",
        "",
        "| word | meaning |",
        "|---|---|",
        *(f"| {kind} | {meaning} |" for kind, meaning in KINDS.items()),
    ]
    titles = {
        "TrainingArguments": "inherited by SFTConfig, GRPOConfig and DPOConfig; with DPOConfig it is planned, not trained",
        "DPOConfig": "our trainer has no DPO yet: `vramwise plan` reads it, `vramwise train` refuses it by name",
    }
    for config in (
        "SFTConfig", "GRPOConfig", "DPOConfig", "TrainingArguments", "ModelConfig", "ScriptArguments",
        "GRPOScriptArguments", "DatasetMixtureConfig",
    ):  # fmt: skip
        title = f": {titles[config]}" if config in titles else ""
        parts += ["", f"## {config}{title}", ""]
        changed = inherited_defaults(config)
        if changed:
            said = ", ".join(f"{name} {value}" for name, value in changed.items())
            parts += [f"Its own defaults of inherited fields: {said}.", ""]
        parts += ["| TRL | default | here | |", "|---|---|---|---|"]
        parts += [
            f"| {row.field} | {row.default} | {', '.join(row.ours) or row.kind} "
            f"| {_trl_note(row.kind, row.note, bool(row.ours))} |"
            for row in table(config).values()
        ]
    return "\n".join(parts) + "\n"


def _trl_note(kind: str, note: str, named: bool) -> str:
    word = f"{kind}: " if named and kind != "same" else ""
    return f"{word}{note}".strip().removesuffix(":").replace("|", "\\|")


def readme_command() -> list[str]:
    """Return the words of the README's example, without `vramwise`."""
    found = re.search(
        r"^\$ vramwise (plan .+)$", README.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert found is not None
    return shlex.split(found.group(1))


def readme_page() -> str:
    """Return the README with the output of its `$ vramwise plan` block as it is now, and its claim."""
    text = README.read_text(encoding="utf-8")
    answer, reasons = output(readme_command()).split(WHY)
    start = text.index("\n", text.index("$ vramwise plan")) + 1
    text = text[:start] + answer + text[text.index("\n```", start) :]
    start = text.index(WHY.strip())
    text = text[:start] + WHY.strip() + reasons + text[text.index("\n```", start) :]
    text = re.sub(r"\d+ models in the catalogue, \d+ GPUs", catalogue_sentence(), text)
    start, end = text.index("Scored against"), text.index("[every row and every miss]")
    return text[:start] + accuracy_sentence() + text[end:]


def catalogue_sentence() -> str:
    """Return how many models and GPUs there are."""
    from planner.machines.machine import gpu_catalogue
    from planner.models.catalogue import catalogue_names

    return f"{len(catalogue_names())} models in the catalogue, {len(gpu_catalogue())} GPUs"


def readme_picture() -> str:
    """Return the picture of the README's example."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "plan.html"
        output([*readme_command(), "--html", str(target)])
        html = target.read_text(encoding="utf-8")
    start, end = html.index("<svg "), html.index("</svg>") + len("</svg>")
    return html[start:end] + "\n"


def accuracy_sentence() -> str:
    """Return the README's claim from the score of today: rows that plan() answered, p90 beside medians."""
    found = json.loads(output(["accuracy", "--json"]))

    def said(quantity: str) -> str:
        figures = found["by_quantity"][quantity]
        return f"{figures['median_abs_error']:.1%} (p90 {figures['p90_abs_error']:.0%}, {figures['n']} rows)"

    verdicts = found["verdicts"]
    return (
        f"Scored against {found['planned']:,} published figures that a plan answers, errors as median (p90):\n"
        f"peak allocated {said('peak_allocated')}, nvidia-smi {said('nvidia_smi_used_peak')},\n"
        f"vLLM's weights {said('model_weights')}, its KV memory {said('kv_cache_memory')},\n"
        f"its activation peak {said('activation_peak')}. Of {verdicts['oom']} runs that ran\n"
        f'out of memory or were refused, {verdicts["oom_called_fits"]} are called "fits"; of {verdicts["ran"]} that ran, '
        f'{verdicts["ran_called_no"]} "does not fit"; '
    )


def output(arguments: list[str]) -> str:
    """Return what a command prints, at 100 columns without colours."""
    result = subprocess.run(
        [sys.executable, "-m", "app.cli", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | PLAIN,
        check=True,
    )
    return "\n".join(line.rstrip() for line in result.stdout.splitlines()).strip()


def main() -> int:
    """Write or check the pages; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    pages = {
        CLI_PAGE: cli_page(),
        TREE_PAGE: tree_page(),
        TRL_PAGE: trl_page(),
        README: readme_page(),
        PICTURE: readme_picture(),
        **dict.fromkeys(CONFIG, config_toml()),
    }
    if arguments.check:
        stale = [
            path.name
            for path, text in pages.items()
            if not path.exists() or path.read_text(encoding="utf-8") != text
        ]
        if stale:
            print(f"{', '.join(stale)}: not as the code says; run `make docs`", file=sys.stderr)
        return 1 if stale else 0
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    accuracy = subprocess.run(
        [sys.executable, "-m", "app.cli", "accuracy", "--markdown"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    ).stdout
    (ROOT / "docs" / "accuracy.md").write_text(accuracy, encoding="utf-8")
    print("wrote docs/accuracy.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
