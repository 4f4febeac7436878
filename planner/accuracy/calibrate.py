"""Writes data/calibration: measured figures over their plans, for planner/risk.py, and the plans' figures.

    python -m planner.accuracy.calibrate

The file names the formulas it was made with; a test fails when they have changed since.
"""

import csv
import hashlib
import io
import sys
from pathlib import Path

from planner.accuracy.dispatch import predict_row
from planner.accuracy.score import Accuracy, Scored, measurement_files, score_files
from planner.accuracy.stored import Recorder, predictions_path
from planner.datafiles import data_dir
from planner.risk import Ratio, distribution, kind_of, ratios

QUANTITIES = {
    "peak_allocated": "allocated",
    "peak_reserved": "reserved",
    "peak_reserved_unstated": "reserved",
    "nvidia_smi_used_peak": "device",
    "static_allocated": "static",
    "static_load_allocated": "static",
    "static_load_reserved": "static",
}
FORMULAS = (
    "layer",
    "mixers",
    "terms",
    "families",
    "models",
    "allocator",
    "replay",
    "run/resolve.py",
    "run/resolved.py",
    "run/choices.py",
    "run/parallel.py",
    "run/pipeline.py",
    "run/placement.py",
    "run/ranks.py",
    "run/switches.py",
    "phases.py",
    "reserved.py",
)
"""What decides a plan's bytes, beside data/frameworks and data/measurements."""


def file_path() -> Path:
    """Return the calibration's file."""
    return Path(str(data_dir() / "calibration" / "ratios.csv"))


def fingerprint() -> str:
    """Return a digest of the planner's formulas, the frameworks and the measured rows."""
    package = Path(__file__).parents[1]
    files = [file for name in FORMULAS for file in _files(package / name, "*.py")]
    folder = Path(str(data_dir()))
    files += _files(folder / "frameworks", "*.json") + _files(folder / "measurements", "*.csv")
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _files(path: Path, pattern: str) -> list[Path]:
    return sorted(path.rglob(pattern)) if path.is_dir() else [path]


def recorded_fingerprint() -> str:
    """Return the digest the shipped file was made with."""
    first = file_path().read_text(encoding="utf-8").splitlines()[0]
    return first.rpartition(" ")[2]


def ratio_of(item: Scored) -> Ratio | None:
    """Return a scored figure as a ratio; None for what no risk is read off."""
    prediction = item.prediction
    name = QUANTITIES.get(prediction.quantity)
    if name is None or prediction.plan is None or prediction.value <= 0:
        return None
    r = prediction.plan.resolved
    ratio = round(item.truth / prediction.value, 5)
    return Ratio(item.row.id, item.row.source, kind_of(r), r.framework.family, name, ratio)


def text_of(result: Accuracy) -> str:
    """Return the file: every sure figure of a run that worked."""
    rows = [row for item in result.scored if (row := ratio_of(item)) is not None]
    stream = io.StringIO()
    stream.write(
        f"# measured over planned; made by `make calibrate` with formulas {fingerprint()}\n"
    )
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(Ratio._fields)
    writer.writerows(sorted(rows))
    return stream.getvalue()


def main() -> int:
    """Score every row and write the files; intervals are those of the ratios just written."""
    file_path().write_text(text_of(score_files(measurement_files())), encoding="utf-8")
    ratios.cache_clear()
    distribution.cache_clear()
    recorder = Recorder(predict_row)
    score_files(measurement_files(), predict=recorder)
    predictions_path().write_text(recorder.text(fingerprint()), encoding="utf-8")
    print(f"{file_path()}: {len(ratios())} ratios")
    return 0


if __name__ == "__main__":
    sys.exit(main())
