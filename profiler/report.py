"""Recording -> text for a terminal (rich) and a page of HTML (plotly)."""

import html
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from planner.units import GiB, MiB, format_bytes
from profiler.recording import TERMS, Recording

UNKNOWN = "unknown"
PHASE_COLOURS = {
    "load": "#9e9e9e",
    "rollout": "#6a51a3",
    "score": "#2171b5",
    "forward": "#41ab5d",
    "loss": "#fdae6b",
    "backward": "#d94801",
    "step": "#67000d",
    "other": "#d9d9d9",
}


def shown(num_bytes: int | None) -> str:
    """Return a size for a person; None is "unknown", never 0."""
    return UNKNOWN if num_bytes is None else format_bytes(num_bytes)


def summary(recording: Recording) -> dict[str, str]:
    """Return the figures that head every report."""
    environment = recording.environment
    rows = {
        "command": recording.subject,
        "peak": shown(recording.peak_bytes or None)
        + (f" in {recording.peak_phase}" if recording.peak_phase else ""),
        "peak reserved by torch": shown(recording.peak_reserved_bytes),
        "peak seen by the driver": shown(recording.peak_device_bytes),
        "peak host memory": shown(recording.host_peak_bytes),
    }
    if environment.get("steps"):
        rows["optimizer steps"] = str(environment["steps"])
    if "exit_code" in environment:
        rows["exit code"] = str(environment["exit_code"])
    if recording.partial:
        rows["complete"] = "no: partial recording"
    return rows


def terminal(recording: Recording) -> Group:
    """Return what `profile run` prints at the end."""
    heads = Table.grid(padding=(0, 2))
    for name, value in summary(recording).items():
        heads.add_row(Text(name, style="dim"), Text(value))
    parts: list[Any] = [heads]
    if recording.phases:
        parts.append(phase_table(recording))
    parts += [Text(f"note: {note}", style="dim") for note in recording.notes]
    return Group(*parts)


def terms_of(recording: Recording) -> list[str]:
    """Return the terms that any phase has, in the order of TERMS, what is no term of a plan last."""
    found = {term for phase in recording.phases for term in phase.terms_bytes}
    return [*(term for term in TERMS if term in found), *sorted(found - set(TERMS))]


def phase_table(recording: Recording) -> Table:
    """Return phases as rows and the terms alive at each phase's peak as columns."""
    terms = terms_of(recording)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("phase")
    for column in ("peak", *terms):
        table.add_column(column, justify="right", no_wrap=True)
    for phase in recording.phases:
        cells = [shown(phase.terms_bytes[t]) if t in phase.terms_bytes else "-" for t in terms]
        style = "bold" if phase.name == recording.peak_phase else ""
        table.add_row(phase.name, shown(phase.peak_bytes), *cells, style=style)
    return table


def timeline_figure(recording: Recording) -> Any:
    """Return a plotly figure of every total over time, phases behind it."""
    import plotly.graph_objects as go

    figure = go.Figure()
    unit, unit_name = _unit(recording)
    on_gpu = recording.environment.get("gpu")
    names = {
        "device_used_bytes": "driver: this run",
        "reserved_bytes": "torch reserved",
        "allocated_bytes": "torch allocated" if on_gpu else "C heap, torch's tensors in it",
        "host_bytes": "host memory",
    }
    for key, label in names.items():
        points = [
            (row["t_s"], row[key] / unit) for row in recording.timeline if row.get(key) is not None
        ]
        if points:
            times, sizes = zip(*points, strict=True)
            figure.add_scatter(x=times, y=sizes, name=label, mode="lines", line_shape="hv")
    for start_s, end_s, phase in phase_spans(recording):
        figure.add_vrect(
            x0=start_s,
            x1=end_s,
            fillcolor=PHASE_COLOURS.get(phase, "#cccccc"),
            opacity=0.18,
            line_width=0,
            layer="below",
        )
    _legend_of_phases(figure, recording)
    figure.update_layout(
        xaxis_title="seconds",
        yaxis_title=unit_name,
        height=440,
        template="plotly_white",
        margin={"l": 60, "r": 20, "t": 20, "b": 50},
        hovermode="x unified",
    )
    return figure


def _legend_of_phases(figure: Any, recording: Recording) -> None:
    """Add an invisible point per phase, so that the legend explains the shading."""
    for phase in dict.fromkeys(row["phase"] for row in recording.timeline):
        if phase:
            figure.add_scatter(
                x=[None],
                y=[None],
                mode="markers",
                name=phase,
                marker={
                    "color": PHASE_COLOURS.get(phase, "#cccccc"),
                    "symbol": "square",
                    "size": 11,
                },
            )


def _unit(recording: Recording) -> tuple[int, str]:
    """Return the unit of the charts: a tiny run is not shown as 0.02 GiB."""
    return (GiB, "GiB") if recording.peak_bytes >= GiB else (MiB, "MiB")


MAX_SPANS = 400
"""More shaded spans than this make the page slow; short ones are left white then."""


def phase_spans(recording: Recording) -> list[tuple[float, float, str]]:
    """Return (start_s, end_s, phase) of the timeline, neighbours of one phase joined."""
    spans: list[tuple[float, float, str]] = []
    for row in recording.timeline:
        if spans and spans[-1][2] == row["phase"]:
            spans[-1] = (spans[-1][0], row["t_s"], row["phase"])
        else:
            if spans:
                spans[-1] = (spans[-1][0], row["t_s"], spans[-1][2])
            spans.append((row["t_s"], row["t_s"], row["phase"]))
    named = [span for span in spans if span[2] and span[1] > span[0]]
    named.sort(key=lambda span: span[1] - span[0], reverse=True)
    return sorted(named[:MAX_SPANS])


def phase_figure(recording: Recording) -> Any:
    """Return a plotly figure: one stacked bar of terms per phase."""
    import plotly.graph_objects as go

    figure = go.Figure()
    unit, unit_name = _unit(recording)
    names = [phase.name for phase in recording.phases]
    for term in terms_of(recording):
        sizes = [phase.terms_bytes.get(term, 0) / unit for phase in recording.phases]
        if any(sizes):
            labels = [shown(phase.terms_bytes.get(term, 0)) for phase in recording.phases]
            figure.add_bar(
                x=names,
                y=sizes,
                name=term,
                customdata=labels,
                hovertemplate=f"{term}: %{{customdata}}<extra>%{{x}}</extra>",
            )
    figure.update_layout(
        barmode="stack",
        yaxis_title=f"{unit_name} at the phase's peak",
        height=380,
        template="plotly_white",
        margin={"l": 60, "r": 20, "t": 20, "b": 40},
    )
    return figure


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>vramwise: {title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; color: #222 }}
h1 {{ font-size: 1.4rem; overflow-wrap: anywhere }} h2 {{ font-size: 1.1rem; margin-top: 2rem }}
table {{ border-collapse: collapse }} td, th {{ padding: .25rem .8rem; border-bottom: 1px solid #e5e5e5; text-align: left }}
td.n, th.n {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }} tr.peak {{ font-weight: 600; background: #fff4e5 }}
.wide {{ overflow-x: auto; font-size: 14px }} .wide td, .wide th {{ padding: .25rem .5rem }}
.note {{ color: #666 }} code {{ overflow-wrap: anywhere }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def page(recording: Recording) -> str:
    """Return one self-contained HTML page: summary, timeline, phases, what was alive."""
    parts = [_rows_table(list(summary(recording).items())), "<h2>Memory over time</h2>"]
    parts.append(_div(timeline_figure(recording), with_library=True))
    if recording.phases:
        parts += ["<h2>What each phase held at its peak</h2>", _div(phase_figure(recording))]
        parts.append(_phases_html(recording))
    if recording.largest:
        parts += ["<h2>Largest tensors alive at the peak</h2>", _largest_html(recording)]
    if recording.notes:
        parts.append("<h2>Notes</h2>")
        parts += [f'<p class="note">{html.escape(note)}</p>' for note in recording.notes]
    parts.append("<h2>Environment</h2>")
    parts.append(
        _rows_table([(k, str(v)) for k, v in recording.environment.items() if v is not None])
    )
    title = html.escape(recording.subject[:120] or recording.source)
    return _PAGE.format(title=title, body="\n".join(parts))


def _div(figure: Any, *, with_library: bool = False) -> str:
    # the library is part of the page once: a report opens offline
    library: bool | str = with_library
    return str(figure.to_html(full_html=False, include_plotlyjs=library))


def _rows_table(rows: list[tuple[str, str]]) -> str:
    cells = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in rows
    )
    return f"<table>{cells}</table>"


def _phases_html(recording: Recording) -> str:
    terms = terms_of(recording)
    views = {"peak": "peak_bytes", "reserved": "reserved_bytes", "driver": "device_used_bytes"}
    views["host"] = "host_bytes"
    # a view that nothing is known of is one "unknown" in the summary, not a column of them
    views = {
        name: field
        for name, field in views.items()
        if any(getattr(phase, field) is not None for phase in recording.phases)
    }
    head = "".join(f'<th class="n">{name}</th>' for name in (*views, *terms))
    lines = []
    for phase in recording.phases:
        cells = [shown(getattr(phase, field)) for field in views.values()]
        cells += [shown(phase.terms_bytes[t]) if t in phase.terms_bytes else "" for t in terms]
        row = "".join(f'<td class="n">{cell}</td>' for cell in cells)
        mark = ' class="peak"' if phase.name == recording.peak_phase else ""
        lines.append(f"<tr{mark}><th>{html.escape(phase.name)}</th>{row}</tr>")
    return f'<div class="wide"><table><tr><th>phase</th>{head}</tr>{"".join(lines)}</table></div>'


def _largest_html(recording: Recording) -> str:
    head = "".join(
        f"<th>{n}</th>" for n in ("bytes", "shape", "dtype", "term", "module", "op", "since")
    )
    lines = []
    for tensor in recording.largest[:50]:
        shape = " x ".join(map(str, tensor.shape))
        cells = (tensor.dtype, tensor.term, tensor.module, tensor.op, tensor.phase)
        rest = "".join(f"<td>{html.escape(cell)}</td>" for cell in (shape, *cells))
        lines.append(f'<tr><td class="n">{shown(tensor.bytes)}</td>{rest}</tr>')
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"
