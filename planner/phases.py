"""Which terms live in which phase, and how large each is there."""

from dataclasses import dataclass
from typing import Any

from planner.dtypes import element_bytes
from planner.machines.machine import Machine
from planner.models.spec import ModelSpec
from planner.run.recipe import VLLM, EngineKind, Task
from planner.run.resolved import Resolved
from planner.run.tasks import TASKS
from planner.terms.activations import Activations
from planner.terms.adapters import lora
from planner.terms.backward import backward
from planner.terms.columns import micro_batch
from planner.terms.communication import Buffers, buckets, buffers, term
from planner.terms.companions import offloaded
from planner.terms.critic import Critic, critic, rollout_logits
from planner.terms.engine import EngineCosts, Serving, engine_costs
from planner.terms.generation import gathered_to_generate, generating, rolling
from planner.terms.gradients import accumulated, gradients
from planner.terms.host import host
from planner.terms.lifecycle import lifecycle, lifecycle_host
from planner.terms.loading import loading
from planner.terms.logits import Logits, held_outputs, kept_rows, logits
from planner.terms.megatron_kept import kept_batches, left_by_overlap, memory_buffer
from planner.terms.optimizer import optimizer
from planner.terms.overhead import engine_workspace, workspace
from planner.terms.passes import passes
from planner.terms.pipeline import passed_on, under_way
from planner.terms.running import running_term
from planner.terms.sync import synced
from planner.terms.term import Term, merged, plus
from planner.terms.vision import vision
from planner.terms.vllm_weights import vllm_weights_term
from planner.terms.weights import gathered, kept_between, weights
from planner.terms.zero import standing_gradients, step_gradients

PHASES = (
    "load", "sync", "rollout", "score", "reference", "teacher", "reward", "critic",
    "forward", "loss", "backward", "step", "evaluate", "save", "resume",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase and the terms alive when it is at its largest."""

    name: str
    terms: tuple[Term, ...]
    total_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "total_bytes": self.total_bytes,
            "terms": [term.to_dict() for term in self.terms],
        }


@dataclass(frozen=True, slots=True)
class Budget:
    """All phases of a run, and what the host holds meanwhile."""

    phases: tuple[Phase, ...]
    host: tuple[Term, ...]
    problem: str = ""
    """Why the run cannot even start, whatever the memory; "" = it can."""
    serving: Serving | None = None
    """vLLM's own figures, where it runs on this GPU."""


def _workspaces(model: ModelSpec, r: Resolved, machine: Machine) -> Term:
    """Return the workspaces of torch's matrix products, and of a framework's own library."""
    own, switches = workspace(machine, trains=r.trains), r.switches
    routed = any(layer.mlp.num_experts for layer in model.layers)
    more = switches.library_workspaces + (switches.grouped_workspaces if routed else 0)
    if not r.trains:
        return own
    if more:
        own = plus(own, engine_workspace(machine, more))
    for kept in (memory_buffer(model, r), kept_batches(r)):
        own = plus(own, kept) if kept.bytes else own
    return own


def _phase(name: str, *terms: Term) -> Phase:
    alive = merged(*terms)
    return Phase(name, alive, sum(term.bytes for term in alive))


def budget(model: ModelSpec, r: Resolved, machine: Machine) -> Budget:
    """Return every phase of the run with its terms."""
    base, space = weights(model, r), _workspaces(model, r, machine)
    if not r.trains:
        return _serve(model, r, machine, base, space)
    adapter, grads, states = lora(model, r), gradients(model, r), optimizer(model, r)
    acts, head = micro_batch(model, r), logits(model, r)
    reducer, kept = buckets(model, r), standing_gradients(r, grads)
    fixed = (base, adapter, states.states, space, reducer, kept)
    held = Term("gradients", 0) if kept.bytes else accumulated(model, r, grads)
    outputs = held_outputs(model, r)
    whole, root = gathered(model, r, r.placement.gathered_layers), gathered(model, r, 0)
    flat = buffers(model, r)
    running = engine_costs(model, r, machine, base.bytes)
    resident = running.resident
    seen, passing = vision(model, r, acts.forward), under_way(model, r)
    phases = [_phase("load", base, adapter, *loading(model, r, base))]
    if r.pushes:
        woken = running.woken if r.engine is EngineKind.VLLM_PUSH else resident
        phases.append(_phase("sync", *_resting(r, fixed, SCORE_LEAVES), synced(model, r), woken))
    if TASKS[r.task].generates:
        resting = _resting(r, fixed, ROLLOUT_LEAVES)
        phases.append(_rollout(model, r, running, resting, whole, flat))
        phases.append(
            _phase(
                "score",
                *_resting(r, fixed, SCORE_LEAVES),
                whole,
                term(r, flat.forward, "the running layer's"),
                seen.no_grad,
                running_term("score", acts.no_grad, acts),
                head.score,
                resident,
            )
        )
    # PPO's passes are over before the first backward of a step
    again = r.micro_batches > 1 and r.task is not Task.PPO
    for side in passes(model, r, acts, head):
        alive = (base, adapter, space) if side.before_training else fixed
        if again and not side.before_training:
            alive = (*alive, held)
        phases.append(_phase(side.name, *merged(*alive, seen.no_grad, *side.terms, resident)))
    # what outlives is of the step before
    acting, flown, stays = _forward(model, r, flat, acts)
    phases.append(
        _phase(
            "forward",
            *fixed,
            held,
            whole,
            term(r, flown, "the running layer's, and before it the root's"),
            stays,
            seen.forward,
            running_term("forward", acting, acts),
            outputs,
            resident,
            *passing,
        )
    )
    saved, logit, made, asked = _loss(model, r, acts, head, flat)
    own = Term("gradients", 0)
    if made and (r.placement.flat_buffers or not held.bytes):
        own = Term("gradients", made, "the head's {0:,} B", (made,), grads.source)
    phases.append(
        _phase(
            "loss",
            *fixed,
            held,
            own,
            root,
            kept_between(model, r, model.num_layers),
            term(r, asked, "the last layer's, asked for by the root"),
            seen.loss,
            running_term("loss", saved, acts),
            logit,
            resident,
            *passing,
        )
    )
    running_back = backward(model, r, acts, grads, held, flat, seen)
    phases.append(_phase("backward", *fixed, *running_back, outputs, resident, *passing))
    left = running_term("step", acts.outliving, acts)
    offloaded_fsdp2 = r.placement.flat_buffers and r.placement.offload.gradients
    elsewhere = r.placement.bucket_views or offloaded_fsdp2
    made_whole = Term("gradients", 0) if elsewhere else step_gradients(r, grads)
    step = Term(
        "optimizer",
        states.states.bytes + states.step.bytes,
        "{0:,} B states + {1:,} B step temporaries",
        (states.states.bytes, states.step.bytes),
        states.step.source or states.states.source,
    )
    passed = passed_on(model, r)
    phases.append(
        _phase(
            *("step", base, adapter, made_whole, step, outputs),
            *(seen.after, left, left_by_overlap(model, r), space, reducer, resident, passed),
        )
    )
    second = critic(r)
    if second is not None:
        phases = _with_critic(phases, second, grads, rollout_logits(model, r), fixed)
    phases.extend(_phase(each.name, *merged(*each.terms)) for each in lifecycle(model, r, phases))
    inputs = Term(
        "activations", acts.host, "offloaded checkpoint inputs, pinned", (), "checkpoint offload"
    )
    staying = _resting(r, fixed, ROLLOUT_LEAVES)
    waiting = tuple(term for term in fixed if term not in staying)  # at its most, in the rollout
    others = (inputs, running.host, *waiting, offloaded(r))
    held_there = host(model, r, states.host, others, lifecycle_host(model, r))
    return Budget(tuple(phases), held_there, running.problem, running.serving)


def _with_critic(
    phases: list[Phase], second: Critic, grads: Term, logit: Term, fixed: tuple[Term, ...]
) -> list[Phase]:
    """Return the policy's phases with the critic beside them, and the critic's own before the step."""
    found = []
    for phase in phases:
        more: tuple[Term, ...] = second.standing if phase.name != "load" else (second.adapters,)
        if phase.name in ("rollout", "score", "reference", "reward"):
            copies = 2 if phase.name == "rollout" else 1  # the list of steps and its stack
            more = (*more, *copies * (logit,))
        elif phase.name in ("forward", "loss", "backward"):
            more = (*more, second.held)
        elif phase.name == "step":
            own = (second.spec, second.r)
            held = second.kept if second.kept.bytes else accumulated(*own, second.gradients)
            seen = vision(*own, second.acts.forward)
            back = backward(*own, second.acts, second.gradients, held, buffers(*own), seen)[1:]
            counted = second.kept.bytes or not second.held.bytes
            together = Term("gradients", 0) if counted else grads
            found.append(_phase("critic", *merged(*fixed, *second.standing, together, *back)))
            more = (*more, second.step, *(() if second.kept.bytes else (second.gradients,)))
        found.append(_phase(phase.name, *merged(*phase.terms, *more)))
    return found


def _loss(
    model: ModelSpec, r: Resolved, acts: Activations, head: Logits, flat: Buffers
) -> tuple[int, Term, int, int]:
    """Return activations, logits, the head's gradient and flat buffers where the loss is largest.

    That is in its forward, in its backward, or where the head's own backward has made a gradient.
    """
    if r.law.drops_hidden:
        # largest in its backward: autocast's cache is gone
        return acts.loss_copied, head.forward, head.weight_grad, flat.loss
    moments = [
        (acts.loss_forward + acts.autocast_cache, head.forward, 0, flat.loss),
        (acts.loss_backward, head.backward, 0, flat.gather),
    ]
    if acts.balance:
        moments.append((acts.loss_forward + acts.balance, kept_rows(model, r), 0, flat.loss))
    if head.ending.bytes:
        moments.append((acts.loss_backward, head.ending, head.weight_grad, flat.gather))
    return max(moments, key=lambda moment: moment[0] + moment[1].bytes + moment[2] + moment[3])


def _forward(
    model: ModelSpec, r: Resolved, flat: Buffers, acts: Activations
) -> tuple[int, int, Term]:
    """Return activations, flat buffers and what earlier layers leave whole, where the forward is largest.

    At the first layer's the root's buffer is still beside it, and only the embeddings' output exists;
    at the last layer's the one before it, and what the earlier layers keep.
    """
    stays = kept_between(model, r, model.num_layers - 1)
    later = (acts.forward + acts.outliving, flat.forward, stays)
    if not flat.start:
        return later
    embedded = r.tokens * model.hidden * element_bytes(r.dtype)
    last = embedded + acts.outliving + acts.kept * (model.num_layers - 1) // model.num_layers
    moments = [later, (embedded, flat.start, Term("weights", 0))]
    if model.num_layers > 1:
        moments.append((last, 2 * flat.forward, stays))
    return max(moments, key=lambda moment: moment[0] + moment[1] + moment[2].bytes)


ROLLOUT_LEAVES = frozenset({"weights", "adapters", "optimizer"})
SCORE_LEAVES = frozenset({"optimizer"})
"""Terms that wait on the host in that phase, where the recipe offloads them between phases."""


def _resting(r: Resolved, fixed: tuple[Term, ...], leaves: frozenset[str]) -> tuple[Term, ...]:
    """Return the standing terms of a phase without those that wait on the host until the update."""
    if not r.switches.offloads_between_phases:
        return fixed
    away = set(leaves)
    if not r.optimizer_offload:
        away.discard("optimizer")
    if not r.offload.parameters:
        away -= {"weights", "adapters"}
    return tuple(term for term in fixed if term.name not in away)


def _rollout(
    model: ModelSpec,
    r: Resolved,
    running: EngineCosts,
    fixed: tuple[Term, ...],
    whole: Term,
    flat: Buffers,
) -> Phase:
    """Return the rollout; the training model generates through its own units, gathered for every token."""
    if r.engine in (EngineKind.NONE, EngineKind.VLLM_SERVER):
        return _phase("rollout", *fixed)
    generating = (running.kv, running.work, rolling(model, r))
    if r.engine is not EngineKind.TRANSFORMERS:
        return _phase("rollout", *fixed, *generating)
    whole = gathered_to_generate(model, r, whole)
    begins = _phase("rollout", *fixed, whole, term(r, flat.start, "the root's and a layer's"))
    goes_on = term(r, flat.forward, "the running layer's")
    goes = _phase("rollout", *fixed, whole, goes_on, *generating)
    moments = [goes, begins]
    if (
        flat.start and model.num_layers > 1
    ):  # a layer is copied out, the one before it is there still
        both = term(r, 2 * flat.forward, "two layers'")
        moments.append(_phase("rollout", *fixed, whole, both, running.kv, running.work))
    return max(moments, key=lambda phase: phase.total_bytes)


def _serve(model: ModelSpec, r: Resolved, machine: Machine, base: Term, space: Term) -> Budget:
    if r.engine in VLLM:
        base = vllm_weights_term(model, r)
    elif r.tensor_parallel > 1:
        base = _share(base, r.tensor_parallel)
    base, away = _offloaded_weights(base, r)
    running = engine_costs(model, r, machine, base.bytes + space.bytes)
    phases = (
        _phase("load", base),
        _phase("rollout", base, running.kv, running.work, generating(model, r), space),
    )
    return Budget(phases, away, running.problem, running.serving)


def _offloaded_weights(base: Term, r: Resolved) -> tuple[Term, tuple[Term, ...]]:
    """Return the weights on the GPU, and the part that vLLM's offloader keeps in host memory."""
    moved = min(r.engine_offload_bytes, base.bytes)
    if not moved:
        return base, ()
    source = (
        "vllm model_executor/offloader: layers' parameters in pinned host memory, up to the budget"
    )
    rest = Term(
        base.name,
        base.bytes - moved,
        "{0:,} B - {1:,} B in host memory",
        (base.bytes, moved),
        source,
    )
    held = moved * r.tensor_parallel * r.pipeline_parallel
    return rest, (Term("weights", held, "{0:,} B of each GPU's", (moved,), source),)


def _share(term: Term, ranks: int) -> Term:
    """Return one rank's part of a term that tensor parallelism splits."""
    part = -(-term.bytes // ranks)
    return Term(term.name, part, "{0:,} B / {1} ranks", (term.bytes, ranks), term.source)
