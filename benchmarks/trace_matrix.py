"""Prints the matrix of plan against trace: every case, or with --markdown the table of docs/trace.md.

Usage: python benchmarks/trace_matrix.py [FAMILY ...] [--markdown] [--json FILE]
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from profiler.trace_matrix import (
    FAMILIES,
    GROUPED_EXPERTS,
    METHODS,
    cases,
    disagreements,
    run_case,
    worst,
)


def main() -> None:
    """Run the families named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--markdown", action="store_true", help="one line a family")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    if arguments.markdown:
        print("| family | traces | worst total | worst term above 5 % of the peak |")
        print("|---|---:|---:|---:|")
    else:
        print("| family | method | checkpointing | shape | trace peak, MiB | plan | phase | off |")
        print("|---|---|---|---|---:|---:|---|---|")
    for family in arguments.families:
        run = [case for method in METHODS for case in cases(family, method)]
        if arguments.markdown:
            print(_summary(family, run), flush=True)
        else:
            rows += [_row(case) for case in run]
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2), encoding="utf-8")


def _summary(family, run):  # type: ignore[no-untyped-def]
    totals, terms = [], []
    for case in run:
        if case.method == "qlora" and family in GROUPED_EXPERTS:
            continue
        found = run_case(case)
        totals.append(worst(found, terms=False))
        terms.append(worst(found, terms=True))
    return f"| {family} | {len(totals)} | {max(totals):.2%} | {max(terms):.1%} |"


def _row(case):  # type: ignore[no-untyped-def]
    shape = f"{case.micro_batch} x {case.length}"
    head = f"| {case.family} | {case.method} | {case.checkpointing} | {shape} |"
    try:
        compared = run_case(case)
    except Exception as error:  # a table of what works says what does not
        print(head, f" | | | {str(error)[:90]} |", flush=True)
        return {"case": case.label, "failed": str(error)}
    wrong = [
        f"{cell.phase} {cell.term} {'new' if cell.error is None else format(cell.error, '+.1%')}"
        for cell in disagreements(compared)
    ]
    measured = (compared.peak.measured_bytes or 0) / 2**20
    print(
        f"{head} {measured:,.0f} | {compared.peak.error:+.2%} | {compared.measured_phase} | "
        f"{'; '.join(wrong)} |",
        flush=True,
    )
    return {"case": case.label, "error": compared.peak.error, "off": wrong}


if __name__ == "__main__":
    main()
