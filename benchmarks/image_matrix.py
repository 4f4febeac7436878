"""Prints plan against trace of a step with an image: the table of docs/trace.md.

Usage: python benchmarks/image_matrix.py [MODEL ...]
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from profiler.image_matrix import RUNS, TOWERS, ImageCase, run_image_case


def main() -> None:
    """Run the models named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(TOWERS))
    parser.add_argument("--run", choices=sorted(RUNS))
    arguments = parser.parse_args()
    print("| model | run | trace peak, MiB | worst total | forward | loss | backward |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for name in arguments.models:
        for run in [arguments.run] if arguments.run else RUNS:
            found = run_image_case(ImageCase(name, run))
            errors = {c.phase: c.error or 0.0 for c in found.totals if c.phase != "load"}
            phases = " | ".join(f"{errors[p]:+.2%}" for p in ("forward", "loss", "backward"))
            worst = max(abs(error) for error in errors.values())
            peak = (found.peak.measured_bytes or 0) / 2**20
            print(f"| {name} | {run} | {peak:,.0f} | {worst:.2%} | {phases} |", flush=True)


if __name__ == "__main__":
    main()
