"""`vramwise train --dry-run`: everything of a run that can be checked without its weights.

It is planned for the machine that the file names, or for this one where it names none. Data on this machine is
looked through, with the model's tokenizer where that is here too; nothing is fetched, nothing is written.
"""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.answers.width import widened
from planner.errors import UsageError
from planner.machines.machine import Machine
from planner.models.hub import find_model
from planner.plan import Plan
from planner.run.lora_fields import with_start
from planner.run.parallel import layout_of
from planner.run.recipe import Recipe, RunFile, Task
from planner.run.runfile import machine_of
from planner.run.train_bytes import with_train
from planner.units import format_bytes
from trainer.config import TrainSection, with_epochs
from trainer.data import check_columns, load_samples
from trainer.devices import this_machine
from trainer.engines.vllm_graphs import with_graphs
from trainer.evaluation_phase import check_evaluation_fits, evaluation_phase
from trainer.fields import unread_notes
from trainer.foreign import Given, read_given
from trainer.model import load_tokenizer
from trainer.parallel.agree import check_world
from trainer.parallel.ranks import Ranks
from trainer.parallel.sharding import refuse_over_ranks
from trainer.preflight import (
    choose_layout,
    longest_prompt,
    settled,
    solve,
)
from trainer.prompt_data import read_prompts
from trainer.rewards import check_reward_columns, load_rewards
from trainer.run_folder import check_output
from trainer.say import Say, silent
from trainer.schedule import check_steps
from trainer.sft import make_order
from trainer.sft_data import Examples
from trainer.step_size import step_prompts
from trainer.validation import load_validation, read_held_out, read_run_examples


def check_run(
    path: Path,
    *,
    say: Say = silent,
    budget: str | None = None,
    price: str | None = None,
    ranks: int | None = None,
) -> dict[str, Any]:
    """Return the plan of the run at `path`; raises VramwiseError for what would stop it.

    `ranks`: it will be started on; None: as many as the file's machine has GPUs.
    """
    given = _over(read_given(path), ranks)
    for line in given.lines:
        say(line)
    examples = None
    if budget is not None:
        from trainer.fit import fit

        given, promised = fit(given, budget, price=price, say=say, gpus=given.run.machine.gpus)
        examples = promised.examples
    run, train = given.run, given.train
    check_output(train, resume=False)
    recipe, planned = _planned(run, train, say)
    for note in unread_notes(run.recipe, planned.resolved):
        say(note)
    rows, held_out = _data(given, say, examples)
    if rows is not None and train.epochs is not None:
        per_step = step_prompts(recipe, train, run.machine.gpus)
        train = with_epochs(train, per_epoch=rows, per_step=per_step)
    if train.epochs is None:
        check_steps(train)
    phases = list(planned.phases)
    if train.validation is not None:
        check_evaluation_fits(planned, prompts=held_out or 1)
        phases.append(evaluation_phase(planned, prompts=held_out or 1))
    for phase in phases:
        say(f"{phase.name:<10}{format_bytes(phase.total_bytes):>14}")
    return {
        "schema_version": 1,
        "model": run.model,
        "task": str(recipe.task),
        "steps": train.steps if train.epochs is None else None,
        "rows": rows,
        "machine": planned.machine.label,
        "verdict": planned.verdict,
        "peak": f"{format_bytes(planned.peak_bytes)} in {planned.peak_phase}",
        "peak_bytes": planned.peak_bytes,
        "capacity_bytes": planned.capacity_bytes,
        "phases": [{"name": p.name, "total_bytes": p.total_bytes} for p in phases],
        "recipe": recipe.model_dump(mode="json", exclude_unset=True),
        "imported": [vars_of(difference) for difference in given.differences],
    }


def _over(given: Given, ranks: int | None) -> Given:
    """Return the run on so many ranks; raises UsageError where its file says another number of GPUs."""
    if ranks is None:
        return given
    check_world(given.run, Ranks(size=ranks))
    machine = given.run.machine.model_copy(update={"gpus": ranks})
    return replace(given, run=given.run.model_copy(update={"machine": machine}))


def vars_of(difference: Any) -> dict[str, str]:
    """Return what became of a foreign field, as JSON."""
    names = ("field", "value", "kind", "ours", "note")
    return {name: getattr(difference, name) for name in names}


def _planned(run: RunFile, train: TrainSection, say: Say) -> tuple[Recipe, Plan]:
    spec = find_model(run.model, revision=run.revision)
    started, _ = with_start(spec, with_train(run).recipe)
    ranks = run.machine.gpus
    refuse_over_ranks(started, layout_of(spec, started, ranks))
    wanted = settled(started, ranks)
    _, asked = choose_layout(spec, wanted, train)
    if asked:
        wanted = wanted.model_copy(update={"packing": True})
    machine = replace(_machine(run, train), num_gpus=ranks)
    recipe, planned = with_graphs(
        wanted, lambda each: solve(spec, each, machine, train, ranks=ranks), say=say
    )
    prompts = -(-step_prompts(recipe, train, ranks) // ranks)
    return widened(spec, recipe, planned, machine, prompts=prompts, say=say)


def _machine(run: RunFile, train: TrainSection) -> Machine:
    if train.device_memory or not (run.machine.gpu or run.machine.vram):
        return this_machine(run, train)
    return machine_of(run.machine)


def _data(given: Given, say: Say, examples: Examples | None) -> tuple[int | None, int]:
    """Return (rows, held-out rows) of data that is here; None where it is not looked at.

    `examples`: of SFT, where they have been read.
    """
    run, train, root = given.run, given.train, given.root
    grpo = run.recipe.task is Task.GRPO
    with closing(load_rewards(train.rewards, root=root)):
        pass  # their names, options and files
    if not _here(train.dataset.name, root):
        say(f"data: {train.dataset.name} is on the hub, and was not looked at")
        return None, 0
    samples = load_samples(train.dataset, root=root)
    check_columns(samples, train.dataset, task=str(run.recipe.task))
    if grpo:
        check_reward_columns(train.rewards, list(samples[0]))
    if train.validation is not None and not _here(train.validation.name, root):
        say(f"validation: {train.validation.name} is on the hub, and was not looked at")
        train = train.model_copy(update={"validation": None})
    held_out = load_validation(train, samples, root=root, task=run.recipe.task)
    if not Path(run.model).is_dir():
        say(f"data: {len(samples):,} rows; the tokenizer is on the hub: lengths were not looked at")
        return len(samples), len(held_out or ())
    tokenizer = load_tokenizer(run.model, revision=run.revision)
    if grpo:
        limit = longest_prompt(run)
        prompts = read_prompts(
            samples, tokenizer, train.dataset, limit=limit, rewards=train.rewards
        )
        say(f"data: {prompts.summary()}")
        return len(samples), len(held_out or ())
    examples = examples or read_run_examples(samples, run, train, tokenizer)
    say(f"data: {examples.summary()}")
    _, per_epoch = make_order(examples, run, train)
    held = None if held_out is None else read_held_out(held_out, run, train, tokenizer)
    return per_epoch, len(held or ())


def _here(name: str, root: Path) -> bool:
    if name == "arithmetic" or name.startswith("reasoning-gym/"):
        return True
    path = Path(name).expanduser()
    path = path if path.is_absolute() else root / path
    if path.suffix in (".jsonl", ".json", ".csv", ".parquet") and not path.exists():
        raise UsageError(f"train.dataset: no such file: {path}")
    return path.exists()
