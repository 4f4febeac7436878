"""`vramwise eval`: a checkpoint, a run's output or any model on a task or a file of samples."""

import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner.errors import UsageError
from planner.models.hub import find_model
from planner.run.lora_fields import with_start
from planner.run.recipe import EngineKind, EngineSection, LoraSection, Method, Recipe, RunFile, Task
from planner.run.runfile import validate
from trainer import checkpoint as checkpoints
from trainer.batching import Layout
from trainer.config import (
    DatasetSection,
    EvaluationSection,
    RewardSection,
    SamplingSection,
    TrainSection,
    read_run,
)
from trainer.data import Samples, check_columns, load_samples, tokenize_prompt
from trainer.engines import make_engine
from trainer.engines.vllm_settings import settle_engine
from trainer.evaluation import check_evaluation, measure_loss, measure_rewards
from trainer.metrics import finite
from trainer.model import Policy, load_policy
from trainer.preflight import settled
from trainer.rewards import Rewards, check_reward_columns, load_rewards
from trainer.rollout import Rollout, sampling_settings
from trainer.say import Say, silent
from trainer.sft_data import read_examples

SCHEMA_VERSION = 1
REWARDS_OF_TASKS = {"arithmetic": "exact", "gsm8k": "numeric"}
TEST_SPLIT = {"gsm8k": "test"}
ROWS = 64
"""Sequences at once where nothing says how many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSettings:
    """What to evaluate on, and how. None = as the run did, or the usual."""

    task: str | None = None
    data: Path | None = None
    split: str | None = None
    limit: int | None = None
    rewards: tuple[str, ...] = ()
    pass_at: float | None = None
    generations: int | None = None
    k: tuple[int, ...] = ()
    temperature: float | None = None
    """0 = greedy."""
    top_p: float | None = None
    top_k: int | None = None
    engine: str | None = None
    dtype: str | None = None
    base: str | None = None
    prompt_length: int | None = None
    completion_length: int | None = None
    rows: int | None = None
    """Sequences at once."""
    seed: int = 0
    completions: Path | None = None
    """Write prompts and completions here, as JSON lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A model to evaluate, and the run that made it if there is one."""

    model: str
    revision: str | None
    adapter: Path | None
    recipe: Recipe
    train: TrainSection | None
    root: Path
    """Relative paths of the run's data and rewards count from here."""


def evaluate(checkpoint: str, settings: EvalSettings, *, say: Say = silent) -> dict[str, Any]:
    """Return the JSON document of `vramwise eval`. Raises VramwiseError."""
    started = time.perf_counter()
    source = find_source(checkpoint, base=settings.base, dtype=settings.dtype)
    section, root = _dataset(source, settings)
    samples = load_samples(section, root=root)
    with closing(_rewards(source, settings)) as rewards:
        return _evaluate(source, settings, samples, section, rewards, started, say)


def _evaluate(
    source: Source,
    settings: EvalSettings,
    samples: Samples,
    section: DatasetSection,
    rewards: Rewards,
    started: float,
    say: Say,
) -> dict[str, Any]:
    # text with its answer, and nothing to judge a completion by: the loss on it
    on_text = not rewards
    check_columns(samples, section, task="sft" if on_text else "grpo")
    measure = _loss if on_text else _completions
    figures, recipe = measure(source, settings, samples, section, rewards, say)
    return {
        "schema_version": SCHEMA_VERSION,
        "checkpoint": str(source.adapter or source.model),
        "model": source.model,
        "data": samples.source,
        "engine": "none" if on_text else str(recipe.engine.kind or EngineKind.TRANSFORMERS),
        "rewards": [reward.name for reward in rewards],
        "figures": {name: finite(value) for name, value in figures.items()},
        "seconds": round(time.perf_counter() - started, 1),
    }


def find_source(checkpoint: str, *, base: str | None, dtype: str | None) -> Source:
    """Return what lies at `checkpoint`: a run's output, one checkpoint, a model folder or a hub id."""
    folder = Path(checkpoint).expanduser()
    if (folder / checkpoints.FOLDER).is_dir():
        folder = checkpoints.latest(folder).path
    adapter_file, own = folder / "adapter_config.json", folder / "config.json"
    if folder.is_dir() and not (adapter_file.exists() or own.exists()):
        raise UsageError(
            f"checkpoint: {folder} holds neither a model nor adapters",
            hint="a run's output folder, one of its checkpoints, a model's folder, or a hub id",
        )
    run, train = _run_of(folder)
    recipe = run.recipe if run else Recipe(method=Method.FULL)
    if adapter_file.exists():
        config = json.loads(adapter_file.read_text(encoding="utf-8"))
        model = base or (run.model if run else config.get("base_model_name_or_path"))
        if not model:
            raise UsageError(f"{folder} doesn't say its base model", hint="give --base")
        recipe = run.recipe if run else Recipe(method=Method.LORA)
        # as the adapter says itself: a run may have begun otherwise than its checkpoint is
        lora = LoraSection(start_from=str(folder), dtype=recipe.lora.dtype)
        recipe = recipe.model_copy(update={"lora": lora, "beta": 0.0})
        spec = find_model(str(model), revision=run.revision if run else None)
        recipe, _ = with_start(spec, recipe)
    else:
        model = str(folder) if folder.is_dir() else checkpoint
        recipe = recipe.model_copy(update={"method": Method.FULL})
    if dtype is not None:
        recipe = recipe.model_copy(update={"dtype": dtype})
    adapter = folder if adapter_file.exists() else None
    revision = run.revision if run and adapter else None
    root = _root_of(folder, run)
    return Source(
        model=str(model),
        revision=revision,
        adapter=adapter,
        recipe=recipe,
        train=train,
        root=root,
    )


def _run_of(folder: Path) -> tuple[RunFile | None, TrainSection | None]:
    """Return the run that made a checkpoint: OUTPUT/run.yaml two folders up."""
    path = folder.parent.parent / checkpoints.RUN_FILE
    return read_run(path) if folder.is_dir() and path.exists() else (None, None)


def _root_of(folder: Path, run: RunFile | None) -> Path:
    """Return where a run's relative paths count from: OUTPUT less its own relative path, or here."""
    if run is not None:
        output, own = folder.parent.parent.resolve(), Path(run.train["output"])
        if not own.is_absolute() and output.parts[-len(own.parts) :] == own.parts:
            return Path(*output.parts[: -len(own.parts)])
    return Path.cwd()


def _dataset(source: Source, settings: EvalSettings) -> tuple[DatasetSection, Path]:
    """Return the samples to evaluate on: asked for, or the run's validation set."""
    if settings.task is not None and settings.data is not None:
        raise UsageError("--task and --data: give one of them")
    name = settings.task or (str(settings.data.resolve()) if settings.data else None)
    if name is None:
        if source.train is None or source.train.validation is None:
            raise UsageError(
                "nothing to evaluate on",
                hint="--task gsm8k, --data FILE, or a run with train.validation",
            )
        section = source.train.validation
    else:
        # columns and chat settings of the run: its model was taught to be asked that way
        like = source.train.dataset if source.train else DatasetSection(name=name)
        split = settings.split or TEST_SPLIT.get(name, "train")
        changes: dict[str, Any] = {
            "name": name,
            "split": split,
            "config": None,
            "options": {},
            "limit": None,
        }
        if source.train is not None and like.name == name:
            changes["options"] = like.options
        section = like.model_copy(update=changes)
    if settings.limit is not None:
        section = section.model_copy(update={"limit": settings.limit})
    return section, source.root


def _rewards(source: Source, settings: EvalSettings) -> Rewards:
    sections: Sequence[RewardSection] = [RewardSection(name=name) for name in settings.rewards]
    if not sections and settings.task is not None:
        name = settings.task.partition("/")[0]
        judge = REWARDS_OF_TASKS.get(name, "reasoning-gym" if name == "reasoning-gym" else None)
        sections = [RewardSection(name=judge)] if judge else ()
    if not sections and source.train is not None:
        sections = source.train.rewards
    return load_rewards(sections, root=source.root)


def _completions(
    source: Source,
    settings: EvalSettings,
    samples: Samples,
    section: DatasetSection,
    rewards: Rewards,
    say: Say,
) -> tuple[dict[str, float], Recipe]:
    """Sample completions, judge them; return (figures, the recipe they were made by)."""
    own = source.train.evaluation if source.train else EvaluationSection()
    generations = settings.generations or own.generations
    judged = own.model_copy(
        update={
            "generations": generations,
            "k": settings.k or tuple(k for k in own.k if k <= generations),
            "pass_at": own.pass_at if settings.pass_at is None else settings.pass_at,
            "pass_reward": None if settings.rewards or settings.task else own.pass_reward,
        }
    )
    if wrong := [k for k in judged.k if k > generations]:
        raise UsageError(f"--k: pass@{wrong[0]} needs {wrong[0]} generations, not {generations}")
    check_evaluation(judged, rewards)
    names = [reward.name for reward in rewards]
    check_reward_columns([RewardSection(name=name) for name in names], list(samples[0]))
    recipe = _recipe(source, settings, generations)
    policy = _policy(source, recipe)
    drawn = _sampling(source, settings)
    with closing(make_engine(policy, recipe=recipe, guided=drawn.guided)) as engine:
        engine.release()
        if source.adapter is not None:
            checkpoints.read_weights(policy, source.adapter)
        sampling = sampling_settings(
            drawn,
            policy.tokenizer,
            num_generations=generations,
            max_new_tokens=recipe.completion_length or 0,
        )
        limit = recipe.prompt_length or 0
        prompts = [
            tokenize_prompt(samples[row], policy.tokenizer, section, limit=limit)
            for row in range(len(samples))
        ]
        say(f"{len(prompts):,} prompts x {generations} completions")
        engine.resume()
        engine.update_weights()
        measured = measure_rewards(
            engine,
            prompts,
            replace(sampling, seed=settings.seed),
            tokenizer=policy.tokenizer,
            rewards=rewards,
            section=judged,
        )
    if settings.completions is not None:
        _write(settings.completions, measured.rollout, measured.scores)
    return measured.figures, recipe


def _loss(
    source: Source,
    settings: EvalSettings,
    samples: Samples,
    section: DatasetSection,
    rewards: Rewards,
    say: Say,
) -> tuple[dict[str, float], Recipe]:
    """Return (loss and perplexity of the samples' own text, the recipe)."""
    for name in ("generations", "k", "temperature", "engine", "completions", "pass_at"):
        if getattr(settings, name):
            raise UsageError(
                f"--{name.replace('_', '-')}: without a reward the loss on the data is evaluated, "
                "not completions",
                hint="--reward exact, or FILE.py:FUNCTION",
            )
    recipe = _recipe(source, settings, 1)
    policy = _policy(source, recipe.model_copy(update={"engine": EngineSection()}))
    if source.adapter is not None:
        checkpoints.read_weights(policy, source.adapter)
    limit = source.recipe.context or (recipe.prompt_length or 0) + (recipe.completion_length or 0)
    loss_on = source.train.loss_on if source.train else "completion"
    examples = read_examples(samples, policy.tokenizer, section, limit=limit, loss_on=loss_on)
    say(examples.summary())
    figures = measure_loss(
        policy,
        [examples[index] for index in range(len(examples))],
        budget_tokens=limit * (recipe.micro_batch_size or 1),
        layout=Layout.SORTED,
        chunk_rows=recipe.loss_chunk_rows,
    )
    return figures, recipe


def _recipe(source: Source, settings: EvalSettings, generations: int) -> Recipe:
    """Return the run's recipe with the engine, lengths and sizes of this evaluation."""
    recipe = source.recipe
    engine = recipe.engine
    if settings.engine is not None:
        try:
            engine = engine.model_copy(update={"kind": EngineKind(settings.engine)})
        except ValueError:
            kinds = ", ".join(kind for kind in EngineKind)
            raise UsageError(f"--engine: {settings.engine!r}", hint=f"one of {kinds}") from None
    rows = settings.rows or (engine.max_num_seqs or max(recipe.micro_batch_size or 0, ROWS))
    changed = recipe.model_copy(
        update={
            "task": Task.GRPO,
            "num_generations": generations,
            "micro_batch_size": rows,
            "context": None,
            "prompt_length": settings.prompt_length or recipe.prompt_length or 1024,
            "completion_length": settings.completion_length or recipe.completion_length or 1024,
            "engine": engine.model_copy(update={"max_num_seqs": rows}),
        }
    )
    return settle_engine(settled(changed))


def _policy(source: Source, recipe: Recipe) -> Policy:
    policy = load_policy(source.model, recipe=recipe, revision=source.revision)
    policy.model.requires_grad_(False)
    return policy


def _sampling(source: Source, settings: EvalSettings) -> SamplingSection:
    """Return the run's sampling, or what was asked for; temperature 0 is the likeliest token."""
    train = source.train
    own = (train.evaluation.sampling or train.sampling) if train else SamplingSection()
    changes: dict[str, Any] = {
        name: value for name in ("top_p", "top_k") if (value := getattr(settings, name)) is not None
    }
    if settings.temperature == 0:
        changes |= {"temperature": 1.0, "top_k": 1}
    elif settings.temperature is not None:
        changes["temperature"] = settings.temperature
    return validate(SamplingSection, {**own.model_dump(), **changes}, label="sampling")


def _write(path: Path, rollout: Rollout | None, scores: Any) -> None:
    assert rollout is not None
    lines = []
    for index, text in enumerate(rollout.texts):
        judged = {name: values[index] for name, values in scores.by_reward.items()}
        lines.append(
            json.dumps({"prompt": rollout.prompts[index].text, "completion": text, **judged})
        )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
