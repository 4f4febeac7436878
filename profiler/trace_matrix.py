"""The analytic plan against the trace, family by family: every phase total and every large term.

A total may be off by 3 %, a term above 5 % of the peak by 5 %. Two decoder layers (four where the
pattern of layers needs them): the layer term is linear in the layers.
"""

from dataclasses import dataclass, replace
from itertools import product

from planner.families import model_spec_from_config
from planner.machines.machine import Machine
from planner.models.catalogue import load_catalogue
from planner.plan import plan
from planner.run.recipe import Attention, Checkpointing, Method, Optimizer, Recipe, Task
from planner.units import GiB
from profiler.compare import Cell, Comparison, compare

TOTAL_ERROR = 0.03
TERM_ERROR = 0.05
TERM_SHARE = 0.05
LAYERS = 2
FAMILIES = (
    "llama-3.2-1b",
    "qwen2.5-0.5b",
    "qwen3-0.6b",
    "mistral-7b-v0.1",
    "gemma-2b",
    "gemma-2-2b",
    "phi-3-mini-4k",
    "granite-3.0-2b",
    "olmo-2-1b",
    "glm-4-9b-0414",
    "smollm3-3b",
    "starcoder2-3b",
    "pythia-160m",
    "qwen3-30b-a3b",
    "olmoe-1b-7b",
)
METHODS = (Method.FULL, Method.LORA, Method.QLORA)
CHECKPOINTING = (Checkpointing.NONE, Checkpointing.FULL, Checkpointing.OFFLOAD)
SHAPES = ((2, 512), (1, 2048))
GROUPED_EXPERTS = ("qwen3-30b-a3b", "olmoe-1b-7b")
"""torch's grouped matmul takes bf16 only: k-bit preparation's fp32 stream cannot run through it."""


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the matrix."""

    family: str
    method: Method
    checkpointing: Checkpointing
    micro_batch: int
    length: int

    @property
    def label(self) -> str:
        """For a table: 'llama-3.2-1b lora full 2x512'."""
        return f"{self.family} {self.method} {self.checkpointing} {self.micro_batch}x{self.length}"


def cases(family: str, method: Method) -> list[Case]:
    """Return the cases of one family and method."""
    return [
        Case(family, method, checkpointing, *shape)
        for checkpointing, shape in product(CHECKPOINTING, SHAPES)
    ]


def run_case(case: Case) -> Comparison:
    """Return plan and trace of one case, side by side."""
    from profiler.subjects.build import shorten
    from profiler.subjects.from_recipe import step_options
    from profiler.subjects.hf_sft import HfSft
    from profiler.trace import trace

    config = shorten(load_catalogue()[case.family]["config"], LAYERS)
    model = model_spec_from_config(config, name=case.family, source="matrix")
    recipe = Recipe(
        task=Task.SFT,
        method=case.method,
        framework="hf-trainer",
        mixed_precision="bf16",
        checkpointing=case.checkpointing,
        attention=Attention.SDPA,
        optimizer=Optimizer.ADAMW,
        micro_batch_size=case.micro_batch,
        context=case.length,
    )
    planned = plan(model, recipe, Machine(vram_bytes=1024 * GiB))
    options = step_options(planned.resolved, config, steps=1)
    recording = trace(HfSft(replace(options, warm_optimizer=True)))
    return compare(planned, recording)


def disagreements(comparison: Comparison) -> list[Cell]:
    """Return the cells outside the tolerance."""
    peak = comparison.peak.measured_bytes or 1
    totals = (*comparison.totals, comparison.peak)
    wrong = [cell for cell in totals if _off(cell, TOTAL_ERROR, peak=0)]
    wrong.extend(cell for cell in comparison.cells if _off(cell, TERM_ERROR, peak=peak))
    # While a model loads, the plan puts the largest 16-bit weight on top of all that is quantised;
    # which one comes last is the checkpoint's order.
    return [cell for cell in wrong if cell.phase != "load"]


def worst(comparison: Comparison, *, terms: bool) -> float:
    """Return the largest error of the totals, or of the terms that count, as a fraction."""
    peak = comparison.peak.measured_bytes or 1
    cells = comparison.cells if terms else (*comparison.totals, comparison.peak)
    return max(
        (
            abs(cell.error)
            for cell in cells
            if cell.error is not None
            and cell.phase != "load"
            and max(cell.planned_bytes or 0, cell.measured_bytes or 0)
            > (TERM_SHARE * peak if terms else 0)
        ),
        default=0.0,
    )


def _off(cell: Cell, tolerance: float, *, peak: int) -> bool:
    if cell.planned_bytes is None or cell.measured_bytes is None:
        return False
    if max(cell.planned_bytes, cell.measured_bytes) <= TERM_SHARE * peak:
        return False
    return cell.error is None or abs(cell.error) > tolerance
