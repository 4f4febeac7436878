"""Fine-tuning rows: one plan a run, and which of its figures the row is."""

import re
from dataclasses import replace
from typing import NamedTuple

from planner.accuracy.inference_rows import generation_run
from planner.accuracy.lengths import typical_tokens
from planner.accuracy.names import loaded_model, machine_named, model_named
from planner.accuracy.notebooks import Notebook, data_set, notebook_of, step_lengths
from planner.accuracy.parallel_columns import titan_layout
from planner.accuracy.prediction import NotARun, NotCovered, Prediction, around
from planner.accuracy.rows import Row
from planner.accuracy.sft_recipe import recipe_of
from planner.accuracy.stages import is_split, stage_models
from planner.accuracy.variants import litgpt_model
from planner.machines.machine import Machine
from planner.models.spec import ModelSpec
from planner.plan import Plan, plan
from planner.risk import EVEN, TAIL
from planner.run.recipe import Recipe, Sharding, Task

OF_TENSORS = frozenset({"peak_allocated", "peak_active"})
"""Figures that a card's size does not move."""
PHASES = ("load", "forward", "loss", "backward", "step")


class Run(NamedTuple):
    """What a row describes, known before the run."""

    row: Row
    quantity: str
    model: ModelSpec
    recipe: Recipe
    machine: Machine

    def at(self, context: int) -> "Run":
        """Return the run with samples of another length."""
        return self._replace(recipe=self.recipe.model_copy(update={"context": max(1, context)}))


def predict_sft(row: Row) -> Prediction:
    """Return what the plan of the row's run says about the row's figure."""
    if row["per_gpu_or_total"].startswith("total"):
        raise NotCovered("the figure is a sum over GPUs")
    if row["method"] in {"none", "load"}:
        return _loaded(row)
    if "inference" in row["method"]:
        return _generated(row)
    run = run_of(row)
    if row["seq_len"] and row.integer("seq_len") is None:
        raise NotCovered(f"the sequence length {row['seq_len'][:20]!r} is not a number")
    notebook = notebook_of(row)
    if notebook is not None:
        return _notebook(run, notebook)
    if not row["seq_len"] and not run.quantity.startswith("static"):
        raise NotCovered("the row does not state the sequence length")
    if "max_seq_length is a cap" in row["notes"]:
        return _capped(run)
    return _answer(run)


def _loaded(row: Row) -> Prediction:
    """Return the figure of a process that only holds a CUDA context or a loaded model."""
    quantity, machine = row.quantity.lower(), machine_named(row["gpu"])
    dtype = "bf16" if "16" in row["weights_dtype"] else "fp32"
    model = loaded_model(row["model"] or "smollm2-135m")  # a bare context needs some model to plan
    result = plan(model, Recipe(task=Task.SERVE, dtype=dtype, framework="hf-trainer"), machine)
    weights, context = load_bytes(result), machine.context_bytes
    if quantity.startswith("cuda_context"):
        return around("cuda_context", context, 0.5, 3, result)
    if quantity.startswith("nvidia_smi_used after"):
        total = weights + context
        return Prediction("nvidia_smi_used_loaded", total, weights, total + 2 * context, result)
    if quantity.startswith("allocated after load"):
        return _static("static_load_allocated", weights, result)
    raise NotCovered(f"the figure {row.quantity[:50]!r} is not one that the planner states")


def _generated(row: Row) -> Prediction:
    """Return the peak of generating one sequence, of the largest part where layers are split."""
    if "peak_allocated" not in row.quantity:
        raise NotCovered(f"the figure {row.quantity[:50]!r} is not one that the planner states")
    models, recipe, machine = generation_run(row)
    results = [plan(model, recipe, machine) for model in models]
    largest = max(results, key=lambda result: result.peak_bytes)
    return figure("peak_allocated", largest)


def run_of(row: Row) -> Run:
    """Return the run of a fine-tuning row; raises NotCovered with the reason."""
    notebook = notebook_of(row)
    if notebook and notebook.not_a_run:
        raise NotARun(f"copied outputs: {notebook.not_a_run}")
    model = model_named(notebook.model if notebook else row["model"])
    if "litgpt" in row["framework"].lower():
        model = litgpt_model(model)
    if is_split(row):
        model = stage_models(row, model)[-1]  # the last one has the head
    recipe = divide_tokens(row, recipe_of(row, model))
    quantity = canonical(row.quantity)
    machine = machine_named(row["gpu"], gpus_of(row, recipe), any_memory=quantity in OF_TENSORS)
    return Run(row, quantity, model, recipe, machine)


def _answer(run: Run) -> Prediction:
    result = plan(run.model, run.recipe, run.machine)
    _refuse_impossible(run.row, result)
    if run.quantity == "peak_reserved":
        mixed = _mixed(run, result)
        if mixed is not None:
            return mixed
    return figure(run.quantity, result)


def _mixed(run: Run, result: Plan) -> Prediction | None:
    """Return what is reserved after a typical sample, then the longest; None: all are as long.

    The order of the lengths is not stated, and by it the pool differs by half (docs/accuracy.md).
    """
    r = result.resolved
    typical = typical_tokens(run.row, r.sequences, r.seq_tokens)
    if typical is None:
        return None
    value = result.reserved_over((typical, r.seq_tokens)).on_card
    interval = result.interval("reserved", value)
    return Prediction("peak_reserved_unstated", value, *interval, result)


def _notebook(run: Run, notebook: Notebook) -> Prediction:
    """Return the figure of a notebook's run, whose samples have the lengths of its data set."""
    if run.quantity.startswith("static"):
        result = plan(run.model, run.recipe, run.machine)
        loaded = _static(run.quantity, result.reserved_over().loaded, result)
        # of the run itself only the longest length allowed is known
        return replace(loaded, judged=bool(notebook.context))
    if notebook.context:
        return _answer(run)
    data = data_set(notebook.data)
    cap, batch = run.recipe.context or 0, run.recipe.micro_batch_size or 1
    if data is None:
        raise NotCovered("the cell states a cap, and no length of its data set's samples is known")
    samples = batch * (run.recipe.gradient_accumulation or 1) * notebook.steps
    drawn = [step_lengths(data, cap, batch, samples, chance) for chance in (TAIL, EVEN, 1 - TAIL)]
    found = []
    for lengths in drawn:
        longest = run.at(max(lengths))
        result = plan(longest.model, longest.recipe, longest.machine)
        found.append((result, result.reserved_over(lengths).on_card))
    (_, low), (middle, value), (_, high) = found
    least, most = middle.interval("reserved", 1)
    return Prediction(run.quantity, value, low * least, high * most, middle)


def _capped(run: Run) -> Prediction:
    """Return the figure of a run whose samples are at most as long as the stated cap."""
    if run.quantity == "reserved_mean_over_steps":
        raise NotCovered("a mean over steps depends on lengths that the row does not state")
    most, half = _answer(run), _answer(run.at((run.recipe.context or 2) // 2))
    return Prediction(run.quantity, most.value, half.value, most.high, most.plan)


def _refuse_impossible(row: Row, result: Plan) -> None:
    """Refuse a run that cannot have happened: weights, gradients and states exceed its card."""
    static = static_bytes(result) + sum(
        term.bytes for term in result.phase("step").terms if term.name == "gradients"
    )
    if not row.failed and row["gpu"] and static > result.machine.vram_bytes:
        raise NotCovered(
            "weights and optimizer states as the row describes them exceed the card it ran on"
        )


def gpus_of(row: Row, recipe: Recipe) -> int:
    """Return the GPUs the training state is divided over."""
    return 1 if recipe.sharding is Sharding.NONE else row.integer("n_gpus") or 1


def divide_tokens(row: Row, recipe: Recipe) -> Recipe:
    """Return the recipe of one rank: tensor (with sequence) and context parallel ranks share tokens."""
    ranks = 1
    for degree in re.findall(r"\b(?:TP|CP) (\d+)", row["parallelism"]):
        ranks *= int(degree)
    if ranks == 1 or recipe.context is None or titan_layout(row):  # whose layout says so itself
        return recipe
    return recipe.model_copy(update={"context": max(1, recipe.context // ranks)})


def canonical(quantity: str) -> str:
    """Return the canonical name of a fine-tuning figure; raises NotCovered for unknown kinds."""
    text = re.sub(r"\s+", "_", quantity.lower())
    for pattern, name in (
        (r"^allocated_stage", "static_allocated"),
        (r"^peak_allocated_model_init|^allocated_after_load", "static_load_allocated"),
        (r"^peak_reserved_model_init|^reserved_before", "static_load_reserved"),
        (rf"^peak_allocated_({'|'.join(PHASES)})$", "phase_allocated"),
        (r"^peak_allocated(_\(.*)?$", "peak_allocated"),
        (r"^peak_active", "peak_active"),
        (r"^peak_reserved(_\(.*)?$", "peak_reserved"),
        (r"^reserved_max_over_training", "reserved_max_over_training"),
        (r"^reserved_mean", "reserved_mean_over_steps"),
        (r"^nvidia_smi_used_peak", "nvidia_smi_used_peak"),
    ):
        found = re.search(pattern, text)
        if found:
            return f"{name}_{found[1]}" if name == "phase_allocated" else name
    raise NotCovered(f"the figure {quantity[:50]!r} is not one that the planner states")


def figure(quantity: str, result: Plan) -> Prediction:
    """Return one figure of a plan with its interval."""
    allocated = result.allocated_peak_bytes
    if quantity in {"peak_allocated", "peak_active"}:
        return Prediction(quantity, allocated, *result.interval("allocated", allocated), result)
    if quantity.startswith("phase_allocated_"):
        phase = result.phase(quantity.removeprefix("phase_allocated_"))
        interval = result.interval("allocated", phase.total_bytes)
        return Prediction(quantity, phase.total_bytes, *interval, result)
    if quantity == "static_allocated":
        return _static(quantity, static_bytes(result), result)
    if quantity.startswith("static_load"):
        return _static(quantity, load_bytes(result), result)
    if quantity == "nvidia_smi_used_peak":
        used = result.device_used_bytes
        return Prediction(quantity, used, *result.interval("device", used), result)
    value = result.reserved_peak_bytes
    return Prediction(quantity, value, *result.interval("reserved", value), result)


def _static(quantity: str, value: int, result: Plan) -> Prediction:
    return Prediction(quantity, value, *result.interval("static", value), result)


def static_bytes(result: Plan) -> int:
    """Return what stays between two steps: weights, adapters, states; FSDP1 keeps gradients."""
    kept = load_bytes(result) + sum(
        term.bytes for term in result.phase("forward").terms if term.name == "optimizer"
    )
    r = result.resolved
    if r.sharding is Sharding.FSDP and r.gpus > 1 and not r.quantization:
        kept += max(
            (term.bytes for term in result.phase("step").terms if term.name == "gradients"),
            default=0,
        )
    return kept


def load_bytes(result: Plan) -> int:
    """Return what is there before the first step: weights and adapters."""
    terms = result.phase("load").terms
    return sum(term.bytes for term in terms if term.name in {"weights", "adapters"})
