"""`vramwise init`: a run.yaml for a task, a model and a card, with settings that fit and every field explained.

The planner chooses: the longest lengths first, at each the method that changes least (LoRA before QLoRA),
then the largest micro-batch. What was tried stands in the file with its planned peak.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.answers.width import widened
from planner.errors import DoesNotFitError, UsageError, VramwiseError
from planner.machines.machine import Machine, make_machine
from planner.models.hub import find_model
from planner.models.spec import ModelSpec
from planner.plan import Plan, plan
from planner.run.recipe import MachineSection, Recipe, RunFile
from planner.run.runfile import validate
from planner.units import format_bytes
from trainer.init_words import COMMENTED, MEANING, allowed

TASKS = ("sft", "grpo")
METHODS = ("lora", "qlora")
CONTEXTS = (2048, 1024, 512)
"""SFT: longest sample."""
LENGTHS = ((512, 1536), (512, 512), (256, 256))
"""GRPO: longest prompt and completion."""
SAMPLES = 16
"""SFT: samples of a step."""
GENERATIONS, PROMPTS = 8, 8
"""GRPO: completions of a prompt, prompts of a step."""
BATCHES = (16, 8, 4, 2, 1)
WAVES = (64, 32, 16, 8)
"""Sequences that the policy itself generates at once."""
DATA = {"sft": "trl-lib/Capybara", "grpo": "gsm8k"}
WIDTH = 46
"""Column that comments begin at."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Settings that were planned on the way, and what became of them."""

    label: str
    peak_bytes: int
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Start:
    """A run file that fits its card."""

    run: RunFile
    plan: Plan
    tried: list[Tried] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "schema_version": 1,
            "run": self.run.model_dump(mode="json", exclude_unset=True),
            "peak_bytes": self.plan.peak_bytes,
            "peak_phase": self.plan.peak_phase,
            "capacity_bytes": self.plan.capacity_bytes,
            "verdict": self.plan.verdict,
            "tried": [vars(row) for row in self.tried],
            "fields": [{"field": n, "meaning": MEANING[n], "allowed": allowed(n)} for n in MEANING],
        }


def start(
    task: str, model: str, section: MachineSection, *, methods: tuple[str, ...] = METHODS
) -> Start:
    """Return the first settings that fit; raises DoesNotFitError with the least that was tried."""
    if task not in TASKS:
        raise UsageError(f"task: {task[:40]!r} cannot be trained", hint=", ".join(TASKS))
    unknown = [name for name in methods if name not in ("full", *METHODS)]
    if unknown:
        raise UsageError(f"method: {unknown[0][:40]!r} is not allowed", hint="full, lora or qlora")
    spec = find_model(model)
    machine = make_machine(section.gpu, vram=section.vram, host_ram=section.host_ram)
    tried: list[Tried] = []
    least: Plan | None = None
    # before Ampere there is no bf16
    dtype = "bf16" if machine.gpu is None or machine.gpu.bf16_native else "fp16"
    for label, recipes in _candidates(task, methods, spec, dtype):
        try:
            smallest = plan(spec, recipes[-1], machine)
        except VramwiseError as error:
            tried.append(Tried(label=label, peak_bytes=0, verdict=error.message))
            continue
        tried.append(Tried(label=label, peak_bytes=smallest.peak_bytes, verdict=smallest.verdict))
        if least is None or smallest.peak_bytes < least.peak_bytes:
            least = smallest
        if smallest.fits:
            chosen, planned = _largest(spec, recipes, smallest, machine)
            chosen, planned = widened(spec, chosen, planned, machine, prompts=PROMPTS)
            name = spec.hub_id or model
            return Start(run=_run(task, name, chosen, section), plan=planned, tried=tried)
    if least is None:
        raise DoesNotFitError(f"init: nothing can be planned for {spec.name}: {tried[0].verdict}")
    raise DoesNotFitError(
        f"init: {spec.name} does not fit {machine.label} for {task}: the least that was tried "
        f"({tried[-1].label}) needs {format_bytes(least.peak_bytes)} of {format_bytes(least.capacity_bytes)}, "
        f"a risk of {least.risk.p_oom:.0%} of running out",
        hint=f"a smaller model or a larger card: vramwise recommend --task {task}",
    )


def _largest(
    spec: ModelSpec, recipes: list[Recipe], smallest: Plan, machine: Machine
) -> tuple[Recipe, Plan]:
    """Return the first of `recipes`, the largest ones first, that fits."""
    for recipe in recipes[:-1]:
        planned = plan(spec, recipe, machine)
        if planned.fits:
            return recipe, planned
    return recipes[-1], smallest


def _candidates(
    task: str, methods: tuple[str, ...], spec: ModelSpec, dtype: str
) -> Iterator[tuple[str, list[Recipe]]]:
    """Yield (what it is, recipes that differ in their batch alone, the largest first)."""
    if task == "sft":
        for context in _within(CONTEXTS, spec):
            for method in methods:
                yield f"{method}, {context:,} tokens", [
                    _recipe(
                        task=task, method=method, dtype=dtype, context=context,
                        micro_batch_size=size, gradient_accumulation=SAMPLES // size,
                    )
                    for size in BATCHES
                ]  # fmt: skip
        return
    for prompt, completion in LENGTHS:
        if prompt + completion > (spec.max_position or 1 << 30):
            continue
        for method in methods:
            engines = ("transformers",) if method == "qlora" else ("vllm-shared", "transformers")
            for engine in engines:
                yield f"{method}, {prompt:,} + {completion:,} tokens, {engine}", [
                    _recipe(
                        task=task, method=method, dtype=dtype, prompt_length=prompt,
                        completion_length=completion,
                        num_generations=GENERATIONS, micro_batch_size=size,
                        gradient_accumulation=PROMPTS * GENERATIONS // size,
                        engine={"kind": engine}
                        | ({"max_num_seqs": wave} if engine == "transformers" else {}),
                    )
                    for size, wave in zip(BATCHES[1:], WAVES, strict=True)
                ]  # fmt: skip


def _within(lengths: tuple[int, ...], spec: ModelSpec) -> list[int]:
    return [length for length in lengths if length <= (spec.max_position or 1 << 30)]


def _recipe(**fields: Any) -> Recipe:
    """Return a recipe with everything written down that the trainer would decide by itself."""
    adapters = fields["method"] != "full"
    # trainer.preflight.settled: half-precision adapters have exact copies in the optimizer
    master = adapters or fields["dtype"] == "fp16"
    own = {"master_weights": master, "tiled_mlp": True, "checkpointing": "offload"}
    if adapters:
        own["lora"] = {"rank": 16, "dtype": fields["dtype"]}
    return validate(Recipe, {**own, **fields})


def _run(task: str, model: str, recipe: Recipe, section: MachineSection) -> RunFile:
    train: dict[str, Any] = {"output": f"runs/{task}", "dataset": {"name": DATA[task]}}
    if task == "grpo":
        train["rewards"] = ["numeric"]
    train |= {"steps": 200, "lr": 1e-5 if task == "grpo" else 2e-4}
    return RunFile(model=model, recipe=recipe, machine=section, train=train)


def text(made: Start) -> str:
    """Return the run file with comments."""
    run, planned = made.run, made.plan
    recipe = run.recipe.model_dump(mode="json", exclude_unset=True)
    task = recipe["task"]
    lines = [
        f"# {task.upper()} of {run.model} on {planned.machine.label}, written by `vramwise init`.",
        f"# Planned peak: {format_bytes(planned.peak_bytes)} in {planned.peak_phase}, "
        f"{format_bytes(planned.capacity_bytes)} to be had. Tried, in this order:",
    ]
    for row in made.tried:
        size = format_bytes(row.peak_bytes) if row.peak_bytes else "not planned"
        last = f": this file, with the largest batch that fits ({format_bytes(planned.peak_bytes)})"
        lines.append(
            f"#   {row.label}: {size}, {row.verdict}{last if row is made.tried[-1] else ''}"
        )
    lines += [
        "# Check it with `vramwise plan FILE` and `vramwise train FILE --dry-run`; run it with `vramwise train FILE`.",
        "# A line that begins with # is a field as it is unless you say otherwise, or an example.",
        "schema_version: 1",
        *_lines({"model": run.model}, "", ""),
        "recipe:",
        *_lines(recipe, "recipe.", "  "),
        *_examples("recipe", task, recipe, "  "),
        "machine:",
        *_lines(run.machine.model_dump(mode="json", exclude_unset=True), "machine.", "  "),
        "train:",
        *_lines(run.train, "train.", "  "),
        *_examples("train", task, run.train, "  "),
    ]
    return "\n".join(lines) + "\n"


def _lines(values: dict[str, Any], prefix: str, indent: str) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield _with_comment(f"{indent}{name}:", prefix + name)
            yield from _lines(value, f"{prefix}{name}.", indent + "  ")
        else:
            yield _with_comment(f"{indent}{name}: {_plain(value)}", prefix + name)


def _examples(section: str, task: str, said: dict[str, Any], indent: str) -> Iterator[str]:
    """Yield the fields that the file does not set, commented out."""
    for name, value in COMMENTED[task][section].items():
        if name not in said:
            yield _with_comment(f"{indent}# {name}: {_plain(value)}", f"{section}.{name}")


def _with_comment(line: str, name: str) -> str:
    values = allowed(name)
    said = "; ".join(filter(None, (MEANING[name], values)))
    return f"{line:<{WIDTH}}  # {said}"


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value if value.replace("/", "").replace("-", "").replace(".", "").replace("_", "").isalnum() else json.dumps(value)  # fmt: skip
    if isinstance(value, float):
        return f"{value:.6f}".rstrip("0") + ("0" if value == int(value) else "")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_plain(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_plain(item) for item in value) + "]"
    return json.dumps(value)


def write(made: Start, out: Path) -> None:
    """Write the file; raises UsageError where one is there."""
    if out.exists():
        raise UsageError(
            f"out: {out} exists; nothing is overwritten", hint="name another file with --out"
        )
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text(made))
    except OSError as error:
        raise UsageError(f"out: cannot write {out}: {error.strerror}") from None
