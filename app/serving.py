"""The parts of "Serve": what a vLLM server holds, and what makes it start or hold more."""

from typing import Any

import pandas as pd
import streamlit as st

from app import inputs, knobs, live, runs, sidebar
from app.inputs import state
from app.runs import Run
from app.words import escape, in_app, section
from planner.answers.serving import PREFIX, ServingView
from planner.answers.serving_changes import Rescue
from planner.exporters import export_run
from planner.plan import Plan
from planner.report.serving import headline
from planner.run.engine_choices import DEFAULT_LORA_RANK
from planner.run.framework import pick
from planner.run.recipe import MAX_TOKENS
from planner.units import format_bytes

KNOBS = (
    "context",
    "prompt",
    "completion",
    "seqs",
    "utilization",
    "kv_dtype",
    "quantization",
    "tensor_parallel",
    "batched_tokens",
    "graphs",
    "max_loras",
    "max_lora_rank",
)
LABELS = {"context": "Longest request"}
SAID = {
    "engine.cuda_graphs": "Without CUDA graphs",
    "engine.cpu_offload_gib": "GiB of weights in host memory",
}
FIRST_CHANGES, MOST_CHANGES = 3, 8
"""How many are seen at once, and how many there are when the others are unfolded."""
FIXED = {"task": "serve", "framework": "vllm"}


def settings() -> None:
    """Show what a server is set by."""
    sidebar.model_widget()
    sidebar.machine_widgets()
    usual = defaults()
    for first in range(0, len(KNOBS), 2):
        for column, key in zip(st.columns(2), KNOBS[first : first + 2], strict=False):
            with column:
                sidebar.knob(key, usual)


def defaults() -> dict[str, Any]:
    """Return what vLLM does by itself, by recipe path: it stands in grey where nothing is chosen."""
    law = pick(FIXED["framework"]).engine
    return {
        "engine.gpu_memory_utilization": f"{law.utilization:g}",
        "engine.kv_dtype": "auto",
        "quantization": "as stored",
        "engine.cuda_graphs": True,
        "engine.max_num_seqs": "by the card",
        "engine.max_num_batched_tokens": "by the card",
        "engine.max_loras": "none",
        "engine.max_lora_rank": DEFAULT_LORA_RANK,
        "prompt_length": "all of it",
        "completion_length": "none",
    }


def values() -> dict[str, Any]:
    """Return the settings of the server: those of the widgets, served by vLLM."""
    return inputs.values() | FIXED


def run_from_state() -> Run:
    """Return the server that the widgets say."""
    return runs.run_of(
        values(),
        model=st.session_state.get(inputs.UPLOADED),
        found=st.session_state.get(inputs.FOUND, {}),
    )


def verdict(view: ServingView, result: Plan) -> None:
    """Show whether it starts, and the figures that its owner asks for first."""
    colour, icon = ("green", "check_circle") if view.starts else ("red", "cancel")
    word = "Starts" if view.starts else "Does not start"
    if not view.starts and result.may_run:
        colour, icon, word = "orange", "warning", "May not start"
    with st.container(border=True, key="verdict"):
        why = in_app(headline(view).partition(": ")[2]) + "."
        st.header(f":{colour}[:material/{icon}: {word}]", anchor=False)
        live.say(f"{word}. {why}")
        st.write(escape(why))
        given = next(row for row in view.requests if row.given)
        with st.container(horizontal=True):
            st.metric("Tokens of KV cache", f"{view.figures.kv_tokens:,}")
            st.metric("Requests at once", f"{given.at_once:,}", help=f"Of {given.tokens:,} tokens.")
            longest = f"{view.longest:,}" if view.longest else "none"
            made = f"The model was made for {view.made_for:,}." if view.made_for else None
            st.metric("Longest request", longest, help=made)
            st.metric("KV cache", format_bytes(view.figures.kv.typical), help="On each GPU.")
            st.metric("Weights", format_bytes(view.figures.weights_bytes), help="On each GPU.")
        st.caption(relation(view))
        st.caption(
            escape(f"{result.model} on {result.machine.label}, {result.resolved.framework.title}")
        )


def relation(view: ServingView) -> str:
    """Return how the cache's tokens and the longest request go together, in one sentence."""
    shared = "All requests share the cache."
    if not view.longest:
        return f"{shared} No request starts, however short."
    if view.longest == view.made_for:
        return f"{shared} The longest request is all that the model was made for."
    if view.longest > view.figures.kv_tokens:
        return (
            f"{shared} The longest is longer: some layers keep only the last tokens of a request."
        )
    return f"{shared} The longest fits alone in 95% of starts: some leave less cache than usual."


def requests(view: ServingView) -> None:
    """Show how many requests of each length run at once."""
    section("Requests at once")
    rows = [
        (
            f"{row.tokens:,}" + (" (asked)" if row.given else ""),
            f"{row.at_once:,}",
            f"{row.low:,}",
            "the cache" if row.by == "cache" else knobs.BY_KEY["seqs"].label.lower(),
        )
        for row in view.requests
    ]
    st.table(
        pd.DataFrame(rows, columns=["tokens of a request", "at once", "at least", "limited by"]),
        border="horizontal",
        hide_index=True,
        alt="Requests at once by the length of a request, prompt and answer together.",
    )
    st.caption("Prompt and answer together. At least: in 95% of starts.")


def changes(run: Run, view: ServingView) -> None:
    """Show what makes it start, or gives it more room, each as one button."""
    section("What gives more room" if view.starts else "What makes it start")
    if not view.changes:
        st.caption("No single setting, pair of settings or number of GPUs up to 16 does.")
    shown = list(enumerate(view.changes[:MOST_CHANGES]))
    for number, change in shown[:FIRST_CHANGES]:
        _change(number, change, run, starts=view.starts)
    if more := shown[FIRST_CHANGES:]:
        with st.expander(f"{len(more)} more"):
            for number, change in more:
                _change(number, change, run, starts=view.starts)


def _change(number: int, change: Rescue, run: Run, *, starts: bool) -> None:
    """Show one change: a button that makes it, and what it gives and costs."""
    left, right = st.columns([2, 3], vertical_alignment="center")
    left.button(
        label(change),
        key=f"serve_{number}",
        icon=":material/trending_up:" if starts else ":material/check_circle:",
        width="stretch",
        on_click=apply,
        args=(change, run.machine.num_gpus),
    )
    right.markdown(escape(in_app(f"{held(change)}. Price: {change.price}.")))


def held(change: Rescue) -> str:
    """Return what the server holds after a change."""
    each = f"{change.at_once:.1f} requests of {change.max_model_len:,}"
    return f"{change.kv_tokens:,} tokens of cache, {each}"


def label(change: Rescue) -> str:
    """Return a change in the words of the sidebar."""
    parts = []
    for path, value in change.update.items():
        knob = knobs.BY_PATH.get(path)
        if value is None:
            continue
        if value is False:
            parts.append(SAID.get(path, path))
            continue
        name = SAID.get(path) or (LABELS.get(knob.key, knob.label) if knob else path)
        parts.append(f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}")
    return ", ".join(parts) + (f", {change.gpus} GPUs" if change.gpus > 1 else "")


def apply(change: Rescue, gpus: int) -> None:
    """Write a change into the widgets."""
    for path, value in change.update.items():
        knob = knobs.BY_PATH.get(path)
        if knob is not None:
            st.session_state[knob.key] = knobs.to_widget(knob, value)
    if change.gpus > gpus:
        st.session_state["gpus"] = change.gpus


def adapters(view: ServingView) -> None:
    """Show what adapter slots cost."""
    slots = view.slots
    if slots is None:
        return
    section("Adapters beside the base")
    with st.container(horizontal=True):
        st.metric("Slots", f"{slots.now:,}")
        st.metric(f"One of rank {slots.rank}", format_bytes(slots.slot_bytes))
        st.metric("Takes the place of", f"{slots.slot_tokens:,} tokens")
        st.metric("At most", f"{slots.most:,}" if slots.most else "none")


def shared_prefix() -> None:
    """Ask how many tokens all requests begin with."""
    st.number_input(
        "Tokens that all requests begin with",
        0,
        MAX_TOKENS,
        PREFIX,
        256,
        key="shared_prefix",
        help="A system prompt: vLLM holds it once.",
    )


def prefix(view: ServingView) -> None:
    """Show what a shared prefix saves."""
    found = view.prefix
    if found is None:
        st.caption("Not counted for models whose layers keep caches of several kinds.")
        return
    with st.container(horizontal=True):
        st.metric("Requests at once, shared", f"{found.at_once:,}")
        st.metric(
            "Without sharing", f"{found.alone:,}", help=f"Of {found.request_tokens:,} tokens."
        )


def budget(view: ServingView) -> None:
    """Show what the GPU's memory goes to, as vLLM's start-up log has it."""
    figures = view.figures
    rows = [
        ("weights", figures.weights_bytes),
        ("largest step", figures.activation_peak_bytes),
        ("CUDA graphs", figures.graphs.typical),
        ("outside torch", figures.non_torch.typical),
        ("KV cache", max(0, figures.kv.typical)),
    ]
    section("Where a GPU's memory goes")
    st.table(
        pd.DataFrame([(name, format_bytes(size)) for name, size in rows], columns=["part", "size"]),
        border="horizontal",
        hide_index=True,
        alt="The parts of a GPU's memory while vLLM serves.",
    )


def command(run: Run) -> None:
    """Show the command that starts this server."""
    section("Start it")
    exported = export_run(run.file, "vllm")
    st.code(exported.command, language="bash", wrap_lines=True)
    if state("quantization"):
        st.caption("A quantised server needs a checkpoint of that kind where vLLM cannot make one.")
