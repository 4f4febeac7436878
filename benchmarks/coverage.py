"""Which lines of planner/ do the tests run? Prints the share by the fast set and by all planner tests.

python -m benchmarks.coverage [--fast]
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.mutants import FAST_TESTS, ROOT


def main() -> int:
    """Print line coverage by room and in all; 1 when a test fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="the fast set alone")
    options = parser.parse_args()
    fast = [name for name in FAST_TESTS if (ROOT / name).exists()]
    runs = [("the fast set", fast)]
    if not options.fast:
        runs.append(("all planner tests", ["tests/planner"]))
    return max(_measure(title, tests) for title, tests in runs)


def _measure(title: str, tests: list[str]) -> int:
    """Run the tests under coverage and print lines by room."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "COVERAGE_FILE": str(Path(folder) / "data")}
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
        command += ["--cov=planner", "--cov-report=term", *tests]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    rooms: dict[str, list[int]] = {}
    for path, lines, missed in re.findall(r"^planner/(\S+)\s+(\d+)\s+(\d+)", done.stdout, re.M):
        room = path.split("/")[0] if "/" in path else "the top"
        for name in (room, "all"):
            counts = rooms.setdefault(name, [0, 0])
            counts[0] += int(lines)
            counts[1] += int(missed)
    if done.returncode or not rooms:
        print(done.stdout[-2000:], done.stderr[-2000:], sep="\n")
        return 1
    print(f"planner/ by {title}: {_share(rooms.pop('all'))}")
    for room, counts in sorted(rooms.items()):
        print(f"  {room:<12} {_share(counts)}")
    return 0


def _share(counts: list[int]) -> str:
    lines, missed = counts
    return f"{lines - missed:,} of {lines:,} lines, {100 * (lines - missed) / lines:.1f}%"


if __name__ == "__main__":
    sys.exit(main())
