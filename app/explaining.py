"""The parts of "Explain an error": what failed, how sure the cause is, what to change."""

import re
from typing import Any

import pandas as pd
import streamlit as st

from app.runs import known_name
from app.words import escape, section
from planner.doctor.diagnose import Diagnosis, Failure, diagnose
from planner.doctor.report import diagnosis_text
from planner.doctor.serving import serving_report
from planner.errors import UsageError
from planner.importers import Imported, import_config
from planner.importers.pasted import decode
from planner.importers.report import report_text
from planner.units import format_bytes

KEPT = "diagnosis"
"""Session key: (what the log was read with, what was found)."""
MAX_PASTED = 400_000
MAX_LOG_MIB = 200
MAX_CONFIG_MIB = 4
LOG_TYPES = ("log", "txt", "out", "err", "json", "jsonl")
CERTAINTY = {"proven by arithmetic": "green", "consistent": "orange", "unknown": "gray"}
_OURS = re.compile(r"(?<![\w-])--(config|model|gpu)\b")
"""Flags of `vramwise explain`, which are boxes here; those of the reader's own tool stay."""
EXAMPLE = """\
python sft.py --model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size 8 --max_length 4096 --use_peft --bf16
  File "site-packages/transformers/trainer.py", line 3745, in compute_loss
    outputs = model(**inputs)
  File "site-packages/transformers/models/llama/modeling_llama.py", line 480, in forward
    loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
  File "site-packages/transformers/loss/loss_utils.py", line 55, in ForCausalLMLoss
    logits = logits.float()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 15.66 GiB. GPU 0 has a total capacity of 79.10 GiB of which 9.06 GiB is free. Including non-PyTorch memory, this process has 70.03 GiB memory in use. Of the allocated memory 68.92 GiB is allocated by PyTorch, and 606.13 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.
"""
"""What torch prints; the sizes are those of Llama-3.1-8B."""


def config_of(file: object) -> Imported | None:
    """Return an uploaded config of any tool, or None; raises UsageError naming what is wrong."""
    if file is None:
        return None
    text = decode(file.getvalue())  # type: ignore[attr-defined]
    # a newline makes sure that it is read as text, never as the name of a file here
    return import_config(text + "\n")


def read(
    text: str, log: Any, imported: Imported | None, *, model: str | None, gpu: str | None
) -> Diagnosis | None:
    """Return the diagnosis of what was pasted or uploaded, or None when there is nothing.

    An uploaded log is read once for as long as it is there.
    """
    run = imported.run if imported else None
    options = {
        "model": model,
        "gpu": gpu or (run.machine.gpu if run else None),
        "recipe": run.recipe if run else None,
        "config_model": run.model if run else None,
        "gpus": run.machine.gpus if run else None,
    }
    if log is not None:
        key = (log.file_id, repr(options))
        known = st.session_state.get(KEPT)
        if known is None or known[0] != key:
            known = (key, diagnose(log, **options))  # type: ignore[arg-type]
            st.session_state[KEPT] = known
        found: Diagnosis = known[1]
        return found
    st.session_state.pop(KEPT, None)
    if not text.strip():
        return None
    if len(text) > MAX_PASTED:
        raise UsageError(
            f"text: {len(text):,} characters are too many to paste", hint="upload the log instead"
        )
    return diagnose(text + "\n", **options)  # type: ignore[arg-type]


def known_model(name: str) -> str | None:
    """Return the catalogue model that was typed; nothing is fetched for an explanation."""
    if not name.strip():
        return None
    known = known_name(name)
    if known is None:
        raise UsageError(f"model: {name[:60]!r} is not in the catalogue", hint="leave it out")
    return known


def show(found: Diagnosis) -> None:
    """Show every failure, the first cause first, and the whole report as text."""
    for note in found.notes:
        st.caption(_said(note))
    serving = serving_report(found.scan.vllm, found.context)
    if serving is not None:
        section("The server's memory")
        st.text(serving.text())
    if not (serving is not None and found.failures[0].event is None):
        for number, failure in enumerate(found.failures):
            _failure(number, failure, many=len(found.failures) > 1)
    with st.expander("The whole report as text"):
        st.code(diagnosis_text(found), language=None, wrap_lines=True)


def _said(text: str) -> str:
    """Return a sentence of the doctor's as it stands on the page."""
    return escape(_OURS.sub(r"\1", text))


def _failure(number: int, failure: Failure, *, many: bool) -> None:
    lead, *others = failure.causes
    with st.container(border=True):
        if many:
            who = failure.event.told_by() if failure.event else ""
            st.caption(escape(f"Error {number + 1}" + (f", {who}" if who else "")))
        colour = CERTAINTY.get(lead.certainty.value, "gray")
        section(lead.title)
        st.badge(lead.certainty.value, color=colour)  # type: ignore[arg-type]
        st.markdown(_said(lead.explanation[:1].upper() + lead.explanation[1:]))
        if lead.formula:
            st.code(lead.formula, language=None, wrap_lines=True)
        for cause in [other for other in others if other.certainty != "unknown"][:2]:
            st.caption(
                _said(f"Also possible: {cause.title} ({cause.certainty}): {cause.explanation}")
            )
        if failure.event is not None:
            with st.expander("The message as it was found"):
                st.code(failure.event.text[:2000], language=None, wrap_lines=True)
        else:
            st.caption("No error message found: read as a description.")
    _fixes(failure)
    left, right = st.columns(2, gap="medium")
    with left:
        _budget(number, failure)
    with right:
        _candidates(number, failure)


def _fixes(failure: Failure) -> None:
    if failure.advice.fixes:
        section("What to change")
        lines = [
            f"{index}. {_said(fix.change)}"
            + (f" **saves {format_bytes(fix.saved_bytes)}**" if fix.saved_bytes else "")
            for index, fix in enumerate(failure.advice.fixes, 1)
        ]
        st.markdown("\n".join(lines))
    if failure.advice.warnings:
        avoid = [f"- {_said(warning)}" for warning in failure.advice.warnings]
        st.warning("\n".join(["Do not be misled:", *avoid]), icon=":material/block:")
    if failure.planned is not None:
        st.caption(_said(failure.planned.sentence()))


def _budget(number: int, failure: Failure) -> None:
    if failure.budget is None:
        return
    section("Memory at that moment")
    rows = [(name, format_bytes(size)) for name, size in failure.budget.rows()]
    if failure.budget.requested_bytes is not None:
        rows.append(("requested", format_bytes(failure.budget.requested_bytes)))
    st.dataframe(
        pd.DataFrame(rows, columns=["part", "size"]),
        hide_index=True,
        width="stretch",
        key=f"budget_{number}",
        alt="The card's memory at the moment of failure.",
    )
    st.caption(escape(failure.budget.fragmentation_sentence()))
    if failure.event and failure.event.cuda:
        for said in failure.event.cuda.contradictions:
            st.caption(escape(f"These numbers contradict each other: {said}"))


def _candidates(number: int, failure: Failure) -> None:
    if not failure.candidates:
        return
    section("What the request may have been")
    st.dataframe(
        pd.DataFrame(
            [(f"{c.likelihood:.0%}", c.name, c.formula) for c in failure.candidates[:6]],
            columns=["likelihood", "tensor", "formula"],
        ),
        hide_index=True,
        width="stretch",
        key=f"candidates_{number}",
        alt="Tensors of this model that would print the same request, by likelihood.",
    )


def import_report(imported: Imported) -> None:
    """Show what was taken from a config."""
    with st.expander(f"Config: {imported.tool} {imported.version}"):
        st.text(report_text(imported))
