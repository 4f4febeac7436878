"""What it costs to hand trained weights to vLLM: a push of a 135M model beside a plain copy of its weights.

`python benchmarks/push_overhead.py [--ranks N] [--json]`. Gloo ranks of this machine, one thread each, hold a model of
SmolLM2-135M's shape (random weights, fp32) in FSDP2 parts, and a vLLM engine each; a single rank holds all of it.
Seconds, the least of a few turns taken in alternation:

`copy_s`: every whole weight copied once into memory that is there, which is all a push of one rank has to do.
`plain_s`: what a push of several has to do, without a model: the same bytes, gathered from the ranks' parts into memory
that is there, a decoder layer's in a collective. Of one rank it is copy_s.
`load_s`: vLLM's own reload_weights takes whole weights that are here already.
`push_s`: the engine's update_weights. `push_over_plain` is the ratio that counts.
"""

import argparse
import json
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from planner.models.hub import find_model
from planner.run.parallel import layout_of
from planner.run.recipe import Recipe
from planner.units import MiB
from trainer.engines.vllm_adapters import merged_weights
from trainer.engines.vllm_cpu_build import unpacked_cpu_linears
from trainer.engines.vllm_push import VllmPushEngine
from trainer.model import load_policy
from trainer.parallel.ranks import Ranks, join, leave
from trainer.parallel.sharding import over_ranks, shard_policy
from trainer.small_model import make_small_model

SCHEMA_VERSION = 1
# torch 2.13 has a new name, and warns of the old one
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def least(ranks: Ranks, turns: int, **works: Callable[[], Any]) -> dict[str, float]:
    """Return the least seconds of each work, of the slower rank; one turn of each after the other."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(turns + 1):
        for name, work in works.items():
            ranks.barrier()
            started = time.perf_counter()
            work()
            seconds = ranks.max(time.perf_counter() - started)
            if turn:  # the first turn touches memory
                found[name].append(seconds)
    return {name: min(seconds) for name, seconds in found.items()}


def measure(ranks: Ranks, folder: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the figures."""
    recipe = Recipe(
        task="grpo",
        method="full",
        context=64,
        dtype="fp32",
        sharding="fsdp2",
        parallel={"data_shard": ranks.size},
        engine={"kind": "vllm-push", "kv_bytes": 16 * MiB, "max_num_seqs": 2},
    )
    policy = load_policy(folder, recipe=recipe, seed=0)
    if ranks.several:
        layout = layout_of(find_model(folder), recipe, ranks.size)
        policy = shard_policy(policy, over_ranks(recipe, ranks.size), layout, ranks)
    engine = VllmPushEngine(policy, recipe=over_ranks(recipe, ranks.size))
    for _ in range(2):  # engine and policy are compared behind the third
        engine.update_weights()
    held = [(name, tensor.clone()) for name, tensor in merged_weights(policy)]
    targets = [torch.zeros_like(tensor) for _, tensor in held]

    def copy() -> None:
        for target, (_, tensor) in zip(targets, held, strict=True):
            target.copy_(tensor)

    parts = [torch.ones(count // ranks.size) for count in unit_sizes(held)]
    wholes = [torch.zeros(len(part) * ranks.size) for part in parts]

    def plain() -> None:
        for part, target in zip(parts, wholes, strict=True):
            _gather(target, part)

    def load() -> None:
        with unpacked_cpu_linears():
            engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(held)})

    works: dict[str, Callable[[], Any]] = {"copy_s": copy}
    works |= {"plain_s": plain} if ranks.several else {}
    works |= {"load_s": load, "push_s": engine.update_weights}
    figures = least(policy.ranks, options.turns, **works)
    figures.setdefault("plain_s", figures["copy_s"])
    assert engine.check("after all pushes") < 1e-3
    engine.close()
    return figures | {
        "model_bytes": sum(tensor.nbytes for tensor in targets),
        "push_over_copy": figures["push_s"] / figures["copy_s"],
        "push_over_plain": figures["push_s"] / figures["plain_s"],
        "push_over_load": figures["push_s"] / figures["load_s"],
    }


def unit_sizes(held: list[tuple[str, torch.Tensor]]) -> list[int]:
    """Return the elements of each decoder layer, and of each tensor outside them."""
    sizes: dict[str, int] = {}
    for name, tensor in held:
        layer = re.search(r"\.layers\.\d+\.", name)
        unit = layer.group() if layer else name
        sizes[unit] = sizes.get(unit, 0) + tensor.numel()
    return list(sizes.values())


def worker(rank: int, port: int, folder: str, options: argparse.Namespace) -> None:
    """Be one of the ranks."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(options.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = join()
    figures = measure(ranks, str(Path(folder) / "model"), options)
    if ranks.first:
        (Path(folder) / "figures.json").write_text(json.dumps(figures))
    leave()


def main(arguments: list[str] | None = None) -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    sizes = (("ranks", 2), ("turns", 3), ("hidden", 576), ("layers", 30), ("heads", 9), ("kv_heads", 3), ("intermediate", 1536), ("vocab", 49152))  # fmt: skip
    for name, default in sizes:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        make_small_model(
            Path(scratch) / "model",
            hidden=options.hidden,
            layers=options.layers,
            heads=options.heads,
            num_key_value_heads=options.kv_heads,
            intermediate=options.intermediate,
            vocab=options.vocab,
        )
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        torch.multiprocessing.start_processes(
            worker, (port, scratch, options), nprocs=options.ranks, start_method="spawn"
        )
        figures = json.loads((Path(scratch) / "figures.json").read_text())
    answer = {
        "schema_version": SCHEMA_VERSION,
        "ranks": options.ranks,
        **{name: round(value, 4) for name, value in figures.items()},
    }
    if options.json:
        print(json.dumps(answer))
    else:
        print("\n".join(f"{name:<18}{value:>14}" for name, value in answer.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
