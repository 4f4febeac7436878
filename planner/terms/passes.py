"""Passes without a graph beside the trained model's own: reference, teacher, critic's values, reward."""

from dataclasses import replace
from typing import NamedTuple

from planner.dtypes import element_bytes
from planner.models.spec import ModelSpec
from planner.run.recipe import Method, Reference, Task, TeacherPlacement
from planner.run.resolved import Resolved
from planner.run.tasks import PREFERENCE
from planner.terms.activations import Activations
from planner.terms.columns import micro_batch
from planner.terms.companions import as_companion, visiting
from planner.terms.logits import Logits
from planner.terms.term import Term


class Pass(NamedTuple):
    """One forward without a graph, and what it finds beside it."""

    name: str
    """Of its phase."""
    terms: tuple[Term, ...]
    before_training: bool = False
    """It runs before the optimizer has states."""


SOURCE = "one forward without a graph: planner/layer/blocks.py"


def passes(model: ModelSpec, r: Resolved, acts: Activations, head: Logits) -> list[Pass]:
    """Return the passes of one micro-batch, in their order."""
    found = []
    if r.task is Task.KTO:
        # of mismatched pairs, for the KL: kto_trainer.py _compute_kl_logps
        found.append(Pass("score", (_work(acts.no_grad, head.score, model, r, "the policy"),)))
    if r.cached:
        # GradCache: all texts without a graph first; their embeddings stay
        found.append(Pass("score", (_work(acts.no_grad, head.score, model, r, "mini-batch"),)))
    if r.reference is not Reference.NONE and r.task is not Task.GRPO:
        found.append(_reference(model, r, acts, head))
    if r.task is Task.PPO:
        found.extend(_judged(r))
    if r.task is Task.DISTILL:
        found.extend(_teacher(r, acts, head))
    return found


def _judged(r: Resolved) -> list[Pass]:
    """Return the largest pass of value and reward model over what was generated."""
    works = []
    for role in ("value", "reward"):
        companion = r.companion(role)
        if companion is not None:
            other = as_companion(r, companion)
            layer = micro_batch(companion.spec, other).no_grad
            works.append(
                _work(layer, Term("logits", 0), companion.spec, other, f"the {role} model")
            )
    largest = max(works, key=lambda work: work.bytes)
    return [Pass("reward", (largest,))]


def _teacher(r: Resolved, acts: Activations, head: Logits) -> list[Pass]:
    """Return the teacher's pass, unless it is served elsewhere."""
    teacher = r.companion("teacher")
    if teacher is None or teacher.placement is TeacherPlacement.SERVED:
        return []
    other = as_companion(r, teacher)
    # in chunks the loss projects the teacher's hidden states itself
    whole = r.law.kind == "full"
    scores = _teachers_logits(teacher.spec, other) if whole else Term("logits", 0)
    layer = micro_batch(teacher.spec, other).no_grad
    work = _work(layer, scores, teacher.spec, other, "the teacher")
    beside: tuple[Term, ...] = ()
    if _after_forward(r):
        beside = (_students(acts), head.held if whole else Term("logits", 0))
    return [Pass("teacher", (visiting(teacher, r), *beside, work))]


def _teachers_logits(spec: ModelSpec, r: Resolved) -> Term:
    """Return a teacher's logits as its head makes them, and their fp32 copy under autocast."""
    act = element_bytes(r.compute_dtype)
    each = act + (4 if r.autocast and r.switches.fp32_outputs else 0)
    text = "{0:,} rows x {1:,} vocabulary x {2} B"
    return Term(
        "logits", r.tokens * spec.vocab * each, text, (r.tokens, spec.vocab, each), r.law.source
    )


def _students(acts: Activations) -> Term:
    """Return what the student's forward left, its last hidden states among it."""
    size = acts.loss_forward
    text = "the student's graph and last hidden states, held meanwhile {0:,} B"
    source = "trl distillation_trainer.py _compute_loss: the student first"
    return Term("activations", size, text, (size,), source)


def _reference(model: ModelSpec, r: Resolved, acts: Activations, head: Logits) -> Pass:
    """Return the reference's pass; with its own copy in the host, that copy is on the GPU."""
    off = _plain(model, r)
    work = _work(off.no_grad, head.score, model, r, "the reference")
    beside = held_graph(r, acts, head) if _after_forward(r) else ()
    if r.reference is Reference.PRECOMPUTED:
        return Pass("reference", (work,), before_training=True)
    return Pass("reference", (visiting(r.companion("reference"), r), *beside, work))


def _plain(model: ModelSpec, r: Resolved) -> Activations:
    """Return the activations of the model without its adapters."""
    bare = replace(r, trains=False, method=Method.FULL, reference=Reference.NONE, companions=())
    return micro_batch(model, bare)


def _after_forward(r: Resolved) -> bool:
    """Return whether the pass comes after the policy's forward, whose graph waits meanwhile."""
    together = r.task in PREFERENCE or r.task is Task.DISTILL
    return together and not r.switches.reference_first


def held_graph(r: Resolved, acts: Activations, head: Logits) -> tuple[Term, Term]:
    """Return what the policy's forward and its head's leave for their backward."""
    size = acts.loss_copied if r.law.drops_hidden else acts.loss_backward
    kept = Term(
        "activations",
        size,
        "the policy's graph, held meanwhile {0:,} B",
        (size,),
        "trl dpo_trainer.py _compute_loss: model(...), then the reference under no_grad",
    )
    return kept, head.held


def _work(layer: int, scores: Term, model: ModelSpec, r: Resolved, who: str) -> Term:
    """Return the larger of two moments: a layer at work, or the head on the last hidden states."""
    hidden = 0 if r.law.drops_hidden else r.tokens * model.hidden * element_bytes(r.compute_dtype)
    if layer >= scores.bytes + hidden:
        text = f"{who}: one layer without a graph {{0:,}} B"
        return Term("activations", layer, text, (layer,), SOURCE)
    text = f"{who}: hidden states {{0:,}} B + {scores.formula}"
    return Term("logits", scores.bytes + hidden, text, (hidden,), scores.source)
