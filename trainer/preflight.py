"""Step 0: plan the run, load it, rehearse its worst case, and show planned beside measured.

The rehearsal runs every phase once at the longest lengths that the recipe allows (a full KV cache, a full
micro-batch, optimizer state), so that memory that runs out does so now and not at step 120.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.answers.width import widened
from planner.errors import VramwiseError
from planner.machines.machine import Machine
from planner.models.hub import find_model
from planner.models.spec import ModelSpec
from planner.plan import Plan, plan
from planner.run.lora_fields import with_start
from planner.run.parallel import layout_of
from planner.run.recipe import (
    Attention,
    Checkpointing,
    EngineKind,
    Method,
    Recipe,
    RunFile,
    Task,
)
from planner.run.resolve import resolve
from planner.terms.activations import MLP_TILE_TOKENS
from planner.units import format_bytes, parse_bytes
from profiler.recording import Recording
from trainer.apart import check_apart
from trainer.batching import Layout
from trainer.checkpointing import CheckpointedLayers, checkpoint_layers, decoder_layers
from trainer.config import TrainSection, guides, with_epochs
from trainer.devices import check_driver, check_dtype, limited, occupied, run_device, this_machine
from trainer.engines import make_engine
from trainer.engines.protocol import Engine
from trainer.engines.vllm_graphs import with_graphs
from trainer.engines.vllm_settings import settle_engine
from trainer.evaluation_phase import check_evaluation_fits, evaluation_phase
from trainer.fields import machine_note, other_framework, unread_notes
from trainer.model import Policy, load_policy
from trainer.packing import keeps_apart, refuse_mixing
from trainer.parallel.first_pass import learn_traffic
from trainer.parallel.ranks import ALONE, Ranks
from trainer.parallel.same_plan import check_prompts, fullest, smallest_machine
from trainer.parallel.sharding import over_ranks, refuse_over_ranks, shard_policy
from trainer.phase_memory import PhaseMemory
from trainer.rehearsal import rehearse
from trainer.say import Say, silent
from trainer.shared_plan import Sharing, plan_sharing
from trainer.shared_prefix import can_share
from trainer.step_size import within_epoch
from trainer.stepping import Stepper, TokenBudget, make_run_optimizer
from trainer.tiled_mlp import tile_layers

if TYPE_CHECKING:
    from trainer.fit import Fit

PREFLIGHT_FILE = "preflight.json"


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """A run that is ready to step."""

    recipe: Recipe
    """With every default filled in."""
    train: TrainSection
    """With its number of steps."""
    plan: Plan
    policy: Policy
    stepper: Stepper
    memory: PhaseMemory
    layout: Layout
    shape: dict[str, Any]
    """Temperature, top-k, top-p, min-p and head chunk for trainer.scoring.log_probs."""
    prompt_tokens: int
    completion_tokens: int
    num_generations: int
    prompts_per_step: int
    device: Any
    """Context of the whole run: the pretended device limit, or nothing."""
    engine: Engine | None = None
    """What generates; None for SFT."""
    sharing: Sharing | None = None
    """How groups share their prompt in training; None: never."""
    held_out: int = 0
    """Samples of an evaluation, on this rank; 0 = there is none."""
    measured: Recording | None = None
    """The rehearsal."""
    ranks: Ranks = ALONE
    fit: "Fit | None" = None
    """What `--fit` promised."""

    @property
    def planned_bytes(self) -> dict[str, int]:
        """Return phase -> planned peak. Overhead is CUDA's: on a CPU there is none."""
        on_gpu = self.policy.device.type == "cuda"
        planned: dict[str, int] = {}
        shared = self.sharing.phases if self.sharing else ()
        evaluation = (evaluation_phase(self.plan, prompts=self.held_out),) if self.held_out else ()
        for phase in (*self.plan.phases, *shared, *evaluation):
            size = sum(term.bytes for term in phase.terms if on_gpu or term.name != "overhead")
            planned[phase.name] = max(size, planned.get(phase.name, 0))
        return planned

    def save(self, output: Path) -> None:
        """Write the rehearsal where `vramwise profile compare` finds it; of several ranks the fullest one's."""
        if self.measured is not None and self.ranks.first:
            self.measured.save(output / PREFLIGHT_FILE)

    @property
    def measured_bytes(self) -> dict[str, int]:
        """Return phase -> peak of the rehearsal; empty without one."""
        phases = self.measured.phases if self.measured else ()
        return {phase.name: phase.peak_bytes for phase in phases}


def longest_sequence(run: RunFile) -> int:
    """Return the tokens of the longest sequence that a run file allows."""
    spec = find_model(run.model, revision=run.revision)
    return resolve(spec, settled(run.recipe), Machine(vram_bytes=1)).seq_tokens


def longest_prompt(run: RunFile) -> int:
    """Return the tokens of the longest prompt that a run file allows."""
    spec = find_model(run.model, revision=run.revision)
    return resolve(spec, settled(run.recipe), Machine(vram_bytes=1)).prompt_tokens


def prepare(
    run: RunFile,
    train: TrainSection,
    *,
    say: Say = silent,
    per_epoch: int | None = None,
    held_out: int = 0,
    router_loss: bool = False,
    ranks: Ranks = ALONE,
    fit: "Fit | None" = None,
) -> Preflight:
    """Plan, load and rehearse the run. Raises VramwiseError with advice when it cannot fit.

    `per_epoch`: prompts (SFT: samples or packed rows) of the data set, which epochs are counted in;
    None: not known, nothing is checked against it. `held_out`: samples of an evaluation.
    `router_loss`: SFT of a mixture adds the loss that balances its experts.
    """
    spec = find_model(run.model, revision=run.revision)
    unused = check_driver()
    check_dtype(run.recipe, run_device())
    degrees = layout_of(spec, run.recipe, ranks.size)
    started, _ = with_start(spec, run.recipe)
    refuse_over_ranks(started, degrees)
    on_cpu = run_device().type == "cpu" and not train.device_memory
    nodes = run.machine.nodes or 0
    found = replace(this_machine(run, train), num_gpus=ranks.size, nodes=nodes)
    machine = smallest_machine(found, ranks, shared=on_cpu)
    held = "" if train.device_memory else occupied(machine)
    for note in filter(None, (unused, held)):
        say(note)
    wanted = settle_engine(settled(started, ranks.size))
    if wanted.task is Task.SFT:
        beside = {"neftune": bool(train.neftune_alpha), "router_loss": router_loss}
        wanted = wanted.model_copy(update=beside)
    layout, asked = choose_layout(spec, wanted, train)
    if asked:  # samples in one row: planned with the mask that keeps them apart
        wanted = wanted.model_copy(update={"packing": True})
    recipe, planned = with_graphs(
        wanted,
        lambda each: solve(spec, each, machine, train, held=held, ranks=ranks.size),
        say=say,
    )
    if asked == "train.padding_free" and layout is Layout.ROWS:
        say(_masked_rows(planned))
    other = other_framework(spec, run.recipe, recipe, machine)
    for note in filter(
        None, (other, *unread_notes(run.recipe, planned.resolved), _elsewhere(run, machine))
    ):
        say(note)
    per_step = within_epoch(recipe, train, per_epoch, say=say, ranks=ranks.size)
    check_prompts(recipe, per_step, ranks)
    recipe, planned = widened(
        spec, recipe, planned, machine, prompts=-(-per_step // ranks.size), say=say
    )
    train = with_epochs(train, per_epoch=per_epoch or 1, per_step=per_step)
    if held_out >= ranks.size:  # fewer than ranks are each one's
        held_out = -(-held_out // ranks.size)
    policy = load_policy(
        run.model,
        recipe=recipe,
        revision=run.revision,
        seed=train.seed,
        lora_alpha=train.lora_alpha,
        neftune_alpha=train.neftune_alpha,
        on_host=ranks.several,
    )
    # before anything else is allocated: vllm-shared brings the policy's weights with it
    engine, generates = None, recipe.task is Task.GRPO
    wanted_engine: dict[str, Any] = {"recipe": recipe, "plan": planned, "guided": guides(train)}
    if generates and not ranks.several:
        engine = make_engine(policy, **wanted_engine)
        engine.release()
    sharing_engine = None
    if generates and ranks.several and recipe.engine.kind is EngineKind.VLLM_SHARED:
        from trainer.engines.vllm_shared import VllmSharedEngine

        sharing_engine = VllmSharedEngine(policy, **wanted_engine, ranks=ranks)
    layers = apply_memory_choices(policy, recipe, must_tile=bool(run.recipe.tiled_mlp), say=say)
    if ranks.several:
        stay = sharing_engine.shared if sharing_engine else ()
        policy = shard_policy(policy, recipe, degrees, ranks, stay=stay)
        ranks = policy.ranks
        if sharing_engine:
            sharing_engine.follow(policy)
            engine = sharing_engine
        elif generates:
            engine = make_engine(policy, **wanted_engine)
        if engine is not None:
            engine.release()
    if asked:
        check_apart(policy, asked=asked)
    shape = {
        "temperature": train.sampling.temperature,
        "top_k": train.sampling.top_k,
        "top_p": train.sampling.top_p,
        "min_p": train.sampling.min_p,
        "chunk_rows": recipe.loss_chunk_rows,
    }
    if ranks.several:
        learn_traffic(policy, shape)
    memory = PhaseMemory(policy.device)
    budget = _token_budget(recipe, planned, train)
    if fit is not None:
        budget = _ladder(budget, policy, recipe, layers, say)
    stepper = Stepper(
        policy, make_run_optimizer(policy, recipe, train), train, budget=budget, memory=memory
    )
    sharing = None
    if recipe.task is Task.GRPO and train.share_prefix is not False and can_share(policy.base):
        sharing = plan_sharing(
            spec,
            planned,
            budget_tokens=budget.tokens,
            device=policy.device,
            always=bool(train.share_prefix),
        )
    ready = Preflight(
        recipe=recipe,
        train=train,
        plan=planned,
        policy=policy,
        stepper=stepper,
        memory=memory,
        layout=layout,
        shape=shape,
        prompt_tokens=planned.resolved.prompt_tokens,
        completion_tokens=planned.resolved.completion_tokens,
        num_generations=planned.resolved.num_generations,
        prompts_per_step=per_step,
        device=_device(train, policy),
        engine=engine,
        sharing=sharing,
        held_out=held_out,
        ranks=ranks,
        fit=fit,
    )
    if held_out:
        check_evaluation_fits(planned, prompts=held_out)
    if train.preflight:
        with ready.device:
            measured, whose = fullest(rehearse(ready, train), ranks)
        ready = replace(ready, measured=measured)
        say("\n".join(filter(None, (whose, table(ready)))))
    return ready


def _masked_rows(planned: Plan) -> str:
    return (
        f"padding_free: {planned.resolved.attention.value} attention keeps samples apart by a mask: they lie end "
        f"to end in rows of at most {planned.resolved.seq_tokens:,} tokens, each micro-batch's as wide as its "
        "longest; attention: flash needs neither mask nor rows"
    )


def _elsewhere(run: RunFile, machine: Machine) -> str:
    name = machine.gpu.name if machine.gpu else "a device"
    return machine_note(run, f"{name} with {format_bytes(machine.vram_bytes)}")


def settled(recipe: Recipe, ranks: int = 1) -> Recipe:
    """Return the recipe with what the trainer decides by itself written down, so that the plan sees it."""
    recipe = over_ranks(recipe, ranks)
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
    spec: ModelSpec,
    recipe: Recipe,
    machine: Machine,
    train: TrainSection,
    *,
    held: str = "",
    ranks: int = 1,
) -> tuple[Recipe, Plan]:
    """Return (recipe, plan) with the largest micro-batch that fits, unless the recipe names one.

    Raises VramwiseError with advice when even one sequence doesn't fit; `held` says what others hold.
    """
    if train.device_memory:
        held = f"train.device_memory: {train.device_memory}"
    elif machine.cpu and machine.host_ram_bytes:
        held = f"machine.host_ram: {format_bytes(machine.host_ram_bytes)}"
    if recipe.micro_batch_size is not None:
        planned = plan(spec, recipe, machine)
        if not planned.may_run:
            smaller, smaller_plan = _with_sequences(spec, recipe, machine, 1)
            if recipe.micro_batch_size == 1 or not smaller_plan.may_run:
                raise _refusal(planned, held)
            return smaller, smaller_plan
        return recipe, planned
    low, best = 1, _with_sequences(spec, recipe, machine, 1)
    if not best[1].may_run:
        raise _refusal(best[1], held)
    most = -(-(train.prompts_per_step or 1) // ranks)
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


def apply_memory_choices(
    policy: Policy, recipe: Recipe, *, must_tile: bool = True, say: Say = silent
) -> CheckpointedLayers | None:
    """Checkpoint, offload and tile the policy's layers in place as the recipe says; return the checkpointed ones.

    `must_tile`: a model without an MLP that can be tiled is an error when tiles are asked for.
    """
    mode = recipe.checkpointing or Checkpointing.OFFLOAD
    layers = None
    if mode is not Checkpointing.NONE:
        layers = checkpoint_layers(
            decoder_layers(policy.base),
            mode=mode,
            every=recipe.checkpoint_every,
            keep_last=recipe.offload_keep_layers,
            say=say,
        )
    if recipe.tiled_mlp:
        tile_layers(policy.base, tile_tokens=MLP_TILE_TOKENS, must=must_tile)
    return layers


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


def _refusal(planned: Plan, held: str) -> VramwiseError:
    return VramwiseError(
        f"the run does not fit: {format_bytes(planned.peak_bytes)} in {planned.peak_phase}, "
        f"{format_bytes(planned.capacity_bytes)} on the device{f'; {held}' if held else ''}",
        hint=f"{planned.why}; `vramwise advise RUN.yaml` lists what would make it fit",
    )


def _token_budget(recipe: Recipe, planned: Plan, train: TrainSection) -> TokenBudget:
    longest = planned.resolved.seq_tokens
    tokens = train.micro_batch_tokens or (recipe.micro_batch_size or 1) * longest
    return TokenBudget(max(tokens, longest))


def _ladder(
    budget: TokenBudget,
    policy: Policy,
    recipe: Recipe,
    layers: CheckpointedLayers | None,
    say: Say,
) -> TokenBudget:
    """Return the budget as the last rungs of a ladder."""
    from trainer.ladder import Ladder

    return Ladder(
        tokens=budget.tokens,
        policy=policy,
        layers=layers,
        mode=recipe.checkpointing or Checkpointing.OFFLOAD,
        offload_keeps=recipe.offload_keep_layers,
        say=say,
    )


def choose_layout(spec: ModelSpec, recipe: Recipe, train: TrainSection) -> tuple[Layout, str]:
    """Return how sequences lie in memory, and the field that asked for several of them in a row.

    Without padding by itself where flash attention keeps samples apart; a row of one sample each
    otherwise. Raises UnsupportedError where a model's layers cannot keep them apart.
    """
    flash = recipe.attention is Attention.FLASH
    if recipe.packing:
        refuse_mixing(spec, asked="recipe.packing")
        rows = not flash and recipe.task is Task.SFT
        return (Layout.ROWS if rows else Layout.PACKED), "recipe.packing"
    if train.padding_free:
        refuse_mixing(spec, asked="train.padding_free")
        return (Layout.PACKED if flash else Layout.ROWS), "train.padding_free"
    by_itself = flash and recipe.packing is None and train.padding_free is None
    return (Layout.PACKED if by_itself and keeps_apart(spec) else Layout.SORTED), ""


def _device(train: TrainSection, policy: Policy) -> Any:
    """Return the context that holds the run to `train.device_memory`."""
    if train.device_memory is None:
        return nullcontext()
    limit = parse_bytes(train.device_memory, field="train.device_memory")
    return limited(policy.device, limit, policy.model)
