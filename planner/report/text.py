"""Plan -> text for people: a verdict, a bar for every phase, the peak's terms, the best levers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from planner.run.framework import planned_as
from planner.terms.host import node_ranks
from planner.units import format_bytes

if TYPE_CHECKING:
    from planner.plan import Plan
    from planner.run.ranks import RankPeak


class Change(Protocol):
    """What a lever does to the recipe."""

    @property
    def name(self) -> str:
        """As an option: "optimizer=adamw-8bit"."""


class Lever(Protocol):
    """A change and the bytes it saves: planner.answers.advise makes them."""

    @property
    def change(self) -> Change:
        """The change."""

    @property
    def saved_bytes(self) -> int:
        """Off the peak."""

    @property
    def price(self) -> str:
        """What it costs, in words and in time."""


BAR_WIDTH = 40
BLOCK, REST = "#", "."
STYLES = {"fits": "bold green", "tight": "bold yellow", "does not fit": "bold red"}


def verdict_line(plan: "Plan") -> str:
    """Return the first line: verdict, peak, capacity and machine."""
    return (
        f"{plan.verdict.upper()}: peak {format_bytes(plan.peak_bytes)} in {plan.peak_phase} "
        f"(likely {format_bytes(plan.low_bytes)} to {format_bytes(plan.high_bytes)}), "
        f"capacity {format_bytes(plan.capacity_bytes)} on {plan.machine.label}{risk_words(plan)}"
        + ("" if plan.host_fits and not plan.problem else f"; {plan.why}")
        + _seen(plan)
    )


def _seen(plan: "Plan") -> str:
    """Return what a training sample of a model with towers holds beside text."""
    if plan.sees_nothing:
        return "; without images or sounds, which come on top"
    r = plan.resolved
    if not (r.trains and r.images):
        return ""
    size = f" of {r.image_size[0]} x {r.image_size[1]}" if r.image_size else ""
    return f"; with {r.images} image{'s' if r.images > 1 else ''}{size} in each sample"


def risk_words(plan: "Plan") -> str:
    """Return the risk of running out of memory, where it is more than nothing and not certain."""
    p_oom = plan.risk.p_oom
    return f", risk of running out {p_oom:.0%}" if 0.005 <= p_oom < 1 else ""


def bar(size: int, full: int) -> str:
    """Return a bar of `size` against `full`; what is over is marked with '!'."""
    if full <= 0:
        return "!" * BAR_WIDTH
    filled = round(BAR_WIDTH * min(size, full) / full)
    over = min(10, round(BAR_WIDTH * max(0, size - full) / full)) if size > full else 0
    return BLOCK * filled + REST * (BAR_WIDTH - filled) + "!" * max(over, int(size > full))


def text(plan: "Plan", levers: Sequence[Lever] = (), served: str = "") -> str:
    """Return the whole answer as plain text; `served`: a server's view, before the phases."""
    r = plan.resolved
    view = ["", served] if served else []
    lines = [verdict_line(plan), summary(plan), *_ranks(plan), *view, ""]
    for phase in plan.phases:
        mark = " <- peak" if phase.name == plan.peak_phase else ""
        lines.append(
            f"  {phase.name:<9}{bar(phase.total_bytes, plan.capacity_bytes)} "
            f"{format_bytes(phase.total_bytes):>11}{mark}"
        )
    lines += ["", f"What is alive at the peak ({plan.peak_phase}):"]
    for term in sorted(plan.phase(plan.peak_phase).terms, key=lambda item: -item.bytes):
        lines.append(f"  {term.name:<12}{format_bytes(term.bytes):>11}  {term.formula}")
    if plan.host_terms:
        ranks = node_ranks(r)
        shared = f" on a node of {ranks} processes" if ranks > 1 else ""
        lines += ["", f"Host RAM: needs {format_bytes(plan.host_peak_bytes)}{shared}"]
        for term in plan.host_terms:
            lines.append(f"  {term.name:<12}{format_bytes(term.bytes):>11}  {term.formula}")
    if levers:
        lines += ["", "Best levers:"]
        for advice in levers[:3]:
            lines.append(
                f"  {advice.change.name:<34} saves {format_bytes(advice.saved_bytes):>10}"
                f"  {advice.price}"
            )
    notes = [f"  assumed: {note}" for note in plan.assumptions]
    notes += [f"  not modelled: {note}" for note in plan.not_modeled]
    if notes:
        lines += ["", *notes]
    lines.append(f"  planned as {planned_as(r.framework, r.framework_asked)}")
    return "\n".join(lines)


def _ranks(plan: "Plan") -> list[str]:
    """Return whose memory this is: one line where all ranks are alike, else a bar for each kind."""
    gpus = plan.resolved.layout.gpus
    if gpus == 1 or not plan.ranks:
        return []
    talks = ", ".join(f"{group.name} {group.size}" for group, _ in plan.communicators.groups)
    held = plan.communicators.held.typical
    outside = f"; groups: {talks}, their communicators {format_bytes(held)} outside torch"
    if len(plan.ranks) == 1:
        return [f"rank 0 of {gpus} (all alike), {plan.resolved.layout}{outside}"]
    fullest, why = fullest_rank(plan)
    lines = [
        f"rank {fullest.rank} of {gpus} is shown, the fullest: {fullest.role}{why}",
        f"{plan.resolved.layout}{outside}",
        "",
    ]
    for kind in plan.ranks:
        mark = " <- fullest" if kind is fullest else ""
        lines.append(
            f"  rank {kind.rank:<6}{bar(kind.peak_bytes, plan.capacity_bytes)} "
            f"{format_bytes(kind.peak_bytes):>11}  {kind.role}{mark}"
        )
    return lines


def fullest_rank(plan: "Plan") -> tuple["RankPeak", str]:
    """Return the fullest kind of rank, and what it has more of than the least full one."""
    fullest = max(plan.ranks, key=lambda kind: kind.peak_bytes)
    least = min(plan.ranks, key=lambda kind: kind.peak_bytes)
    more = {name: size - least.terms.get(name, 0) for name, size in fullest.terms.items()}
    name = max(more, key=lambda name: more[name])
    if fullest.peak_bytes == least.peak_bytes:
        return fullest, ""
    return fullest, f"; {name} {format_bytes(more[name])} more than on rank {least.rank}"


def summary(plan: "Plan") -> str:
    """Return the run in one line."""
    r = plan.resolved
    parts = [plan.model, r.task.value]
    if r.trains:
        parts.append(r.method.value)
        parts.append(f"{r.sequences} x {r.seq_tokens:,} tokens a micro-batch")
        parts.append(f"{r.dtype} weights" + (f" + {r.autocast} autocast" if r.autocast else ""))
        parts.append(f"checkpointing {r.checkpointing.value}")
        parts.append(f"{r.loss.value} loss")
    if r.quantization:
        parts.append(r.quantization)
    if r.engine.value != "none":
        parts.append(f"engine {r.engine.value}")
    return ", ".join(parts)


class Laid(Protocol):
    """A layout as planner.answers.layouts found it."""

    @property
    def words(self) -> str:
        """Its degrees."""

    @property
    def flags(self) -> str:
        """The same for the command line."""

    @property
    def plan(self) -> "Plan | None":
        """None when it is refused."""


def layout_line(found: Sequence[Laid]) -> str:
    """Return the first layout that fits, or how near the nearest comes."""
    planned = [(tried.plan, tried) for tried in found if tried.plan is not None]
    fitting = [(made, tried) for made, tried in planned if made.fits]
    if fitting:
        made, tried = fitting[0]
        return (
            f"Best layout: {tried.words}: peak {format_bytes(made.peak_bytes)} in {made.peak_phase}\n"
            f"  {tried.flags}{_unjudged(made.host_peak_bytes, made.machine.host_ram_bytes)}"
        )
    if not planned:
        return "No layout of these GPUs can be planned for this run"
    made, tried = min(planned, key=lambda each: each[0].peak_bytes)
    need, room = format_bytes(made.peak_bytes), format_bytes(made.capacity_bytes)
    return f"No layout fits; the nearest, {tried.words}, needs {need} of {room}: {tried.flags}"


def _unjudged(host_bytes: int, host_ram_bytes: int | None) -> str:
    """Return what a layout needs of each host whose memory nobody has said."""
    if not host_bytes or host_ram_bytes is not None:
        return ""
    need = format_bytes(host_bytes)
    return f"\n  host memory is not judged: {need} a node, --host-ram says what there is"


def layout_table(rows: Sequence[dict[str, Any]], host_ram_bytes: int | None = None) -> str:
    """Return layouts as a table: those that fit, the best first, then why the others do not.

    `host_ram_bytes`: of a node; None where nobody has said it, so that no layout was judged by it.
    """
    cells = [
        [
            row["framework"],
            row["layout"],
            format_bytes(row.get("peak_bytes", row["standing_bytes"])),
            row["verdict"],
            format_bytes(row["network_bytes"] + row["host_link_bytes"]),
            format_bytes(row["node_bytes"]),
            row["why"] or "the first",
        ]
        for row in rows
    ]
    headers = ["framework", "layout", "peak", "verdict", "slow links", "in the node", "why"]
    head = "Layouts; bytes a rank receives in a step from other nodes and the host, and inside its node:"
    best = next((row for row in rows if row["fits"]), None)
    tail = "\nNo layout fits."
    if best:
        tail = f"\nthe first: {best['flags']}{_unjudged(best['host_peak_bytes'], host_ram_bytes)}"
    return f"{head}\n{table(headers, cells)}{tail}"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a plain table; columns that hold numbers are aligned right."""
    columns = list(zip(headers, *rows, strict=True)) if rows else [(head,) for head in headers]
    widths = [max(len(cell) for cell in column) for column in columns]
    numeric = [
        bool(rows)
        and all(cell[:1].isdigit() or cell[:1] in "-+ " or not cell for cell in column[1:])
        for column in columns
    ]

    def line(cells: Sequence[str]) -> str:
        parts = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        ]
        return "  ".join(parts).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *map(line, rows)])
