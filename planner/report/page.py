"""A plan as one HTML file: it opens without a network, runs no script, and prints."""

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from planner.report.colours import INK, PAPER, SOFT, VERDICT_COLOURS
from planner.report.picture import sentence, title
from planner.report.svg import picture_svg
from planner.report.text import Lever, risk_words, summary
from planner.run.framework import planned_as
from planner.units import format_bytes

if TYPE_CHECKING:
    from planner.phases import Phase
    from planner.plan import Plan
    from planner.terms.term import Term

STYLE = f"""
:root {{ color-scheme: light dark; --ink: {INK}; --soft: {SOFT}; --paper: {PAPER}; --line: #D0D7DE; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #E6EAF0; --soft: #9DA7B3; --paper: #10141B; --line: #3A424D; }}
}}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 70rem; margin: 0 auto; padding: 1rem; }}
h1 {{ font-size: 1.6rem; margin: .5rem 0; }} h2 {{ font-size: 1.2rem; margin: 1.6rem 0 .4rem; }}
.verdict {{ color: #fff; padding: .2rem .8rem; font-weight: 700; display: inline-block; }}
.scroll {{ overflow-x: auto; }} svg {{ width: 100%; height: auto; }}
table {{ border-collapse: collapse; width: 100%; }} caption {{ text-align: left; color: var(--soft); }}
th, td {{ text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }}
td.size {{ text-align: right; white-space: nowrap; }}
pre {{ overflow-x: auto; border: 1px solid var(--line); padding: .6rem; }}
footer, .soft {{ color: var(--soft); }}
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Nothing is fetched, whatever a name in the run may say."""


def page(
    plan: "Plan",
    *,
    levers: Sequence[Lever] = (),
    served: str = "",
    timing: str = "",
    run_yaml: str = "",
    version: str = "",
) -> str:
    """Return the report; `served`, `timing` and `run_yaml` are texts that stand in it as they are."""
    colour = VERDICT_COLOURS[plan.verdict]
    parts = [
        f"<h1>{escape(title(plan))}</h1>",
        f'<p><strong class="verdict" style="background:{colour}">{plan.verdict.upper()}</strong> '
        f"{escape(sentence(plan).partition(': ')[2])}{risk_words(plan)}.</p>",
        f"<p>{escape(plan.why[0].upper() + plan.why[1:])}.</p>",
        f'<p class="soft">{escape(summary(plan))}; likely need in torch\'s pool '
        f"{format_bytes(plan.low_bytes)} to {format_bytes(plan.high_bytes)}.</p>",
        f'<div class="scroll">{picture_svg(plan)}</div>',
        _text("Serving", served),
        _phase(plan.phase(plan.peak_phase), f"Alive at the peak ({plan.peak_phase})"),
        _levers(levers),
        _host(plan),
        _text("Time and cost", timing),
        "<h2>Every phase</h2>",
        *(_folded(phase) for phase in plan.phases),
        _notes(plan),
        _text("The run as run.yaml", run_yaml),
    ]
    law = planned_as(plan.resolved.framework, plan.resolved.framework_asked)
    foot = f"<footer>Planned as {escape(law)} by vramwise {escape(version)}".rstrip()
    body = "\n".join(filter(None, parts))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title(plan))}: {plan.verdict}</title>\n"
        f'<meta name="description" content="{escape(sentence(plan))}">\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n{foot}.</footer>\n"
        "</body>\n</html>\n"
    )


def _text(heading: str, text: str) -> str:
    return f"<h2>{heading}</h2>\n<pre>{escape(text.strip())}</pre>" if text.strip() else ""


def _table(terms: Sequence["Term"], caption: str) -> str:
    rows = "\n".join(
        f'<tr><th scope="row">{escape(term.name)}</th><td class="size">{format_bytes(term.bytes)}</td>'
        f"<td>{escape(term.formula)}</td><td>{escape(term.source)}</td></tr>"
        for term in sorted(terms, key=lambda term: -term.bytes)
    )
    heads = "".join(
        f'<th scope="col">{name}</th>' for name in ("term", "size", "formula", "source")
    )
    return (
        f'<div class="scroll"><table><caption>{escape(caption)}</caption><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _phase(phase: "Phase", heading: str) -> str:
    size = format_bytes(phase.total_bytes)
    return f"<h2>{escape(heading)}</h2>\n{_table(phase.terms, f'{size} in all')}"


def _folded(phase: "Phase") -> str:
    size = format_bytes(phase.total_bytes)
    inner = _table(phase.terms, f"What is alive in {phase.name}")
    return f"<details><summary>{escape(phase.name)}: {size}</summary>{inner}</details>"


def _levers(levers: Sequence[Lever]) -> str:
    if not levers:
        return ""
    items = "".join(
        f"<li><code>{escape(lever.change.name)}</code> saves {format_bytes(lever.saved_bytes)}: "
        f"{escape(lever.price)}</li>"
        for lever in levers
    )
    return f"<h2>What would lower it</h2>\n<ul>{items}</ul>"


def _host(plan: "Plan") -> str:
    if not plan.host_terms:
        return ""
    need = format_bytes(plan.host_peak_bytes)
    return f"<h2>Host memory</h2>\n{_table(plan.host_terms, f'{need} in all')}"


def _notes(plan: "Plan") -> str:
    notes = [f"<li>Assumed: {escape(note)}</li>" for note in plan.assumptions]
    notes += [f"<li>Not modelled: {escape(note)}</li>" for note in plan.not_modeled]
    return f"<h2>Notes</h2>\n<ul>{''.join(notes)}</ul>" if notes else ""
