"""How long plan(), advise and recommend take, beside what a user would call otherwise.

Run: python benchmarks/plan_speed.py [--json FILE]. Times are medians of this process on this machine; the
others are timed only where they are installed and can answer without a network.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planner.answers.advise import advise
from planner.answers.recommend import recommend
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model, catalogue_names
from planner.plan import plan
from planner.run.runfile import make_recipe

PLAN_TARGET_S = 200e-6
RECOMMEND_TARGET_S = 2.0
ROWS = 40
"""Rows that `vramwise recommend` prints unless told otherwise."""


def median_s(call: Callable[[], object], repeats: int) -> float:
    """Return the median seconds of `call`."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def measure() -> list[dict[str, Any]]:
    """Return rows of what was timed."""
    machine = make_machine("h100-sxm")
    model = catalogue_model("llama-3.1-8b")
    started = time.perf_counter()
    rows = len(recommend(make_machine("rtx-4090"), limit=ROWS))
    cold = time.perf_counter() - started
    recipes = [make_recipe(method="lora", context=1000 + i) for i in range(500)]
    every = iter(recipes * 4)
    found = [
        _row("plan(), dense model, another context each time", lambda: plan(model, next(every), machine), 1000, PLAN_TARGET_S),
        _row("plan(), GRPO with vLLM", _grpo(), 500, PLAN_TARGET_S),
        _row("plan().to_dict(), every formula written out", lambda: plan(model, recipes[0], machine).to_dict(), 300, None),
        _row("advise: levers, combination, limits", lambda: advise(model, recipes[0], make_machine("rtx-3060-12gb")), 5, None),
    ]  # fmt: skip
    name = f"recommend, first call, {len(catalogue_names())} models ({rows} rows)"
    found.append({"what": name, "seconds": cold, "target_s": RECOMMEND_TARGET_S})
    found.append(
        _row(
            "recommend, again",
            lambda: recommend(make_machine("rtx-4090"), limit=ROWS),
            3,
            RECOMMEND_TARGET_S,
        )
    )
    found.append(
        _row("vramwise plan ... --json, the whole command", _command, 3, 1.0),
    )
    return found + others()


def _row(
    what: str, call: Callable[[], object], repeats: int, target: float | None
) -> dict[str, Any]:
    call()
    return {"what": what, "seconds": median_s(call, repeats), "target_s": target}


def _grpo() -> Callable[[], object]:
    model, machine = catalogue_model("qwen2.5-7b"), make_machine("h100-sxm")
    recipe = make_recipe(task="grpo", framework="trl", engine={"kind": "vllm-push"}, context=4096)
    return lambda: plan(model, recipe, machine)


def _command() -> None:
    code = "from app.cli import main; raise SystemExit(main())"
    arguments = ["plan", "llama-3.1-8b", "--gpu", "h100-sxm", "--json"]
    subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=True,
        capture_output=True,
        cwd=Path(__file__).parents[1],
    )


def others() -> list[dict[str, Any]]:
    """Return what other estimators take for the same model, where they are installed."""
    return [row for row in (_accelerate(), _deepspeed()) if row]


def _accelerate() -> dict[str, Any] | None:
    """Time accelerate's estimate-memory path: the model on the meta device, then its sizes."""
    try:
        from accelerate import init_empty_weights
        from accelerate.utils import calculate_maximum_sizes
        from transformers import AutoModelForCausalLM, LlamaConfig
    except ImportError:
        return None
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )

    def call() -> object:
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config)
        return calculate_maximum_sizes(model)

    name = "accelerate estimate-memory (weights only)"
    return _row(name, call, 3, None)


def _deepspeed() -> dict[str, Any] | None:
    """Time DeepSpeed's ZeRO-3 estimator for 8 billion parameters (model states only)."""
    try:
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    except ImportError:
        return None

    def call() -> object:
        return estimate_zero3_model_states_mem_needs(8_030_261_248, 525_336_576)

    return _row("DeepSpeed ZeRO-3 estimator (model states only)", call, 1000, None)


def main() -> int:
    """Print the table; return 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    rows = measure()
    print(f"{'what':<62} {'median':>12} {'target':>10}")
    for row in rows:
        target = f"{row['target_s'] * 1e3:.1f} ms" if row["target_s"] else ""
        print(f"{row['what']:<62} {row['seconds'] * 1e3:>9.3f} ms {target:>10}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"schema_version": 1, "rows": rows}, indent=2) + "\n")
    return int(any(row["target_s"] and row["seconds"] > row["target_s"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
