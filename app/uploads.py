"""Files that people bring: read with limits, never executed, never written, gone with the session.

On "Will it fit?": a model's config.json, a run.yaml, or another tool's config.
"""

import json
from dataclasses import dataclass
from typing import Any

import streamlit as st

from app import inputs, runs
from planner.errors import UsageError, VramwiseError
from planner.importers.pasted import decode
from planner.run.recipe import RunFile

MAX_CONFIG_MIB = 4
CONFIG_TYPES = ("json", "yaml", "yml", "sh", "py", "ipynb", "txt")
REPORT = "import_report"
"""Session key of what became of the last file."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What became of a file."""

    headline: str
    lines: tuple[str, ...] = ()
    failed: bool = False


def from_file() -> None:
    """Show the uploader and what became of the file."""
    uploaded = st.session_state.get(inputs.UPLOADED)
    with st.expander("Start from a file", icon=":material/upload_file:"):
        st.file_uploader(
            "A model's config.json, a run.yaml, or another tool's config",
            type=list(CONFIG_TYPES),
            key="config_file",
            max_upload_size=MAX_CONFIG_MIB,
            on_change=_take_file,
            help="axolotl, LLaMA-Factory, TRL, torchtune, ms-swift, verl, Unsloth, vLLM, DeepSpeed. "
            "Read, never run; not kept.",
        )
    report: Report | None = st.session_state.get(REPORT)
    if report is not None:
        (st.error if report.failed else st.info)(report.headline)
        if report.lines:
            with st.expander("What was taken from the file"):
                st.text("\n".join(report.lines))
    if uploaded is not None:
        st.text(f"Model: {uploaded.name} (from your file)")
        st.button("Back to the catalogue", on_click=_forget_model, key="forget_model")


def _forget_model() -> None:
    st.session_state.pop(inputs.UPLOADED, None)
    st.session_state.pop(REPORT, None)


def _take_file() -> None:
    """Read the file that was just uploaded into the session's state."""
    file = st.session_state.get("config_file")
    if file is None:
        st.session_state.pop(REPORT, None)
        return
    try:
        st.session_state[REPORT] = take(file.name, file.getvalue())
    except VramwiseError as error:
        hint = f" {error.hint}." if error.hint else ""
        st.session_state[REPORT] = Report(headline=f"{error.message}.{hint}", failed=True)


def take(name: str, content: bytes) -> Report:
    """Put what a file says into the widgets; raises VramwiseError when nothing can be made of it."""
    if len(content) > MAX_CONFIG_MIB << 20:
        raise UsageError(f"{name[:60]}: larger than {MAX_CONFIG_MIB} MiB, so not a config")
    text = decode(content)
    document = _json_object(text)
    if document is not None and _is_model_config(document):
        return _take_model(name, document)
    if name.endswith((".yaml", ".yml")) and (run := _run_file(text)) is not None:
        _apply_run(run)
        return Report(headline=f"Filled in from {name[:60]}.")
    return _take_foreign(text)


def _json_object(text: str) -> dict[str, Any] | None:
    if not text.lstrip().startswith("{"):
        return None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _is_model_config(document: dict[str, Any]) -> bool:
    return "model_type" in document or "architectures" in document


def _take_model(name: str, document: dict[str, Any]) -> Report:
    from planner.families import model_spec_from_config

    stem = name.rsplit(".", 1)[0][:60]
    label = str(document.get("_name_or_path") or stem).rstrip("/").rsplit("/", 1)[-1][:60] or stem
    spec = model_spec_from_config(document, name=label, source="uploaded config.json")
    st.session_state[inputs.UPLOADED] = spec
    return Report(
        headline=f"{spec.architecture or spec.model_type}: {spec.parameters:,} parameters."
    )


def _run_file(text: str) -> RunFile | None:
    """Return a run file of ours, or None when the YAML is another tool's."""
    from planner.run.runfile import parse_yaml, validate

    try:
        document = parse_yaml(text, label="run.yaml")
    except UsageError:
        return None
    if not ("recipe" in document or "schema_version" in document):
        return None
    return validate(RunFile, document, label="run.yaml")


def _take_foreign(text: str) -> Report:
    from planner.importers import import_config
    from planner.importers.report import report_text

    # a newline makes sure that it is read as text, never as the name of a file here
    imported = import_config(text + "\n")
    if not imported.run.model:
        imported = imported.__class__(
            tool=imported.tool,
            version=imported.version,
            report=imported.report,
            run=imported.run.model_copy(update={"model": inputs.state("model")}),
        )
    _apply_run(imported.run)
    return Report(
        headline=f"Filled in from a config of {imported.tool} {imported.version}.",
        lines=tuple(report_text(imported).splitlines()),
    )


def _apply_run(run: RunFile) -> None:
    """Write a run file into the widgets."""
    st.session_state.pop(inputs.UPLOADED, None)
    st.session_state["model"] = runs.known_name(run.model) or run.model
    if run.machine.gpu or run.machine.vram:
        inputs.set_machine(run.machine)
    else:
        st.session_state["gpus"] = run.machine.gpus
        st.session_state["nodes"] = run.machine.nodes
    try:
        inputs.set_recipe(run.recipe, inputs.run_from_state(run.recipe))
    except VramwiseError:
        inputs.set_recipe(run.recipe)
