"""Hands a step to the trace: this project's own SFT and GRPO steps, or another framework's.

The own step is the code that trains: `trainer.scoring`, `trainer.losses`, `trainer.checkpointing`
and `trainer.optim` on a policy of fake tensors. Generation is not traced.
"""

import gc
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from planner.errors import UnsupportedError
from planner.machines.machine import GpuSpec
from planner.run.framework import frameworks
from planner.run.recipe import Checkpointing, Loss, Method, Recipe, Task
from planner.run.resolved import Resolved
from profiler.materialise import materialise, term_of_parameter
from profiler.storages import StorageTracker
from profiler.subjects.from_recipe import step_options
from profiler.subjects.hf_sft import HfSft, loss_phase
from profiler.subjects.options import StepOptions
from profiler.subjects.tasks import task_subject
from profiler.subjects.trl_grpo import Temperature, TrlGrpo
from profiler.subjects.trl_sft import TrlSft
from profiler.trace import Subject, watch_gradients
from trainer.parallel.ranks import Ranks


def subject_for(
    resolved: Resolved,
    recipe: Recipe,
    config: dict[str, Any],
    *,
    gpu: GpuSpec | None = None,
    layers: int | None = None,
    steps: int = 2,
    rank: int = 0,
) -> Subject:
    """Return rank `rank`'s step of a recipe on `gpu`. Raises UnsupportedError when none expresses it."""
    options = step_options(resolved, config, gpu=gpu, layers=layers, steps=steps, rank=rank)
    step = resolved.switches.trace_step
    if resolved.task not in (Task.SFT, Task.GRPO):
        return task_subject(resolved, options, config)
    grpo = resolved.task is Task.GRPO
    if options.shard is not None and step not in ("own", "hf", "hf-full"):
        raise UnsupportedError(
            f"framework {resolved.framework.name}: its step cannot be traced on {resolved.gpus} GPUs",
            hint="vramwise and hf-trainer can, with --shard fsdp2",
        )
    if step == "own":
        return VramwiseStep(options, resolved=resolved, recipe=recipe)
    full = resolved.loss is Loss.FULL
    if grpo and (step == "trl" or (step == "trl-full" and full)):
        way = Temperature(resolved.switches.grpo_temperature)
        return TrlGrpo(options, fused=step == "trl", score=resolved.beta > 0, temperature=way)
    if step == "trl":
        return TrlSft(options)
    # fused losses of the HF Trainer's subclasses are not ours to run
    if not grpo and (step == "hf" or (step in ("hf-full", "trl-full") and full)):
        return HfSft(options)
    traced = [law.name for law in frameworks().values() if law.switches.trace_step != "none"]
    raise UnsupportedError(
        f"framework {resolved.framework.name}: its {resolved.task} step cannot be traced",
        hint=f"frameworks with steps: {', '.join(traced)}",
    )


class VramwiseStep(HfSft):
    """This project's own step; on several ranks the trainer's own division of the policy."""

    def __init__(self, options: StepOptions, *, resolved: Resolved, recipe: Recipe) -> None:
        super().__init__(options)
        self.task = resolved.task
        self.name = f"vramwise-{self.task}"
        self.notes = ("generation and its engine are not traced",) if self._grpo else ()
        self.resolved = resolved
        self.recipe = recipe
        self.policy: Any = None

    @property
    def _grpo(self) -> bool:
        return self.task is Task.GRPO

    def build(self) -> torch.nn.Module:
        """Return the model on the meta device; the trainer checkpoints layers itself."""
        from dataclasses import replace

        if self.shard is not None:  # the mesh reads its own numbers: not on fake tensors
            ranks = RanksApart(rank=self.shard.rank, size=self.shard.ranks)
            shards = self.resolved.layout.data_shard
            self.ranks = ranks.laid_out(shard=shards, device_type="cpu")
        mode = self.options.checkpointing
        self.options = replace(self.options, checkpointing=Checkpointing.NONE, prepare_kbit=False)
        model = super().build()
        self.options = replace(self.options, checkpointing=mode)
        return model.eval()

    def divide(self, model: torch.nn.Module) -> None:
        """Leave it whole: the trainer divides what is loaded."""

    def allocate(self, model: Any, tracker: StorageTracker) -> None:
        """Make the policy: its choices of memory, and its part of the model on several ranks."""
        from trainer.model import Policy, keep_differentiable
        from trainer.neftune import EmbeddingNoise

        qlora = self.options.method is Method.QLORA
        # quantised on the GPU; else ranks fetch a unit at a time from their hosts
        with tracker.on_host() if self.shard is not None and not qlora else nullcontext():
            materialise(model, tracker)
        if qlora:
            keep_differentiable(model)
        policy = Policy(
            model=model,
            tokenizer=None,
            method=self.options.method,
            source="",
            revision=None,
            dtype=next(model.parameters()).dtype,
            device=torch.device("cpu"),
            noise=EmbeddingNoise(model, alpha=5.0) if self.resolved.neftune else None,
        )
        self._memory_choices(policy, tracker)
        self.policy = policy if self.shard is None else self._divided(policy, tracker)

    def run(self, model: Any, tracker: StorageTracker) -> None:
        """Run the optimizer steps with the trainer's own pieces."""
        from trainer.batching import Layout, ScoredSequence, collate
        from trainer.config import TrainSection
        from trainer.optim import NO_SCALE, apply_step
        from trainer.stepping import make_run_optimizer
        from trainer.vocab_tiles import tiles_as_on

        policy = self.policy
        recipe = self.recipe.model_copy(
            update={
                "optimizer": self.resolved.optimizer,
                "master_weights": self.resolved.master_weights or None,
            }
        )
        settings: Any = TrainSection.model_construct()  # type: ignore[call-arg]
        optimizer = make_run_optimizer(policy, recipe, settings)
        length = self.options.length
        scored = min(self.resolved.completion_tokens, length - 1) if self._grpo else length - 1
        sequence = ScoredSequence(
            token_ids=(0,) * length, scored=(False,) * (length - scored) + (True,) * scored
        )
        rows = self.options.micro_batch
        trained = [parameter for _, parameter in policy.stepped()]
        for (
            parameter
        ) in trained:  # a hooked head gives its gradient to autograd: trainer.logprob_head
            parameter._post_accumulate_grad_hooks = None
        with loss_phase(model, tracker), tiles_as_on("cuda"):
            for _ in range(self.options.steps):
                for _ in range(self.options.gradient_accumulation):
                    tracker.phase = "forward"
                    batch = collate([sequence] * rows, range(rows), layout=Layout.SORTED)
                    policy.one_pass(partial(self._learn, policy, batch))
                policy.take_gradients()
                with tracker.in_phase("step"):
                    for parameter in trained:
                        if parameter.grad is not None:  # on ranks a view of what the reduction left
                            tracker.adopt(parameter.grad, term="gradients", module="")
                    apply_step(optimizer, trained, scale=NO_SCALE, max_norm=1.0, ranks=policy.ranks)
                    _tag(optimizer, tracker)
                    optimizer.zero_grad(set_to_none=True)
                    policy.clear_gradients()
                    gc.collect()

    def _learn(self, policy: Any, batch: Any) -> tuple[()]:
        policy.whole(lambda: self._loss(policy, batch)).backward()
        return ()

    def _divided(self, policy: Any, tracker: StorageTracker) -> Any:
        """Return the policy as the trainer cuts it over this rank and those that are not there."""
        from trainer.parallel.sharding import over_ranks, shard_policy

        assert self.shard is not None
        recipe = over_ranks(self.recipe, self.shard.ranks)
        policy = shard_policy(policy, recipe, self.resolved.layout, self.ranks)
        for path, parameter in policy.model.named_parameters():
            tracker.adopt(parameter, term=term_of_parameter(path), module=path.rpartition(".")[0])
        watch_gradients(policy.model, tracker)
        return policy

    def _memory_choices(self, policy: Any, tracker: StorageTracker) -> None:
        """Do what trainer.preflight.apply_memory_choices does, with a host the tracker knows."""
        from planner.terms.activations import MLP_TILE_TOKENS
        from trainer.checkpointing import checkpoint_layers, decoder_layers
        from trainer.host_store import HostStore
        from trainer.tiled_mlp import tile_layers

        layers = decoder_layers(policy.base)
        keep = self.recipe.offload_keep_layers
        checkpoint_layers(
            layers,
            mode=self.options.checkpointing,
            every=self.recipe.checkpoint_every,
            store=HostStore(len(layers), keep_last=keep, copies=TracedCopies(tracker)),
        )
        if self.resolved.tiled_mlp:
            tile_layers(policy.base, tile_tokens=MLP_TILE_TOKENS, must=False)

    def _loss(self, policy: Any, batch: Any) -> torch.Tensor:
        from trainer.losses import LossSettings, policy_loss, sft_loss
        from trainer.router_loss import balance_loss
        from trainer.scoring import hidden_and_routers, log_probs

        routed = self.resolved.router_loss
        hidden, routers = hidden_and_routers(policy, batch, routers=routed)
        scored = log_probs(
            policy, batch, hidden, entropy=self._grpo, chunk_rows=self.recipe.loss_chunk_rows
        )
        if not self._grpo:
            share = sft_loss(scored.logp, num_tokens=len(batch.targets))
            return share + balance_loss(routers, policy.base.config, batch) if routed else share
        share, _ = policy_loss(
            scored.logp,
            advantages=torch.zeros(self.options.micro_batch),
            sequence_ids=batch.sequence_ids,
            normaliser=float(len(batch.targets)),
            settings=LossSettings(),
            entropy=scored.entropy,
        )
        return share


class RanksApart(Ranks):
    """Ranks that hear nothing from the others: fake tensors have no figures to tell."""

    def laid_out(self, *, shard: int, device_type: str) -> Ranks:
        """Return these ranks with their mesh; it is made once."""
        return (
            self
            if self.mesh is not None
            else super().laid_out(shard=shard, device_type=device_type)
        )

    def _reduced(self, value: Any, op: Any) -> Any:
        return value


class TracedCopies:
    """trainer.host_store.Copies between a host and a device that both are fake."""

    def __init__(self, tracker: StorageTracker) -> None:
        self._tracker = tracker

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return a slab in host memory."""
        with self._tracker.on_host():
            return torch.empty(num_bytes, dtype=torch.uint8)

    def release(self, slab: torch.Tensor) -> None:
        """Do nothing: the slab goes with its last reference."""

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        """Copy into the slab."""
        target.copy_(source)

    def to_device(
        self, source: torch.Tensor, after: Any, device: torch.device
    ) -> tuple[torch.Tensor, Any]:
        """Return a fresh device tensor."""
        return source.clone(), None

    def wait(self, event: Any) -> None:
        """Do nothing: fake copies are done."""


def _tag(optimizer: torch.optim.Optimizer, tracker: StorageTracker) -> None:
    """Tag whatever tensors the optimizer's state holds, nested ones too."""
    waiting: list[Any] = [optimizer.state]
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            block = tracker.block_of(item)
            if block is not None:
                block.term = "optimizer"
        elif isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list | tuple):
            waiting.extend(item)
        elif hasattr(item, "__dict__"):
            waiting.extend(vars(item).values())
