"""What `profile run` costs: sampling only, hooks, and following every storage, against no profiler.

    python benchmarks/profile_overhead.py [--repeats 5] [--steps 12] [--mode hooks]... [--json FILE]

A small Llama trains on the CPU in a subprocess, bare and under each mode, the modes taken in turn so
that a busy machine hurts all alike. Time is CPU time of the training loop (all threads of the
child, so the sampler thread counts), and the median over the repeats of the ratio to the bare run
of the same round. The watcher's own CPU time is reported beside it, as a share of one core.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]

SCRIPT = """
import sys, time, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.set_num_threads(1)
config = LlamaConfig(vocab_size=2048, hidden_size=256, intermediate_size=704, num_hidden_layers=8,
                     num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=512)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
ids = torch.randint(0, 2048, (4, 256))
def step():
    model(input_ids=ids, labels=ids).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
step()
cpu, wall = time.process_time(), time.perf_counter()
for _ in range(int(sys.argv[1])):
    step()
print("RESULT", time.process_time() - cpu, time.perf_counter() - wall)
"""

MODES: dict[str, list[str] | None] = {
    "bare": None,
    "sampling": ["--no-hooks"],
    "hooks": [],
    "follow": ["--follow"],
}


def run(mode: str, script: Path, steps: int, folder: Path) -> dict[str, float]:
    """Run the loop once; return its CPU and wall seconds, and the watcher's share of a core."""
    command = [sys.executable, str(script), str(steps)]
    options = MODES[mode]
    if options is not None:
        launcher = "from profiler.cli import profile; profile()"
        out = ["--out", str(folder / mode)]
        command = [sys.executable, "-c", launcher, "run", *options, *out, "--", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    before, started_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    after, elapsed_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - started_s
    line = next(text for text in done.stdout.splitlines() if text.startswith("RESULT"))
    cpu_s, wall_s = map(float, line.split()[1:])
    total_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": cpu_s, "wall_s": wall_s, "total_cpu_s": total_s, "elapsed_s": elapsed_s}


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--mode", action="append", choices=[m for m in MODES if m != "bare"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = ["bare", *(options.mode or [mode for mode in MODES if mode != "bare"])]
    rounds: dict[str, list[dict[str, float]]] = {mode: [] for mode in chosen}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "loop.py"
        script.write_text(SCRIPT)
        for _ in range(options.repeats):
            for mode in chosen:
                rounds[mode].append(run(mode, script, options.steps, folder))
    rows = []
    print(f"{'mode':10} {'cpu s/step':>11} {'overhead':>9} {'best of all':>12}")
    best = min(each["cpu_s"] for each in rounds["bare"])
    for mode, results in rounds.items():
        ratios = [
            each["cpu_s"] / bare["cpu_s"]
            for each, bare in zip(results, rounds["bare"], strict=True)
        ]
        row = {
            "mode": mode,
            "cpu_s_per_step": statistics.median(each["cpu_s"] for each in results) / options.steps,
            "overhead": statistics.median(ratios) - 1,
            "overhead_of_best": min(each["cpu_s"] for each in results) / best - 1,
        }
        rows.append(row)
        print(
            f"{mode:10} {row['cpu_s_per_step']:>11.4f} {row['overhead']:>+9.2%}"
            f" {row['overhead_of_best']:>+12.2%}"
        )
    if options.json:
        document = {"schema_version": 1, "steps": options.steps, "rows": rows, "rounds": rounds}
        options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
