"""Step 0: plan the run, load it, rehearse its worst case, and show planned beside measured.

The rehearsal runs every phase once at the longest lengths that the recipe allows (a full KV cache, a full
micro-batch, optimizer state), so that memory that runs out does so now and not at step 120.
"""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from planner.errors import UsageError, VramwiseError
from planner.machines.machine import Machine, make_machine
from planner.models.hub import find_model
from planner.models.spec import ModelSpec
from planner.plan import Plan, plan
from planner.run.recipe import Attention, Checkpointing, Method, Recipe, RunFile, Task
from planner.units import format_bytes, parse_bytes
from profiler.recording import Recording
from profiler.torch_recorder import record
from trainer.batching import Layout, ScoredSequence, collate
from trainer.checkpointing import checkpoint_layers, decoder_layers
from trainer.config import TrainSection
from trainer.engines import make_engine
from trainer.engines.protocol import Engine
from trainer.engines.transformers import TransformersEngine
from trainer.fake_device import FakeDevice
from trainer.losses import sft_loss
from trainer.model import Policy, load_policy
from trainer.phase_memory import PhaseMemory
from trainer.scoring import hidden_rows, log_probs
from trainer.stepping import Stepper, TokenBudget, make_run_optimizer
from trainer.tiled_mlp import tile_layers

MLP_TILE_TOKENS = 2048
PREFLIGHT_FILE = "preflight.json"


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """A run that is ready to step."""

    recipe: Recipe
    """With every default filled in."""
    plan: Plan
    policy: Policy
    stepper: Stepper
    memory: PhaseMemory
    layout: Layout
    shape: dict[str, Any]
    """Temperature, top-k, top-p and head chunk for trainer.scoring.log_probs."""
    prompt_tokens: int
    completion_tokens: int
    num_generations: int
    prompts_per_step: int
    device: Any
    """Context of the whole run: the pretended device limit, or nothing."""
    engine: Engine | None = None
    """What generates; None for SFT."""
    measured: Recording | None = None
    """The rehearsal."""

    @property
    def planned_bytes(self) -> dict[str, int]:
        """Return phase -> planned peak. Overhead is CUDA's: on a CPU there is none."""
        on_gpu = self.policy.device.type == "cuda"
        return {
            phase.name: sum(term.bytes for term in phase.terms if on_gpu or term.name != "overhead")
            for phase in self.plan.phases
        }

    def save(self, output: Path) -> None:
        """Write the rehearsal where `vramwise profile compare` finds it."""
        if self.measured is not None:
            self.measured.save(output / PREFLIGHT_FILE)

    @property
    def measured_bytes(self) -> dict[str, int]:
        """Return phase -> peak of the rehearsal; empty without one."""
        phases = self.measured.phases if self.measured else ()
        return {phase.name: phase.peak_bytes for phase in phases}


def prepare(
    run: RunFile, train: TrainSection, *, say: Callable[[str], None] = lambda text: None
) -> Preflight:
    """Plan, load and rehearse the run. Raises VramwiseError with advice when it cannot fit."""
    spec = find_model(run.model, revision=run.revision)
    machine = this_machine(run, train)
    recipe, planned = solve(spec, settled(run.recipe), machine, train)
    policy = load_policy(
        run.model,
        recipe=recipe,
        revision=run.revision,
        seed=train.seed,
        lora_alpha=train.lora_alpha,
    )
    # before anything else is allocated: vllm-shared brings the policy's weights with it
    engine = None
    if recipe.task is Task.GRPO:
        engine = make_engine(policy, recipe=recipe, plan=planned)
        engine.release()
    apply_memory_choices(policy, recipe, must_tile=bool(run.recipe.tiled_mlp))
    memory = PhaseMemory(policy.device)
    tokens = (
        train.micro_batch_tokens or (recipe.micro_batch_size or 1) * planned.resolved.seq_tokens
    )
    stepper = Stepper(
        policy,
        make_run_optimizer(policy, recipe, train),
        train,
        budget=TokenBudget(max(tokens, planned.resolved.seq_tokens)),
        memory=memory,
    )
    ready = Preflight(
        recipe=recipe,
        plan=planned,
        policy=policy,
        stepper=stepper,
        memory=memory,
        layout=_layout(recipe),
        shape={
            "temperature": train.sampling.temperature,
            "top_k": train.sampling.top_k,
            "top_p": train.sampling.top_p,
            "chunk_rows": recipe.loss_chunk_rows,
        },
        prompt_tokens=planned.resolved.prompt_tokens,
        completion_tokens=planned.resolved.completion_tokens,
        num_generations=planned.resolved.num_generations,
        prompts_per_step=_prompts_per_step(recipe, train),
        device=_device(train, policy),
        engine=engine,
    )
    if train.preflight:
        with ready.device:
            ready = replace(ready, measured=rehearse(ready, train))
        say(table(ready))
    return ready


def this_machine(run: RunFile, train: TrainSection) -> Machine:
    """Return what the run may use: the pretended limit, this GPU, or this host's memory."""
    host_ram = (
        parse_bytes(run.machine.host_ram, field="machine.host_ram")
        if run.machine.host_ram
        else None
    )
    on_gpu = torch.cuda.is_available()
    if train.device_memory:
        limit = parse_bytes(train.device_memory, field="train.device_memory")
        return Machine(vram_bytes=limit, host_ram_bytes=host_ram, context_bytes=0)
    if on_gpu:
        name = torch.cuda.get_device_name()
        total = torch.cuda.get_device_properties(0).total_memory
        try:
            return make_machine(name, vram=total, host_ram=run.machine.host_ram)
        except UsageError:  # a card that the catalogue doesn't have
            return make_machine(vram=total, host_ram=run.machine.host_ram)
    return Machine(vram_bytes=psutil.virtual_memory().available, context_bytes=0)


def settled(recipe: Recipe) -> Recipe:
    """Return the recipe with what the trainer decides by itself written down, so that the plan sees it."""
    dtype = recipe.dtype or "bf16"
    lora = recipe.lora.model_copy(update={"dtype": recipe.lora.dtype or dtype})
    master = recipe.master_weights
    if master is None:
        # bf16 weights trained in full are rounded stochastically; fp16 has too little range for that
        trained = dtype if recipe.method is Method.FULL else lora.dtype
        master = trained == "fp16" or (trained == "bf16" and recipe.method is not Method.FULL)
    tiled = recipe.tiled_mlp
    if tiled is None:
        # beside checkpointing it costs no more work than a second pass through the norms
        tiled = recipe.checkpointing is not Checkpointing.NONE
    return recipe.model_copy(
        update={
            "dtype": dtype,
            "lora": lora,
            "master_weights": master,
            "tiled_mlp": tiled,
            "framework": "vramwise",
        }
    )


def solve(
    spec: ModelSpec, recipe: Recipe, machine: Machine, train: TrainSection
) -> tuple[Recipe, Plan]:
    """Return (recipe, plan) with the largest micro-batch that fits, unless the recipe names one.

    Raises VramwiseError with advice when even one sequence doesn't fit.
    """
    if recipe.micro_batch_size is not None:
        planned = plan(spec, recipe, machine)
        if not planned.fits:
            smaller, smaller_plan = _with_sequences(spec, recipe, machine, 1)
            if recipe.micro_batch_size == 1 or not smaller_plan.fits:
                raise _refusal(planned)
            return smaller, smaller_plan
        return recipe, planned
    low, best = 1, _with_sequences(spec, recipe, machine, 1)
    if not best[1].fits:
        raise _refusal(best[1])
    most = train.prompts_per_step or 1
    if recipe.task is Task.GRPO:
        most *= best[1].resolved.num_generations
    while low < most:
        middle = (low + most + 1) // 2
        trial = _with_sequences(spec, recipe, machine, middle)
        if trial[1].verdict == "fits":
            low, best = middle, trial
        else:
            most = middle - 1
    return best


def apply_memory_choices(policy: Policy, recipe: Recipe, *, must_tile: bool = True) -> None:
    """Checkpoint, offload and tile the policy's layers in place as the recipe says.

    `must_tile`: a model without an MLP that can be tiled is an error when tiles are asked for.
    """
    mode = recipe.checkpointing or Checkpointing.OFFLOAD
    if mode is not Checkpointing.NONE:
        checkpoint_layers(
            decoder_layers(policy.base),
            mode=mode,
            every=recipe.checkpoint_every,
            keep_last=recipe.offload_keep_layers,
        )
    if recipe.tiled_mlp:
        tile_layers(policy.base, tile_tokens=MLP_TILE_TOKENS, must=must_tile)


def rehearse(ready: Preflight, train: TrainSection) -> Recording:
    """Run every phase once at full size and return what each held; halves the micro-batch until it fits."""
    while True:
        try:
            return _rehearse_once(ready, train)
        except torch.OutOfMemoryError:
            pass
        ready.stepper.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        try:
            ready.stepper.budget.halve(ready.plan.resolved.seq_tokens)
        except VramwiseError as error:
            raise VramwiseError(
                f"preflight: {error.message}; planned {format_bytes(ready.plan.peak_bytes)} of "
                f"{format_bytes(ready.plan.capacity_bytes)}",
                hint=error.hint,
            ) from None


def _rehearse_once(ready: Preflight, train: TrainSection) -> Recording:
    """Return what every phase of a step holds at the longest lengths; weights stay as they are."""
    policy = ready.policy
    # its own optimizer: state is made for real, and thrown away with it
    optimizer = make_run_optimizer(policy, ready.recipe, train)
    with record(policy.model, optimizer, subject="vramwise preflight") as live:
        with live.phase("step"):
            _step_without_change(policy, optimizer)
        engine = ready.engine
        if isinstance(engine, TransformersEngine):  # vLLM has its whole pool since it started
            rows = engine.max_rows(ready.prompts_per_step * ready.num_generations)
            with live.phase("rollout"):
                engine.rehearse(
                    rows,
                    num_prompts=-(-rows // ready.num_generations),
                    prompt_tokens=ready.prompt_tokens,
                    completion_tokens=ready.completion_tokens,
                )
        batch = _worst_batch(ready)
        with live.phase("forward"):
            hidden = hidden_rows(policy, batch)
        with live.phase("loss"):
            scored = log_probs(policy, batch, hidden, entropy=True, **ready.shape)
            share = sft_loss(scored.logp, num_tokens=len(batch.targets))
        del hidden, scored
        with live.phase("backward"):
            share.backward()
        optimizer.zero_grad(set_to_none=True)
    return live.recording


def _step_without_change(policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Step with gradients of 0 at a rate of 0: optimizer state exists, weights are as before."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for _, parameter in policy.trainable():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _worst_batch(ready: Preflight) -> Any:
    """Return a micro-batch of the longest sequences that the budget takes."""
    length = ready.prompt_tokens + ready.completion_tokens
    count = max(1, ready.stepper.budget.tokens // length)
    scored = ready.completion_tokens if ready.recipe.task is Task.GRPO else length - 1
    sequence = ScoredSequence(
        token_ids=(ready.policy.tokenizer.eos_token_id or 0,) * length,
        scored=(False,) * (length - scored) + (True,) * scored,
    )
    batch = collate([sequence] * count, range(count), layout=ready.layout)
    return batch.to(ready.policy.device)


def table(ready: Preflight) -> str:
    """Return planned | measured by phase, as text."""
    lines = [f"{'phase':<10}{'planned':>14}{'measured':>14}{'difference':>12}"]
    for name, planned in ready.planned_bytes.items():
        measured = ready.measured_bytes.get(name)
        if measured is None:
            continue
        off = (measured - planned) / planned if planned else 0.0
        lines.append(
            f"{name:<10}{format_bytes(planned):>14}{format_bytes(measured):>14}{off:>+12.1%}"
        )
    return "\n".join(lines)


def _with_sequences(
    spec: ModelSpec, recipe: Recipe, machine: Machine, count: int
) -> tuple[Recipe, Plan]:
    changed = recipe.model_copy(update={"micro_batch_size": count})
    return changed, plan(spec, changed, machine)


def _refusal(planned: Plan) -> VramwiseError:
    return VramwiseError(
        f"the run does not fit: {format_bytes(planned.peak_bytes)} in {planned.peak_phase}, "
        f"{format_bytes(planned.capacity_bytes)} on the device",
        hint=f"{planned.why}; `vramwise advise RUN.yaml` lists what would make it fit",
    )


def _prompts_per_step(recipe: Recipe, train: TrainSection) -> int:
    if train.prompts_per_step is not None:
        return train.prompts_per_step
    rows = (recipe.micro_batch_size or 1) * recipe.gradient_accumulation
    return rows if recipe.task is Task.SFT else max(1, rows // (recipe.num_generations or 8))


def _layout(recipe: Recipe) -> Layout:
    """Packed needs kernels that tell sequences apart; otherwise rows of similar length."""
    packed = recipe.packing if recipe.packing is not None else recipe.attention is Attention.FLASH
    return Layout.PACKED if packed else Layout.SORTED


def _device(train: TrainSection, policy: Policy) -> Any:
    """Return the context that holds the run to `train.device_memory`."""
    if train.device_memory is None:
        return nullcontext()
    limit = parse_bytes(train.device_memory, field="train.device_memory")
    if policy.device.type == "cuda":
        total = torch.cuda.get_device_properties(policy.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), policy.device)
        return nullcontext()
    device = FakeDevice(limit)
    for tensor in (*policy.model.parameters(), *policy.model.buffers()):
        device.adopt(tensor)
    return device
