"""The speed model against this machine's own processor: five shapes of a real training step, predicted and timed.

A check of the method that needs no GPU: the processor is measured as `vramwise profile calibrate --cpu` does, the
model (planner/speed) predicts each step from that, and transformers runs it. One thread, its own CPU time
(so that other work on the machine counts as little as can be), each the best of rounds in which processor and step take
turns. The target: each shape within 20%.

Usage: python benchmarks/cpu_speed.py [--rounds 8] [--json FILE]
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from planner.families import model_spec_from_config
from planner.machines.calibration import Calibration
from planner.machines.machine import Machine
from planner.plan import plan
from planner.run.runfile import make_recipe
from planner.speed.time import Time, time_of
from profiler.speed_probe import best_seconds, speeds

TARGET = 0.2
VOCAB = 4096
CPU = torch.device("cpu")


class Shape(NamedTuple):
    """One training step."""

    name: str
    hidden: int
    layers: int
    rows: int
    tokens: int
    checkpointing: str = "none"


SHAPES = (
    Shape("narrow, deep", 256, 6, 1, 256),
    Shape("wide", 1024, 1, 1, 192),
    Shape("long", 256, 2, 1, 1024),
    Shape("many rows", 512, 1, 8, 64),
    Shape("computed again", 384, 3, 2, 128, "full"),
)
ROUNDS = 8


def config_of(shape: Shape) -> dict[str, Any]:
    """Return a Llama of that shape: heads of 64, an MLP of 8/3, nothing shared."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.hidden * 8 // 3,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.hidden // 64,
        "num_key_value_heads": shape.hidden // 64,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }


def predicted(shape: Shape, measured: Calibration) -> Time:
    """Return what the model says of a step."""
    recipe = make_recipe(
        task="sft",
        method="full",
        dtype="fp32",
        framework="hf-trainer",
        context=shape.tokens,
        micro_batch_size=shape.rows,
        checkpointing=shape.checkpointing,
        optimizer="adamw-fused",
        attention="sdpa",
    )
    machine = Machine(
        vram_bytes=psutil.virtual_memory().total, context_bytes=0, cpu=True, measured=measured
    )
    found = time_of(plan(model_spec_from_config(config_of(shape)), recipe, machine))
    assert found is not None
    return found


def step_of(shape: Shape) -> Callable[[], None]:
    """Return a real step: forward, loss, backward, AdamW."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**config_of(shape), attn_implementation="sdpa"))
    model.train()
    if shape.checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    rows = torch.randint(0, VOCAB, (shape.rows, shape.tokens))

    def step() -> None:
        model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def taken(shape: Shape, rounds: int) -> tuple[Calibration, float]:
    """Return the processor's speeds and a step's seconds, each the best of rounds in which both take turns."""
    step = step_of(shape)
    found: list[dict[str, int]] = []
    seconds = []
    for _ in range(rounds):
        found.append(speeds(CPU, clock=time.process_time, repeats=1))
        seconds.append(best_seconds(step, CPU, repeats=1, clock=time.process_time))
    best = {name: max(each[name] for each in found) for name in found[0]}
    best["launch_nanoseconds"] = min(each["launch_nanoseconds"] for each in found)
    measured = Calibration(
        gpu="CPU",
        driver="",
        torch=torch.__version__,
        taken_at=time.strftime("%Y-%m-%d"),
        torch_total_bytes=0,
        context_bytes=0,
        workspace_bytes=0,
        segment_bytes=0,
        **best,
    )
    return measured, min(seconds)


def main() -> None:
    """Measure, predict, run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'shape':<18}{'predicted':>12}{'measured':>12}{'off':>8}  bound by    GFLOP/s, GB/s, attention, us an operation"
    )
    rows = []
    for shape in SHAPES:
        measured, took = taken(shape, arguments.rounds)
        said = predicted(shape, measured)
        off = said.step_seconds / took - 1
        rows.append(
            {"shape": shape.name, "predicted_s": said.step_seconds, "measured_s": took, "off": off}
        )
        print(
            f"{shape.name:<18}{said.step_seconds:>10.3f} s{took:>10.3f} s{off:>+8.0%}  {said.bound_by:<10}"
            f"{measured.fp32_flops_per_s / 1e9:>9.1f}{measured.bandwidth_bytes_per_s / 1e9:>6.1f}"
            f"{measured.attention_flops_per_s / 1e9:>11.1f}{measured.launch_nanoseconds / 1e3:>5.1f}",
            flush=True,
        )
    worst = max(abs(row["off"]) for row in rows)
    print(f"\nworst {worst:.0%}, target {TARGET:.0%}: {'met' if worst <= TARGET else 'missed'}")
    if arguments.json:
        document = {"rows": rows, "worst": worst, "within_target": worst <= TARGET}
        arguments.json.write_text(json.dumps(document, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
