"""What the probes of gpu_check share: where they run, how they measure, a Llama of any size."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """The device that is asked; on a CPU everything is toy size."""

    device: torch.device

    @property
    def toy(self) -> bool:
        """True on a CPU."""
        return self.device.type == "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """What models compute in."""
        return torch.float32 if self.toy else torch.bfloat16

    def pick(self, toy: T, full: T) -> T:
        """Return the value for this place."""
        return toy if self.toy else full

    def sync(self) -> None:
        """Wait for the device."""
        if not self.toy:
            torch.cuda.synchronize(self.device)

    def timed(self, function: Callable[[], T]) -> tuple[T, float]:
        """Return (result, seconds) of a call, the device's work included."""
        self.sync()
        started_s = time.perf_counter()
        result = function()
        self.sync()
        return result, time.perf_counter() - started_s

    def peak_of(self, function: Callable[[], Any]) -> int:
        """Return the most bytes alive during a call: the allocator's on a GPU, tensors' on a CPU."""
        if self.toy:
            from profiler.torch_recorder import record

            with record(follow=True) as live:
                function()
            return live.recording.peak_bytes
        self.sync()
        torch.cuda.reset_peak_memory_stats(self.device)
        function()
        self.sync()
        return torch.cuda.max_memory_allocated(self.device)


def llama(place: Place, *, layers: int, hidden: int, vocab: int) -> Any:
    """Return a Llama with the same random weights every time, on the place's device."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    heads = hidden // 64
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_hidden_layers=layers,
        vocab_size=vocab,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        tie_word_embeddings=True,
        max_position_embeddings=32768,
    )
    torch.manual_seed(0)
    with place.device:
        model = AutoModelForCausalLM.from_config(config, dtype=place.dtype)
    # a completion never ends by itself
    model.generation_config.eos_token_id = None
    return model.eval()


def policy_of(place: Place, model: Any) -> Any:
    """Return `model` as a Policy trained in full."""
    from types import SimpleNamespace

    from planner.run.recipe import Method
    from trainer.model import Policy

    return Policy(
        model=model,
        tokenizer=SimpleNamespace(pad_token_id=0, eos_token_id=None),
        method=Method.FULL,
        source="",
        revision=None,
        dtype=place.dtype,
        device=place.device,
    )


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return |found - expected| / |expected| over all elements."""
    found, expected = found.detach(), expected.detach()
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-300))


def mib(num_bytes: float) -> str:
    """Return bytes as whole MiB, for a summary."""
    return f"{num_bytes / 2**20:,.0f} MiB"
