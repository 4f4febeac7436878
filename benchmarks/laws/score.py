"""Kernel and loss-head benchmarks against buffer lists: how well their tensors are understood.

    python -m benchmarks.laws.score [--json]

These are no runs and no part of `vramwise accuracy`: the laws say which buffers one call of a
kernel holds, and the rows of data/measurements that measure single kernels judge them.
"""

import argparse
import json
import sys
from dataclasses import asdict

from benchmarks.laws.kernels import predict_kernel
from benchmarks.laws.log_probs import predict_log_probs
from planner.accuracy.prediction import NotARun, Prediction
from planner.accuracy.rows import Row
from planner.accuracy.score import Accuracy, measurement_files, score_files


def predict_law(row: Row) -> Prediction:
    """Return the law's figure for a benchmark row; other rows are somebody else's."""
    if not row.is_law:
        raise NotARun("a run: vramwise accuracy")
    if row.quantity.startswith(("component:logprob_", "oom_alloc", "component:entropy_")):
        return predict_log_probs(row)
    return predict_kernel(row)


def score() -> Accuracy:
    """Return every benchmark row with its law's figure."""
    return score_files(measurement_files(), predict=predict_law)


def main() -> int:
    """Print the statistics by quantity."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    groups = score().by_quantity()
    if as_json:
        document = {name: asdict(stats) for name, stats in groups.items()}
        print(json.dumps({"schema_version": 1, "by_quantity": document}, indent=1))
        return 0
    for name, stats in groups.items():
        print(
            f"{name:44} {stats.n:4}  median {stats.median_abs_error:7.2%}  p90 {stats.p90_abs_error:7.2%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
