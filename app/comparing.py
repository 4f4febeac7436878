"""The parts of "Compare": runs side by side, what differs in their settings, the published table."""

from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import pandas as pd
import streamlit as st
from pydantic import BaseModel

from app import cached, charts
from app.draw import draw
from app.palette import term_words
from app.words import MARKS, escape, in_app, section
from planner.answers.published import published
from planner.errors import VramwiseError
from planner.machines.machine import make_machine
from planner.models.hub import find_model
from planner.plan import Plan, plan
from planner.run.runfile import make_recipe
from planner.terms.term import TERM_NAMES
from planner.units import format_bytes, to_gib

TABLE = "unsloth-grpo"
LINE_NAMES = {
    "training": "Training, logits apart",
    "grpo_logits": "GRPO's logits",
    "inference_weights": "Weights for inference",
    "kv_cache": "KV cache",
}
START: dict[str, Any] = {
    "task": "grpo",
    "method": "qlora",
    "framework": "trl-0.15",
    "lora": {"rank": 32},
    "context": 20_480,
    "num_generations": 8,
    "micro_batch_size": 8,
    "checkpointing": "full",
    "attention": "flash",
    "dtype": "bf16",
    "mixed_precision": "bf16",
    "beta": 0.0,
    "engine": {"kind": "vllm-push", "sleep_level": 1},
}
"""The run of the published table; `planner.answers.published` plans the same one."""
STEPS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("one copy of the weights", {"engine": {"kind": "vllm-shared", "sleep_level": 1}}),
    ("loss in chunks", {"loss": "chunked"}),
    ("checkpoints to host RAM", {"checkpointing": "offload"}),
    ("Unsloth's own kernels", {"framework": "unsloth", "loss": None}),
)
"""What Unsloth changes, one after the other."""
FRAMEWORKS, MY_RUNS, PUBLISHED = "frameworks", "my runs", "510.8 GB to 54.3 GB"
MODEL, GPU = "llama-3.1-8b", "h100-sxm"
STEP_COLUMNS = ("step", "change", "why")


def mode() -> str:
    """Show what can be compared, and return what is chosen."""
    chosen = st.segmented_control(
        "Compare",
        [FRAMEWORKS, MY_RUNS, PUBLISHED],
        default=FRAMEWORKS,
        key="compare",
        bind="query-params",
        required=True,
        label_visibility="collapsed",
    )
    return str(chosen)


def bars(plans: dict[str, Plan], *, key: str) -> None:
    """Show the peak phase of every run as one stacked bar."""
    rows = [
        {
            "run": name,
            "term": term_words(term.name),
            "gib": to_gib(term.bytes),
            "size": format_bytes(term.bytes),
            "formula": term.formula,
            "order": TERM_NAMES.index(term.name) if term.name in TERM_NAMES else 99,
        }
        for name, result in plans.items()
        for term in result.phase(result.peak_phase).terms
    ]
    capacities = {result.capacity_bytes for result in plans.values()}
    shared = capacities.pop() if len(capacities) == 1 else None
    peaks = ", ".join(f"{name} {format_bytes(p.peak_bytes)}" for name, p in plans.items())
    draw(
        charts.side_by_side(rows, shared, order=list(plans)),
        key=key,
        alt=f"Peak memory by term: {peaks}.",
        figures=rows,
        columns=("run", "term", "size", "formula"),
    )


def table(plans: dict[str, Plan], *, key: str) -> None:
    """Show verdict, peak and every phase of every run."""
    phases = list(dict.fromkeys(phase.name for p in plans.values() for phase in p.phases))
    rows = []
    for name, result in plans.items():
        sizes = {phase.name: format_bytes(phase.total_bytes, digits=1) for phase in result.phases}
        rows.append(
            {
                "run": name,
                "verdict": MARKS[result.verdict][2],
                "peak": format_bytes(result.peak_bytes, digits=1),
                "in": result.peak_phase,
                **{phase: sizes.get(phase, "") for phase in phases},
            }
        )
    st.dataframe(
        pd.DataFrame(rows),
        hide_index=True,
        width="stretch",
        key=key,
        alt="Verdict, peak and phases of every run.",
    )


def differences(plans: dict[str, Plan]) -> list[dict[str, str]]:
    """Return the resolved settings in which the runs differ, a row each."""
    settings = {name: _settings(result) for name, result in plans.items()}
    rows = []
    for key in next(iter(settings.values())):
        found = {name: values[key] for name, values in settings.items()}
        if len(set(found.values())) > 1:
            rows.append({"setting": key.replace("_", " "), **found})
    return rows


def _settings(result: Plan) -> dict[str, str]:
    r = result.resolved
    hidden = {"framework", "framework_asked", "switches", "law", "assumptions", "trains"}
    hidden |= {"batch", "at_once"}  # `sequences` follows from them
    names = [name for name in r.__slots__ if name not in hidden]
    values = {name: getattr(r, name) for name in names}
    return {
        "model": result.model,
        "machine": result.machine.label,
        "framework": r.framework.title,
        **{name: setting_words(value) for name, value in values.items()},
        "logits": r.law.kind,
    }


def setting_words(value: Any) -> str:
    """Return a resolved setting for people; one of many parts says those that are set."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value in ("", ()):
        return "none"
    if isinstance(value, Enum):
        return str(value.value)
    if hasattr(value, "_asdict"):
        parts = value._asdict()
    elif isinstance(value, tuple):
        return "; ".join(map(setting_words, value))
    elif is_dataclass(value) and type(value).__str__ is object.__str__:
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
    elif isinstance(value, BaseModel):
        parts = dict(value)
    else:
        return f"{value:,}" if isinstance(value, int) else str(value)
    said = ((name.replace("_", " "), part) for name, part in parts.items() if part)
    return ", ".join(f"{name} {setting_words(part)}" for name, part in said) or "none"


def differences_table(plans: dict[str, Plan], *, key: str) -> None:
    """Show the settings that differ."""
    section("Settings that differ")
    rows = differences(plans)
    if not rows:
        st.caption("None: these runs are the same.")
        return
    st.dataframe(
        pd.DataFrame(rows),
        hide_index=True,
        width="stretch",
        key=key,
        alt="The settings in which these runs differ, framework defaults filled in.",
    )


def published_steps() -> list[dict[str, Any]]:
    """Return the waterfall of the table as published: printed GB, line by line."""
    rows = {(row["line"], row["column"]): row for row in published(TABLE)["rows"]}
    level = rows["total", "trl"]["published"]
    steps = [_bar("Hugging Face + FA2", 0, level, f"{level:g}", "total", "sum of four lines")]
    for line, label in LINE_NAMES.items():
        before, after = rows[line, "trl"]["published"], rows[line, "unsloth"]["published"]
        if before == after:
            continue
        change = after - before
        why = f"{before:g} to {after:g}: {rows[line, 'trl']['derivation']}"
        kind = "less" if change < 0 else "more"
        steps.append(_bar(label, level + change, level, f"{change:+.1f}", kind, why))
        level += change
    level = rows["total", "unsloth"]["published"]
    steps.append(_bar("Unsloth", 0, level, f"{level:g}", "total", "sum of four lines"))
    return steps


@st.cache_data(max_entries=1, show_spinner=False)
def real_steps() -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Return the same job op by op: the peak after each change, and the plans' one-line reasons."""
    model, machine = find_model(MODEL), make_machine(GPU)
    fields = dict(START)
    result = plan(model, make_recipe(**fields), machine)
    bars_, reasons = [], [{"after": "TRL 0.15", "why": result.why}]
    label = format_bytes(result.peak_bytes, digits=1)
    bars_.append(_bar("TRL 0.15", 0, to_gib(result.peak_bytes), label, "total", result.why))
    for name, update in STEPS:
        fields |= update
        then = plan(model, make_recipe(**fields), machine)
        low, high = sorted((result.peak_bytes, then.peak_bytes))
        kind = "less" if then.peak_bytes <= result.peak_bytes else "more"
        sign = "-" if kind == "less" else "+"
        label = sign + format_bytes(high - low, digits=1) if high > low else "no change"
        bars_.append(_bar(name, to_gib(low), to_gib(high), label, kind, then.why))
        reasons.append({"after": name, "why": then.why})
        result = then
    label = format_bytes(result.peak_bytes, digits=1)
    bars_.append(_bar("Unsloth", 0, to_gib(result.peak_bytes), label, "total", result.why))
    return bars_, reasons


def _bar(step: str, start: float, end: float, change: str, kind: str, why: str) -> dict[str, Any]:
    low, high = sorted((start, end))
    return {
        "step": step,
        "start_gib": low,
        "end_gib": high,
        "right_gib": high,
        "change": change,
        "kind": kind,
        "why": why,
    }


def waterfalls() -> None:
    """Show 510.8 to 54.3 as published, as it really is, and line by line."""
    document = published(TABLE)
    left, right = st.columns(2, gap="medium")
    with left:
        section("As published")
        st.caption("GB as printed: four lines added up, units mixed.")
        steps = published_steps()
        said = ", ".join(f"{step['step']} {step['change']}" for step in steps)
        draw(
            charts.waterfall(steps, unit="GB as printed"),
            key="as_published",
            alt=f"Waterfall: {said}.",
            figures=steps,
            columns=STEP_COLUMNS,
        )
    with right:
        section("As it really is")
        st.caption("GiB, op by op: the largest phase, not a sum. All 8 sequences in one pass.")
        steps, reasons = real_steps()
        said = ", ".join(f"{step['step']} {step['change']}" for step in steps)
        draw(
            charts.waterfall(steps),
            key="as_it_is",
            alt=f"Waterfall: {said}.",
            figures=steps,
            columns=STEP_COLUMNS,
        )
    for reason in reasons:
        st.caption(escape(in_app(f"{reason['after']}: {reason['why']}")))
    section("Line by line")
    frame = pd.DataFrame(document["rows"])
    frame["line"] = frame["line"].map(lambda line: LINE_NAMES.get(line, line))
    frame["op level"] = [format_bytes(size) for size in frame["op_level_bytes"]]
    columns = ["column", "line", "published", "reproduced", "unit", "op level", "derivation"]
    st.dataframe(
        frame[columns],
        hide_index=True,
        width="stretch",
        key="published_table",
        alt="Every line of the published table, reproduced, beside the op-level estimate.",
    )
    for note in document["notes"]:
        st.caption(escape(in_app(note)))
    st.caption(escape(f"Source: {document['source']}"))


def planned(runs: dict[str, Any]) -> tuple[dict[str, Plan], list[str]]:
    """Return the plans of named runs, and a sentence for each that cannot be planned."""
    plans, problems = {}, []
    for name, run in runs.items():
        try:
            plans[name] = cached.plan_of(run)
        except VramwiseError as error:
            problems.append(in_app(f"{name}: {error.message}"))
    return plans, problems
