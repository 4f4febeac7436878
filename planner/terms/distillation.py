"""What distillation holds beside the student's head: the teacher's rows and tile, or its top log-probabilities."""

from planner.dtypes import element_bytes
from planner.models.spec import ModelSpec
from planner.run.recipe import Task, TeacherPlacement
from planner.run.resolved import Resolved
from planner.terms.term import Term

TOKEN_ID, LOG_PROBABILITY = 8, 4
"""int64 and fp32: what a served teacher sends for each of its top tokens."""
TOP_COPIES = 3
"""fp32 [rows, k] of a loss on top tokens: the student's gathered, the divergence, its gradient."""


def beside_student(model: ModelSpec, r: Resolved, rows: int, tile: int) -> Term:
    """Return what stands beside the student's head; `tile`: elements of one tile of its logits."""
    teacher = r.companion("teacher")
    if r.task is not Task.DISTILL or teacher is None or r.law.kind == "full":
        return Term("logits", 0)
    if teacher.placement is TeacherPlacement.SERVED:
        top = min(r.teacher_top_k, model.vocab)
        each = TOKEN_ID + LOG_PROBABILITY * (1 + TOP_COPIES)
        return Term(
            "logits",
            rows * top * each,
            "teacher's top {0:,} of {1:,} rows x {2} B (ids, log-probabilities, the loss on them)",
            (top, rows, each),
            "vLLM prompt_logprobs; the rest of the distribution is not sent",
        )
    width = element_bytes(r.compute_dtype)
    kept = rows * teacher.spec.hidden * width
    return Term(
        "logits",
        kept + 4 * tile,
        "teacher: {0:,} rows x {1:,} hidden x {2} B + its fp32 tile {3:,} B",
        (rows, teacher.spec.hidden, width, 4 * tile),
        "trl kernels/chunked_divergence.py: teacher_hidden, t_buf",
    )
