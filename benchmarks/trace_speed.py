"""Times the trace: Llama-3.1-8B LoRA, all 32 layers, 8 x 20,480 tokens, checkpointing.

The claim: under 30 s and under 3 GiB of resident memory on two cores. Prints a table, writes JSON.

Usage: python benchmarks/trace_speed.py [--json FILE]
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planner.models.catalogue import load_catalogue
from planner.units import GiB, format_bytes
from profiler.subjects.hf_sft import HfSft
from profiler.subjects.options import StepOptions
from profiler.trace import trace

LIMIT_S = 30.0
LIMIT_BYTES = 3 * GiB


def main() -> None:
    """Trace once and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config = load_catalogue()["llama-3.1-8b"]["config"]
    options = StepOptions(config=config, micro_batch=8, length=20480)
    started, cpu = time.perf_counter(), time.process_time()
    recording = trace(HfSft(options))
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    document = {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_s, 2),
        "max_rss_bytes": resident,
        "operators": recording.environment["operators"],
        "events": len(recording.events),
        "peak_bytes": recording.peak_bytes,
        "peak_reserved_bytes": recording.peak_reserved_bytes,
        "within_claim": seconds < LIMIT_S and resident < LIMIT_BYTES,
    }
    print(f"wall {seconds:.1f} s (CPU {cpu_s:.1f} s), limit {LIMIT_S:.0f} s")
    print(f"resident {format_bytes(resident)}, limit {format_bytes(LIMIT_BYTES)}")
    print(f"{document['operators']:,} operators, {document['events']:,} events, two steps")
    print(f"traced peak {format_bytes(recording.peak_bytes)} in {recording.peak_phase}")
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
