"""Generation by the trainer's own engine: its cache in one place beside transformers' cache that grows by copies.

`python benchmarks/generation.py [--json]`: a Llama of SmolLM2-135M's layers (random weights, fp32, one thread), so many
completions at once, all of full length, the two caches taken in turn. Both sample the same tokens (checked). CPU seconds
of the process, the least of the turns; operations of one more token as torch dispatches them.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from planner.run.recipe import Recipe
from trainer.engines import transformers as engine_module
from trainer.engines.protocol import SamplingSettings
from trainer.engines.transformers import TransformersEngine
from trainer.model import load_policy
from trainer.small_model import make_small_model

SCHEMA_VERSION = 1
GROUP = 8


class Operations(TorchDispatchMode):
    """Counts everything that torch dispatches, views included."""

    count = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _settings(new: int) -> SamplingSettings:
    return SamplingSettings(num_generations=GROUP, max_new_tokens=new, seed=0)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the document."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_small_model(
            Path(folder),
            hidden=576,
            layers=options.layers,
            heads=9,
            intermediate=1536,
            vocab=4096,
            num_key_value_heads=3,
        )
        engine = {"max_num_seqs": options.rows}
        recipe = Recipe(
            task="grpo", method="full", dtype="fp32", num_generations=GROUP, engine=engine
        )
        policy = load_policy(folder, recipe=recipe)
        ours = TransformersEngine(policy, recipe=recipe)
    # nothing ends before its length
    prompts = [[2 + row] * options.prompt for row in range(options.rows // GROUP)]
    seconds: dict[str, list[float]] = {"grows": [], "in_place": []}
    counts: dict[str, int] = {}
    said: dict[str, Any] = {}
    with patch.object(engine_module, "eos_ids", lambda policy: ()):
        for _ in range(options.turns):
            for name in seconds:
                roomy = engine_module.roomy if name == "in_place" else lambda cache, room: cache
                spread = (
                    engine_module.spread
                    if name == "in_place"
                    else lambda cache, rows, room: cache.batch_select_indices(rows)
                )
                with (
                    patch.object(engine_module, "roomy", roomy),
                    patch.object(engine_module, "spread", spread),
                ):
                    started = time.process_time()
                    made = ours.generate(prompts, _settings(options.new))
                    seconds[name].append(time.process_time() - started)
                    said[name] = [row.token_ids for row in made]
                    counts[name] = _operations(ours, prompts)
    if said["grows"] != said["in_place"]:
        raise SystemExit("the two caches do not lead to the same tokens")
    tokens = options.rows * options.new
    return {
        "schema_version": SCHEMA_VERSION,
        "layers": options.layers,
        "rows": options.rows,
        "prompt": options.prompt,
        "new": options.new,
        "tokens_per_cpu_s": {name: tokens / min(taken) for name, taken in seconds.items()},
        "speed_ratio": min(seconds["grows"]) / min(seconds["in_place"]),
        "operations_a_token": counts,
    }


def _operations(engine: TransformersEngine, prompts: list[list[int]]) -> int:
    found = []
    for new in (3, 4):
        with Operations() as counted:
            engine.generate(prompts, _settings(new))
        found.append(counted.count)
    return found[1] - found[0]


def main(arguments: list[str] | None = None) -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rows", type=int, default=32, help="completions at once")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens of a completion")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    document = measure(options)
    if options.json:
        print(json.dumps(document, indent=2))
        return
    for name, speed in document["tokens_per_cpu_s"].items():
        count = document["operations_a_token"][name]
        print(f"{name:9} {speed:8.1f} tokens per CPU s, {count:,} operations a token")
    print(f"in place / grows: {document['speed_ratio']:.2f}")


if __name__ == "__main__":
    main()
