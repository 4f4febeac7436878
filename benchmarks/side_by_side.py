"""What the trainer benchmarks share: one small model, ragged data, bytes alive, alternated runs."""

import argparse
import json
import random
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from profiler.storages import StorageTracker
from trainer.small_model import CHARACTERS, make_small_model, small_tokenizer

SCHEMA_VERSION = 1
LR = 1e-4
AGREE = 1e-3
"""Relative difference of two losses or gradient norms that rounding may make in fp32."""
HEAD, REST = "head", "rest"
"""Pseudo-phases: inside the log-prob head or the loss over the vocabulary, and everything else."""


@dataclass
class Meter:
    """What one run says: CPU seconds between its steps' beginnings, and bytes alive if `tracker`."""

    tracker: StorageTracker | None = None
    starts: list[float] = field(default_factory=list)
    first_event: int = 0
    facts: dict[str, float] = field(default_factory=dict)

    def step(self, model: torch.nn.Module) -> None:
        """Note that a step begins; the first one adopts the model's weights."""
        if self.tracker is not None and not self.starts:
            self.tracker.phase = REST
            for tensor in (*model.parameters(), *model.buffers()):
                self.tracker.adopt(tensor, term="weights", module="")
            self.first_event = len(self.tracker.events)
        self.starts.append(time.process_time())

    def seconds(self) -> list[float]:
        """Return the steps' CPU seconds without the first, which warms up."""
        return [end - start for start, end in zip(self.starts[1:-1], self.starts[2:], strict=True)]

    def peaks(self) -> dict[str, int]:
        """Return phase -> most bytes alive at once since the first step began, weights included."""
        assert self.tracker is not None
        live, peaks = 0, {HEAD: 0, REST: 0}
        for number, event in enumerate(self.tracker.events):
            live += event.block.bytes if event.alloc else -event.block.bytes
            if number >= self.first_event - 1:
                phase = HEAD if event.phase == HEAD else REST
                peaks[phase] = max(peaks[phase], live)
        return peaks


@contextmanager
def head_phase(meter: Meter, function: type[torch.autograd.Function]) -> Iterator[None]:
    """Name the phase "head" while an autograd function runs, forward or backward."""
    tracker = meter.tracker
    if tracker is None:
        yield
        return
    before = function.forward, function.backward

    def inside(call: Callable[..., Any]) -> Any:
        def run(*args: Any) -> Any:
            with tracker.in_phase(HEAD):
                return call(*args)

        return staticmethod(run)

    function.forward, function.backward = (inside(call) for call in before)  # type: ignore[method-assign]
    try:
        yield
    finally:
        function.forward, function.backward = (staticmethod(call) for call in before)  # type: ignore[method-assign]


def check(rows: dict[str, dict[str, Any]]) -> None:
    """Raise AssertionError unless both computed the same first loss and gradient norm."""
    ours, theirs = rows.values()
    for key in ("loss", "grad_norm"):
        scale = max(abs(ours[key]), abs(theirs[key]), 1e-3)
        assert abs(ours[key] - theirs[key]) <= AGREE * scale, (key, ours[key], theirs[key])


Run = Callable[[Meter], None]


def alternate(first: Run, second: Run, *, rounds: int) -> tuple[list[float], list[float]]:
    """Run both `rounds` times, the order turned round each time; return all their step seconds."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        pair = [(first, seconds[0]), (second, seconds[1])]
        for run, found in pair if number % 2 == 0 else reversed(pair):
            meter = Meter()
            run(meter)
            found += meter.seconds()
    return seconds


def measured(run: Run) -> Meter:
    """Run once with every storage followed."""
    meter = Meter(tracker=StorageTracker())
    assert meter.tracker is not None
    with meter.tracker:
        run(meter)
    return meter


def compare(ours: Run, theirs: Run, *, rounds: int, name: str) -> dict[str, Any]:
    """Return peaks, medians of the step times and their ratios, ours / theirs."""
    rows: dict[str, dict[str, Any]] = {}
    for label, run in (("vramwise", ours), (name, theirs)):
        meter = measured(run)
        peaks = meter.peaks()
        rows[label] = {
            "peak_bytes": max(peaks.values()),
            "peak_outside_head_bytes": peaks[REST],
            **meter.facts,
        }
    seconds = alternate(ours, theirs, rounds=rounds)
    for label, found in zip(rows, seconds, strict=True):
        rows[label]["step_cpu_seconds"] = round(statistics.median(found), 4)
        rows[label]["steps_timed"] = len(found)
    own, other = rows["vramwise"], rows[name]
    return {
        "rows": rows,
        "peak_ratio": round(own["peak_bytes"] / other["peak_bytes"], 4),
        "peak_outside_head_ratio": round(
            own["peak_outside_head_bytes"] / other["peak_outside_head_bytes"], 4
        ),
        "step_time_ratio": round(own["step_cpu_seconds"] / other["step_cpu_seconds"], 4),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes that both benchmarks have."""
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rank", type=int, default=16, help="LoRA, all linear layers")
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences of one forward pass")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="longest prompt")
    parser.add_argument("--completion-tokens", type=int, default=96, help="longest completion")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of one run")
    parser.add_argument("--rounds", type=int, default=3, help="timed runs of each, alternated")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def small_llama(options: argparse.Namespace, folder: Path) -> Path:
    """Write the model that both train and return its folder; its logits are not all alike."""
    return make_small_model(
        folder / "model",
        hidden=options.hidden,
        layers=options.layers,
        heads=max(1, options.hidden // 64),
        intermediate=options.hidden * 8 // 3 // 64 * 64 or options.hidden * 2,
        vocab=options.vocab,
        initializer_range=0.05,
    )


def ragged(seed: int, *, longest: int) -> int:
    """Return a length from 1/16 of `longest` to it, log-uniform: most are short, some are not."""
    return max(2, round(longest * 16 ** -random.Random(seed).random()))


def ragged_text(seed: int, *, longest: int) -> str:
    """Return a text of as many characters, which are tokens."""
    draw = random.Random(seed)
    return "".join(draw.choices(CHARACTERS[1:], k=ragged(seed, longest=longest)))


def prompts(count: int, options: argparse.Namespace) -> list[str]:
    """Return `count` different prompts, the first as long as allowed."""
    texts = [ragged_text(seed, longest=options.prompt_tokens) for seed in range(count)]
    return [texts[0].ljust(options.prompt_tokens, "a"), *texts[1:]]


def completion_text(prompt: str, number: int, options: argparse.Namespace) -> str:
    """Return completion `number` of a prompt without EOS; every first one is the longest."""
    seed = zlib.crc32(f"{number}:{prompt}".encode())
    text = ragged_text(seed, longest=options.completion_tokens - 1)
    if number == 0:
        text = text.ljust(options.completion_tokens - 1, "b")
    return text


def completion_ids(prompt: str, number: int, options: argparse.Namespace) -> list[int]:
    """Return completion `number` of a prompt as ids that end in EOS."""
    tokenizer = _tokenizer()
    text = completion_text(prompt, number, options)
    return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]


def reward(ids: Sequence[int]) -> float:
    """Return a number in [0, 1) that differs from completion to completion."""
    return zlib.crc32(bytes(index % 256 for index in ids)) / 2**32


_TOKENIZERS: list[Any] = []


def _tokenizer() -> Any:
    if not _TOKENIZERS:
        _TOKENIZERS.append(small_tokenizer())
    return _TOKENIZERS[0]


def show(document: dict[str, Any], options: argparse.Namespace, *, what: str) -> None:
    """Print the document as JSON or as a table."""
    if options.json:
        print(json.dumps(document, indent=2))
        return
    print(what)
    print(f"{'':12}{'peak MiB':>10}{'outside head':>14}{'CPU s / step':>14}{'loss':>12}")
    for name, row in document["rows"].items():
        print(
            f"{name:12}{row['peak_bytes'] / 2**20:10.1f}{row['peak_outside_head_bytes'] / 2**20:14.1f}"
            f"{row['step_cpu_seconds']:14.3f}{row['loss']:12.6f}"
        )
    print(
        f"ours / theirs: peak {document['peak_ratio']:.2f}, outside the head "
        f"{document['peak_outside_head_ratio']:.2f}, time {document['step_time_ratio']:.2f}"
    )


@contextmanager
def scratch() -> Iterator[Path]:
    """Return a folder for models and outputs, deleted at the end."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
