"""Lists of cards: what `plan` answers where no card is named, and `recommend MODEL`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from planner.verbs.options import print_json
from planner.verbs.terminal import show

if TYPE_CHECKING:
    from planner.answers.cards import Card
    from planner.answers.recommend import Recommendation, Setting
    from planner.answers.spent import Spending, Spent
    from planner.models.spec import ModelSpec
    from planner.run.recipe import RunFile

FEW = 20
"""Cards of a list."""
UNKNOWN = "not known"


def show_cards(
    run: "RunFile", model: "ModelSpec", spending: "Spending", *, check: bool, as_json: bool
) -> None:
    """Say which cards take the run as it is, the cheapest first: the answer where no card is named."""
    from planner.answers.cards import cards_for_run
    from planner.answers.spent import RULE
    from planner.errors import DoesNotFitError
    from planner.units import format_bytes

    asked = run.machine
    rows = cards_for_run(
        model,
        run.recipe,
        gpus=asked.gpus,
        nodes=asked.nodes,
        host_ram=asked.host_ram,
        spending=spending,
    )
    fitting = [row for row in rows if row.fits]
    other = f"`vramwise recommend {model.name}` lists settings that fit smaller ones"
    if as_json:
        document = {"schema_version": 1, "model": model.name, "rule": RULE, "fits": bool(fitting)}
        print_json({**document, "cards": [row.to_dict() for row in rows]})
    elif fitting:
        times = f", {asked.gpus} of each," if asked.gpus > 1 else ""
        show(
            f"No GPU given: {len(fitting)} of {len(rows)} kinds of cards{times} take this run, {RULE}"
            f"\n\n{cards_table(fitting[:FEW])}\n\n{_more(fitting)}{_smallest(fitting)}--gpu NAME plans it on one, with "
            f"every assumption; {other}"
        )
    else:
        least = min((row.peak_bytes for row in rows), default=0)
        show(
            f"No GPU given, and none of {len(rows)} kinds of cards takes this run: it needs at least "
            f"{format_bytes(least)}; {other}"
        )
    if check and not fitting:
        if as_json:  # the document above is the whole answer
            raise typer.Exit(DoesNotFitError.exit_code)
        raise DoesNotFitError("does not fit any card", hint="`vramwise recommend MODEL`")


def _smallest(fitting: "list[Card]") -> str:
    """Return the card with the least memory, of equal ones the cheapest."""
    from planner.units import format_bytes

    least = min(fitting, key=lambda row: row.vram_bytes)
    return f"the smallest that takes it: {least.gpu} ({format_bytes(least.vram_bytes)})\n"


def _more(fitting: "list[Card]") -> str:
    """Return how many are not shown, and what times and dollars are of."""
    left = len(fitting) - FEW
    more = f"{left} more cards that fit: --json lists all\n" if left > 0 else ""
    first = next((row.spent for row in fitting if row.spent is not None), None)
    assumed = [f"assumed: {note}\n" for note in (first.assumed if first is not None else ())]
    return more + spent_note([row.spent for row in fitting]) + "".join(assumed)


def spent_note(rows: "Sequence[Spent | None]") -> str:
    """Return what hours and dollars of a list are of, and what they assume."""
    from planner.answers.spent import PER_RUN

    known = next((row for row in rows if row is not None), None)
    if known is None:
        return ""
    if known.of == PER_RUN:
        note = "times in brackets hold 85% of measured runs; dollars go with them and with the prices' range"
    else:
        note = "of a million tokens: --samples 10000 says what the run takes"
    priced = any(row is not None and row.usd_low is not None for row in rows)
    return (
        f"{note}; {'--price 2.4 states yours' if priced else 'no price is listed: --price 2.4'}\n"
    )


def spent_cells(found: "Spent | None") -> list[str]:
    """Return step, hours, dollars and what bounds them for a table."""
    from planner.report.time import HOUR, between, dollars, span

    if found is None:
        return [UNKNOWN, "", "", ""]
    low, likely, high = (span(x * HOUR) for x in (found.hours_low, found.hours, found.hours_high))
    if low.split()[1] == high.split()[1]:
        low = low.split()[0]
    money = "no price listed"
    if found.usd_low is not None and found.usd_high is not None:
        money = between(dollars(found.usd_low), dollars(found.usd_high))
    return [span(found.step_seconds), f"{likely} ({between(low, high)})", money, found.bound_by]


def spent_headers(rows: "Sequence[Spent | None]") -> list[str]:
    """Return the heads of those cells."""
    of = next((row.of for row in rows if row is not None), "the run")
    return ["a step", of, "dollars", "bound by"]


def cards_table(rows: "list[Card]") -> str:
    """Return cards as a table."""
    from planner.report import table
    from planner.units import format_bytes

    settings = any(row.setting for row in rows)
    methods = len({row.method for row in rows}) > 1
    headers = ["gpu", "memory", *(["method"] if methods else []), "peak", "left"]
    headers += spent_headers([row.spent for row in rows])
    cells = [
        [row.gpu, format_bytes(row.vram_bytes), *([row.method] if methods else []),
         format_bytes(row.peak_bytes), format_bytes(row.headroom_bytes), *spent_cells(row.spent)]
        + ([row.setting.settings if row.setting else ""] if settings else [])
        for row in rows
    ]  # fmt: skip
    return table([*headers, *(["settings"] if settings else [])], cells)


def show_cards_for(
    model: "ModelSpec",
    rows: "list[Card]",
    *,
    task: str,
    context: int,
    gpus: int,
    csv: Path | None,
    as_json: bool,
) -> None:
    """Show the cards that take a model, each with settings that fit."""
    from planner.answers.spent import RULE
    from planner.verbs.outputs import write_text

    if csv is not None and write_text(cards_csv(rows), csv, kind="csv"):
        return
    if as_json:
        document: dict[str, Any] = {
            "schema_version": 1,
            "model": model.name,
            "task": task,
            "least_context": context,
            "rule": RULE,
            "rows": [row.to_dict() for row in rows],
        }
        print_json(document)
        return
    times = f"{gpus} x " if gpus > 1 else ""
    if not rows:
        said = nothing(model, f"{times}no card of the catalogue", context)
        show(said.removesuffix(" by no method"))
        return
    show(f"Cards that take {model.name} for {task} at {context:,} tokens, {RULE}\n")
    show(cards_table(rows))
    settings = [row.setting for row in rows if row.setting is not None]
    note = "settings are the least slow that fit, and leave the result as it is; --limit shows more"
    prices = "; ".join(lever_lines(settings))
    show(
        f"\n{note}\n{spent_note([row.spent for row in rows])}"
        + (f"their price: {prices}" if prices else "")
    )


def nothing(only: "ModelSpec | None", label: str, least: int) -> str:
    """Return why there is no row."""
    if only is None:
        return f"Nothing of the catalogue fits {label} at {least:,} tokens"
    if only.longest and least > only.longest:
        return f"{only.name} reads {only.longest:,} tokens at most; --context asks for {least:,}"
    return f"{only.name} fits {label} at {least:,} tokens by no method"


def lever_lines(rows: "Sequence[Setting]") -> list[str]:
    """Return every change that rows made, with what it costs in words and in time."""
    from planner.answers.slower import Slower

    shares: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        for lever in row.levers:
            name = lever.change.split("=")[0] if "num_seqs" in lever.change else lever.change
            known = shares.setdefault((name, lever.price), [])
            known += [lever.slower] if lever.slower is not None else []
    lines = []
    for (name, price), found in shares.items():
        low, high = min(found, default=0.0), max(found, default=0.0)
        ends = dict.fromkeys(Slower(share, "step time").words for share in (low, high))
        time = f" ({' to '.join(ends)})" if found else ""
        lines.append(f"{name}: {price}{time}")
    return lines


def models_csv(rows: "list[Recommendation]") -> str:
    """Return recommended models as CSV: the settings at the context asked for, with time and price."""
    from planner.answers.spent import csv_of

    plain = ("model", "parameters", "method", "score", "released")
    near = ("context", "batch", "settings", "layout", "peak_bytes", "flags")
    documents: list[dict[str, Any]] = []
    for row in rows:
        cell = row.at_least or row
        flat = {name: getattr(row, name) for name in plain}
        flat |= {name: getattr(cell, name) for name in near}
        flat["longest_context"] = row.context
        documents.append(flat | (cell.spent.rounded() if cell.spent is not None else {}))
    return csv_of(documents, (*plain, *near, "longest_context", *spent_columns()))


def cards_csv(rows: "list[Card]") -> str:
    """Return cards as CSV."""
    from planner.answers.spent import csv_of

    plain = ("gpu", "gpus", "vram_bytes", "method", "peak_bytes", "verdict")
    documents: list[dict[str, Any]] = []
    for row in rows:
        document = row.to_dict()
        flat = {name: document[name] for name in plain}
        flat["settings"] = row.setting.settings if row.setting else ""
        documents.append(flat | (document["spent"] or {}))
    return csv_of(documents, (*plain, "settings", *spent_columns()))


def spent_columns() -> tuple[str, ...]:
    """Return the columns of time and money."""
    from planner.answers.spent import Spent

    return tuple(name for name in Spent.__slots__ if name != "assumed")
