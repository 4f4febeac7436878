"""vLLM on several ranks: each has an engine of its own, or `tensor_parallel` neighbours are one engine together.

vLLM's `external_launcher` starts no process: a run's ranks are its workers and it joins their process group.
Every rank of a group has a scheduler; given the same requests all of them decide alike, and nothing is sent but
what a layer's parts exchange (v1/executor/uniproc_executor.py, 0.32). So the prompts of all ranks of a group are
asked on each of them, and each keeps the completions of its own.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from planner.errors import UsageError, VramwiseError
from trainer.engines.protocol import Completion, SamplingSettings
from trainer.parallel.together import RankFailed

LOOK_EVERY = 64
"""Steps between two looks of a group at the clock: its ranks must give up at the same one."""
Prompts = Sequence[Sequence[int]]
Generate = Callable[[Prompts, SamplingSettings, Callable[[], bool]], list[Completion]]


class TooLong(VramwiseError):
    """A rollout went on for longer than it may; all ranks of its group have left it."""


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that are one engine, once vLLM has started on them."""

    degree: int
    timeout_s: float

    def generate(
        self, prompts: Prompts, settings: SamplingSettings, work: Generate
    ) -> list[Completion]:
        """Return what `work(prompts, settings, over)` makes of this rank's prompts; `over()`: it took too long."""
        if self.degree == 1:
            return work(prompts, settings, self._clock())
        every = self._gather((prompts, settings))
        first = next((asked for own, asked in every if own), settings)
        # who all ask the same, as in an evaluation, are answered once
        alike = all(asked == every[0] for asked in every)
        everyone = list(every[0][0]) if alike else [prompt for own, _ in every for prompt in own]
        if not everyone:
            return []
        if not alike:
            numbers = tuple(number for _, asked in every for number in asked.numbers)
            first = replace(first, numbers=numbers)
        seeded = replace(first, seed=first.seed or 0)  # ranks draw alike
        try:
            made = work(everyone, seeded, self._clock())
        except (UsageError, TooLong):
            raise  # on all ranks of the group
        except VramwiseError as error:
            raise RankFailed(error.message, hint=error.hint) from error
        place = self._handle().rank_in_group
        start = 0 if alike else sum(len(own) for own, _ in every[:place])
        return [
            replace(completion, prompt_index=completion.prompt_index - start)
            for completion in made
            if start <= completion.prompt_index < start + len(prompts)
        ]

    def _clock(self) -> Callable[[], bool]:
        """Return a function that says whether the time is up: to all ranks of the group the same."""
        deadline, steps = time.monotonic() + self.timeout_s, 0

        def over() -> bool:
            nonlocal steps
            late = time.monotonic() > deadline
            if self.degree == 1:
                return late
            steps += 1
            return steps % LOOK_EVERY == 0 and self._any(late)

        return over

    def _any(self, value: bool) -> bool:
        found = torch.tensor([value], dtype=torch.int32)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._handle().cpu_group)
        return bool(found)

    def _gather(self, value: Any) -> list[Any]:
        boxes: list[Any] = [None] * self.degree
        dist.all_gather_object(boxes, value, group=self._handle().cpu_group)
        return boxes

    def _handle(self) -> Any:
        from vllm.distributed.parallel_state import get_tp_group

        return get_tp_group()
