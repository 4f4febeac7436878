"""A diagnosis as text and as JSON."""

from dataclasses import asdict
from typing import Any

from planner.doctor.diagnose import Diagnosis, Failure, parsed_facts
from planner.doctor.serving import serving_report
from planner.units import format_bytes

SCHEMA_VERSION = 1


def diagnosis_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the JSON document of `explain`: the first failure at the top level, all in `errors`."""
    errors = [_failure_dict(failure, diagnosis) for failure in diagnosis.failures]
    log = diagnosis.scan.vllm
    context = diagnosis.context
    serving = serving_report(log, context)
    return {
        "schema_version": SCHEMA_VERSION,
        **errors[0],
        "errors": errors,
        "vllm_log": asdict(log) if log.started else None,
        "serving": serving.to_dict() if serving else None,
        "context": {
            "model": context.model.name if context.model else None,
            "model_name": context.model_name,
            "parameters": context.parameters,
            "task": context.task,
            "method": context.method,
            "sharding": context.sharding,
            "vram_bytes": context.vram_bytes,
            "numbers": context.numbers,
        },
        "notes": list(diagnosis.notes),
    }


def _failure_dict(failure: Failure, diagnosis: Diagnosis) -> dict[str, Any]:
    event = failure.event
    return {
        "kind": event.kind if event else "description",
        "line": event.line if event else None,
        "ranks": list(event.streams) if event else [],
        "message": event.text if event else "",
        "parsed": parsed_facts(failure, diagnosis.scan),
        "contradictions": list(event.cuda.contradictions) if event and event.cuda else [],
        "budget": asdict(failure.budget) if failure.budget else None,
        "phases": list(failure.phases),
        "candidates": [asdict(candidate) for candidate in failure.candidates],
        "causes": [{**asdict(cause), "title": cause.title} for cause in failure.causes],
        "fixes": [asdict(fix) for fix in failure.advice.fixes],
        "warnings": list(failure.advice.warnings),
        "planned": failure.planned.plan.to_dict() if failure.planned else None,
    }


def diagnosis_text(diagnosis: Diagnosis) -> str:
    """Return the diagnosis for a person."""
    parts = [
        _failure_text(number, failure, diagnosis)
        for number, failure in enumerate(diagnosis.failures, 1)
    ]
    serving = serving_report(diagnosis.scan.vllm, diagnosis.context)
    if serving is not None:
        parts.insert(0, serving.text())
        if diagnosis.failures[0].event is None:  # a start-up that went well
            del parts[1:]
    return "\n\n".join(parts) + "\n"


def _failure_text(number: int, failure: Failure, diagnosis: Diagnosis) -> str:
    event = failure.event
    many = len(diagnosis.failures) > 1
    lines = []
    if event is not None:
        where = ", ".join(filter(None, (f"line {event.line}", event.told_by())))
        lines.append(f"{'error ' + str(number) + ' ' if many else ''}({where}): {event.text}")
    else:
        lines.append("no error message found: read as a description")
    if failure.budget:
        lines.append("\nmemory at the moment of failure")
        lines += [f"  {name:<30}{format_bytes(value):>14}" for name, value in failure.budget.rows()]
        if failure.budget.requested_bytes is not None:
            lines.append(f"  {'requested':<30}{format_bytes(failure.budget.requested_bytes):>14}")
        lines.append(f"  {failure.budget.fragmentation_sentence()}")
        if said := failure.budget.tiny_sentence():
            lines.append(f"  {said}")
    if event and event.cuda:
        lines += [
            f"  these numbers contradict each other: {said}" for said in event.cuda.contradictions
        ]
    if failure.candidates:
        lines.append("\nwhat the request may have been")
        lines += [
            f"  {candidate.likelihood:>5.0%}  {candidate.name}: {candidate.formula}"
            for candidate in failure.candidates[:6]
        ]
    lead, *others = failure.causes
    lines.append(f"\ncause: {lead.title} ({lead.certainty})\n  {lead.explanation}")
    if lead.formula:
        lines.append(f"  {lead.formula}")
    lines += [
        f"  also possible: {cause.title} ({cause.certainty}): {cause.explanation}"
        + (f" {cause.formula}" if cause.formula else "")
        for cause in others[:2]
    ]
    if failure.planned is not None:
        lines.append(f"  {failure.planned.sentence()}")
    if failure.advice.fixes:
        lines.append("\nwhat to change")
        for index, fix in enumerate(failure.advice.fixes, 1):
            saved = f"  [saves {format_bytes(fix.saved_bytes)}]" if fix.saved_bytes else ""
            lines.append(f"  {index}. {fix.change}{saved}")
    lines += [f"  not: {warning}" for warning in failure.advice.warnings]
    return "\n".join(lines)
