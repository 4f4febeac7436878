"""The `train:` section of run.yaml: what a run learns from, how it steps and where it writes."""

import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from planner.errors import UsageError
from planner.run.engine_choices import four_bit_refusal
from planner.run.recipe import (
    Method,
    Recipe,
    RunFile,
    Section,
    Task,
)
from planner.run.runfile import read_yaml, validate
from trainer.fields import loss_type, refuse_unhonoured
from trainer.reporters import REPORTERS, check_reporter
from trainer.schedule import Decay, Schedule, check_schedule, check_steps

Positive = Annotated[float, Field(gt=0)]
Steps = Annotated[int, Field(ge=1, le=10**9, strict=True)]


EPSILON = 0.2
GSPO_EPSILON, GSPO_EPSILON_HIGH = 3e-4, 4e-4


class DatasetSection(Section):
    """Where samples come from and which columns hold what."""

    name: str
    """A built-in task (arithmetic, gsm8k), reasoning-gym/TASK, a file or folder, or a hub id."""
    split: str = "train"
    config: str | None = None
    """Configuration of a hub data set."""
    prompt_column: str = "prompt"
    completion_column: str = "completion"
    messages_column: str = "messages"
    text_column: str = "text"
    tools_column: str | None = "tools"
    """What the model may call: a list of JSON schemas, or JSON that holds one."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Given to the chat template, such as {enable_thinking: false}; a row's own column goes before it."""
    chat: bool = False
    """Wrap string prompts into a user message, so that the chat template applies."""
    system_prompt: str | None = None
    limit: Steps | None = None
    shuffle: bool = True
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of a built-in task or a reasoning-gym task."""


class RewardSection(Section):
    """One reward function."""

    name: str
    """A built-in (exact, numeric, format, length) or FILE.py:FUNCTION, which runs that file's code."""
    weight: float = 1.0
    options: dict[str, Any] = Field(default_factory=dict)
    per_sample: bool = False
    """Your own function judges each completion by itself: it is asked about one at a time, and one that
    fails costs only itself. Built-in functions are always."""
    timeout_s: Positive | None = None
    """Of one call, after which its process is killed; None = 10 a completion, 300 where a call is on all."""


class SamplingSection(Section):
    """How completions are drawn.

    The policy that is trained is the model at this temperature, top_k, top_p and min_p: the scorer uses
    the same values. Penalties and grammars are the sampler's alone, and what they change is corrected by
    importance weights (loss.is_correction).
    """

    temperature: Positive = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, strict=True)] = 0
    stop: tuple[str, ...] = ()
    """Text that ends a completion, as EOS does, over however many tokens it lies; it is kept."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Tokens less probable than this share of the most probable one are dropped."""
    repetition_penalty: Positive = 1.0
    """Above 1: tokens of the prompt and the completion become less probable."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Taken off the logit of every token that the completion has."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """The same, for each time it has it."""
    guided_regex: Annotated[str, Field(min_length=1)] | None = None
    """vLLM: completions match this regular expression."""
    guided_json: dict[str, Any] | None = None
    """vLLM: completions are JSON of this schema; a mapping, or its JSON."""

    @property
    def guided(self) -> bool:
        """Whether a grammar says what may come next."""
        return self.guided_regex is not None or self.guided_json is not None

    @property
    def off_policy(self) -> bool:
        """Whether completions come from another distribution than the one that is trained."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return self.guided or penalties != (1.0, 0.0, 0.0)

    @field_validator("guided_json", mode="before")
    @classmethod
    def _schema_from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"a JSON schema ({error})") from None

    @field_validator("guided_regex")
    @classmethod
    def _is_a_regex(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"a regular expression ({error})") from None
        return value


class LossSection(Section):
    """Policy loss. The KL weight is `recipe.beta`: it moves memory."""

    type: Literal["grpo", "dr_grpo", "bnpo", "dapo", "cispo", "gspo"] = "dapo"
    epsilon: Positive | None = None
    """Clip below 1 - epsilon; None = 0.2, gspo: 3e-4 (its ratio is a mean over the whole sequence)."""
    epsilon_high: Positive | None = None
    """Clip above 1 + epsilon_high; None = epsilon, gspo: 4e-4 where epsilon isn't given either."""
    delta: Positive | None = None
    scale_rewards: Literal["group", "batch", "none"] = "group"
    mask_truncated: bool = False
    """Completions cut at the length limit get no gradient."""
    is_correction: Literal["none", "token", "sequence"] = "token"
    """Weight by pi_scorer / pi_sampler; a no-op where the policy itself samples."""
    is_mode: Literal["truncate", "mask"] = "truncate"
    is_cap: Positive = 3.0
    kl: Literal["k3", "k3-ratio", "full-reverse", "forward"] = "k3"
    detach: bool = True
    """False reruns the seed's experiment: no gradient reaches the policy where old is new."""

    @property
    def clip(self) -> tuple[float, float | None]:
        """(epsilon, epsilon_high) with their defaults; gspo's are those of arXiv 2507.18071, section 5.1."""
        if self.epsilon is not None:
            return self.epsilon, self.epsilon_high
        if self.type == "gspo":
            return GSPO_EPSILON, self.epsilon_high or GSPO_EPSILON_HIGH
        return EPSILON, self.epsilon_high


class EvaluationSection(Section):
    """How held-out samples are judged, and what follows from it."""

    generations: Steps = 1
    """GRPO: completions of a held-out prompt."""
    k: tuple[Steps, ...] = ()
    """GRPO: the k of pass@k, each at most `generations`; none = 1 and `generations`."""
    pass_reward: str | None = None
    """GRPO: the reward that says whether a completion passes; None = the first."""
    pass_at: float = 1.0
    """GRPO: a completion passes from this reward on."""
    sampling: SamplingSection | None = None
    """GRPO: None = as in training; top_k: 1 is greedy."""
    on_start: bool = False
    """Before the first step too."""
    metric: str | None = None
    """What best means; None = reward (GRPO) or loss (SFT). loss and perplexity: smaller is better."""
    save_best: bool = False
    """Keep the weights of the best evaluation in OUTPUT/checkpoints/best."""
    patience: Steps | None = None
    """Stop after this many evaluations in a row without a gain; None = never."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """What counts as a gain is above this."""


class PushSection(Section):
    """Where on the hub the model goes. Tokens are not for files: HF_TOKEN, or --token."""

    repo: str
    """USER/NAME, or NAME under the token's own user; made if it is not there."""
    private: bool | None = None
    """Of a repository that is made; None = as the user or organisation has it."""
    strategy: Literal["end", "every_save"] = "end"
    merged: bool = False
    """The whole model, adapters folded in, instead of the adapters."""

    @field_validator("repo")
    @classmethod
    def _repo_id(cls, value: str) -> str:
        if not re.fullmatch(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]{0,95}", value):
            raise ValueError("USER/NAME, of letters, digits, -, _ and .")
        return value


class TrainSection(Section):
    """Everything about a run that moves no byte."""

    output: str
    overwrite: bool = False
    dataset: DatasetSection
    validation: DatasetSection | None = None
    """Held-out samples: a name or a section like dataset; none of them may be trained on."""
    eval_every: Annotated[int, Field(ge=0, strict=True)] = 100
    """Steps between evaluations; 0 = only at the end."""
    evaluation: EvaluationSection = EvaluationSection()
    rewards: tuple[RewardSection, ...] = ()
    steps: Steps = 100
    epochs: Positive | None = None
    """Passes over the data set, instead of steps."""
    lr: Positive = 1e-5
    lora_alpha: Positive | None = None
    """None = twice the rank: adapters act at a scale of 2."""
    warmup_steps: Annotated[int, Field(ge=0, strict=True)] = 0
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of the steps, instead of warmup_steps."""
    schedule: Schedule = Schedule.CONSTANT
    min_lr: Annotated[float, Field(ge=0)] | None = None
    """Where linear, cosine and wsd end; None = 0."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """The same as a share of lr."""
    decay_steps: Steps | None = None
    """wsd: the last steps, over which the rate decays."""
    decay_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """wsd: the same as a share of the steps; None = 0.1."""
    decay_type: Decay = Decay.COSINE
    """wsd: linear, cosine or 1-sqrt."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    adam_betas: tuple[float, float] = (0.9, 0.99)
    adam_eps: Positive = 1e-8
    max_grad_norm: Positive = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**31, strict=True)] = 0

    prompts_per_step: Steps | None = None
    """GRPO: None = micro_batch_size * gradient_accumulation / num_generations."""
    updates_per_rollout: Steps = 1
    """GRPO: optimizer steps on one rollout (mini-batches); more than one scores old log-probs first."""
    num_iterations: Steps = 1
    """GRPO: passes over one rollout."""
    sampling: SamplingSection = SamplingSection()
    loss: LossSection = LossSection()
    loss_on: Literal["completion", "last", "all"] = "completion"
    """SFT: every turn of the assistant (or the completion), its last turn alone, or every token."""
    padding_free: bool | None = None
    """Samples end to end, nothing padded; None = where attention is flash and the model allows it."""
    neftune_alpha: Positive | None = None
    """SFT: noise on the embeddings (5 to 15 are usual)."""
    router_aux_loss_coef: Annotated[float, Field(ge=0)] | None = None
    """SFT: weight of the loss that balances a mixture's experts; None = the model's own, 0 = none."""
    share_prefix: bool | None = None
    """GRPO: run a group's prompt once instead of G times; None = where the model allows it."""
    micro_batch_tokens: Steps | None = None
    """Tokens of one forward and backward; None = solved from the plan."""

    save_every: Annotated[int, Field(ge=0, strict=True)] = 100
    """0 = only at the end and on SIGTERM."""
    keep_checkpoints: Steps = 2
    max_bad_steps: Steps = 5
    """Stop (state saved) after this many steps in a row with a NaN reward or loss."""
    push_to_hub: PushSection | None = None
    """A repository's name, or a section of repo, private, strategy (end, every_save), merged."""
    callbacks: tuple[str, ...] = ()
    """FILE.py:NAME of your own objects (or classes), called after steps, evaluations and checkpoints."""
    report_to: tuple[str, ...] = ()
    """Trackers: mlflow, tensorboard, trackio, wandb; a name or a list."""
    project: str | None = None
    """Of the trackers (MLflow: the experiment); None = the tool's own variable, or vramwise."""
    run_name: str | None = None
    """Of the trackers; None = the output folder's name."""
    tensorboard: bool = False
    """As tensorboard in report_to."""
    print_completions: Annotated[int, Field(ge=0, strict=True)] = 2
    preflight: bool = True
    device_memory: str | None = None
    """Pretend the device has only this much, for example 24GiB."""

    @field_validator("dataset", "validation", mode="before")
    @classmethod
    def _dataset_by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("report_to", mode="before")
    @classmethod
    def _trackers_by_name(cls, value: Any) -> Any:
        if isinstance(value, str):
            return () if value == "none" else (value,)
        return () if value is None else value

    @field_validator("push_to_hub", mode="before")
    @classmethod
    def _repo_by_name(cls, value: Any) -> Any:
        return {"repo": value} if isinstance(value, str) else value

    @field_validator("callbacks", mode="before")
    @classmethod
    def _one_callback(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @property
    def trackers(self) -> tuple[str, ...]:
        """The trackers to report to, each once."""
        named = (*self.report_to, "tensorboard") if self.tensorboard else self.report_to
        return tuple(dict.fromkeys(named))

    @field_validator("rewards", mode="before")
    @classmethod
    def _rewards_by_name(cls, value: Any) -> Any:
        if isinstance(value, str | dict):
            value = [value]
        if not isinstance(value, list | tuple):
            return value
        return tuple({"name": item} if isinstance(item, str) else item for item in value)


def read_run(path: Path, *, root: Path | None = None) -> tuple[RunFile, TrainSection]:
    """Return the validated run file at `path` and its train section.

    Relative paths of datasets, reward files and output count from the run file's folder.
    Raises UsageError with the field, its value and what is allowed.
    """
    return parse_run(read_yaml(path), root=root or path.parent)


def parse_run(document: dict[str, Any], *, root: Path) -> tuple[RunFile, TrainSection]:
    """Validate a run document; see `read_run`."""
    run = validate(RunFile, document)
    if not run.train:
        raise UsageError("run.yaml has no train: section", hint="give at least output and dataset")
    train = validate(TrainSection, run.train, label="train")
    kind = loss_type(run.recipe, train.loss.type, said="type" in train.loss.model_fields_set)
    if kind != train.loss.type:
        train = train.model_copy(update={"loss": train.loss.model_copy(update={"type": kind})})
    _check_together(run, train)
    output = root / Path(train.output).expanduser()
    start = run.recipe.lora.start_from
    if start is not None and (root / start).is_dir():
        # counted from the run file's folder, like its other paths; the output's copy has it in full
        lora = run.recipe.lora.model_copy(update={"start_from": str((root / start).resolve())})
        run = run.model_copy(update={"recipe": run.recipe.model_copy(update={"lora": lora})})
    return run, train.model_copy(update={"output": str(output)})


def guides(train: TrainSection) -> bool:
    """Say whether a grammar is used in training or evaluation."""
    own = train.evaluation.sampling
    return train.sampling.guided or (own is not None and own.guided)


def refuse_four_bit(recipe: Recipe) -> None:
    """Raise UsageError for QLoRA through an engine that would serve the base as it was before."""
    refused = four_bit_refusal(recipe.engine.kind, recipe.method)
    if refused:
        raise UsageError(
            refused,
            hint="engine kind transformers (the 4-bit policy itself generates), or method: lora",
        )


def with_epochs(train: TrainSection, *, per_epoch: int, per_step: int) -> TrainSection:
    """Return the section with the steps that its epochs are; `per_epoch` prompts, samples or rows."""
    if train.epochs is None:
        return train
    steps = max(1, math.ceil(train.epochs * per_epoch / per_step))
    train = train.model_copy(update={"steps": steps, "epochs": None})
    check_steps(train)
    return train


def _check_evaluation(run: RunFile, train: TrainSection) -> None:
    """Refuse evaluation settings that nothing reads."""
    given = train.evaluation.model_fields_set
    if train.validation is None:
        for name in ("evaluation", "eval_every"):
            if name in train.model_fields_set:
                raise UsageError(
                    f"train.{name}: there is nothing to evaluate on", hint="name train.validation"
                )
        return
    sampled = ("generations", "k", "pass_reward", "pass_at", "sampling")
    unread = sorted(given & set(sampled)) if run.recipe.task is Task.SFT else []
    if unread:
        raise UsageError(
            f"train.evaluation.{unread[0]}: SFT evaluates the loss, not completions",
            hint="vramwise eval OUTPUT --task NAME samples from a checkpoint",
        )
    wrong = [k for k in train.evaluation.k if k > train.evaluation.generations]
    if wrong:
        raise UsageError(
            f"train.evaluation.k: pass@{wrong[0]} needs {wrong[0]} generations",
            hint=f"generations is {train.evaluation.generations}",
        )


def _check_reports(train: TrainSection) -> None:
    """Refuse trackers that there are none of, and names that nothing would be called by."""
    for name in train.report_to:
        check_reporter(name)
    for name in ("project", "run_name"):
        if name in train.model_fields_set and not train.trackers:
            raise UsageError(
                f"train.{name}: {getattr(train, name)!r} has no effect without train.report_to",
                hint=f"name one of {', '.join(REPORTERS)}",
            )


def _check_push(recipe: Recipe, train: TrainSection) -> None:
    """Refuse to merge what is whole, or at every checkpoint."""
    if train.push_to_hub is None or not train.push_to_hub.merged:
        return
    if recipe.method is Method.FULL:
        raise UsageError(
            "train.push_to_hub.merged: true has no effect with method full", hint="leave it out"
        )
    if train.push_to_hub.strategy == "every_save":
        raise UsageError(
            "train.push_to_hub.merged: true with strategy every_save would merge at every checkpoint",
            hint="strategy: end",
        )


def _check_together(run: RunFile, train: TrainSection) -> None:
    """Refuse choices that contradict each other, before any long work."""
    recipe = run.recipe
    _check_reports(train)
    _check_push(recipe, train)
    if recipe.task not in (Task.GRPO, Task.SFT):
        raise UsageError(f"recipe.task: {recipe.task} cannot be trained", hint="grpo or sft")
    if recipe.method is Method.QLORA and recipe.quantization not in (None, "nf4", "fp4"):
        raise UsageError(
            f"recipe.quantization: {recipe.quantization!r} cannot be trained", hint="nf4 or fp4"
        )
    if recipe.task is Task.GRPO:
        refuse_four_bit(recipe)
    check_schedule(train)
    if train.epochs is None:
        check_steps(train)
    elif "steps" in train.model_fields_set:
        raise UsageError(
            f"train.epochs: {train.epochs:g} and steps: {train.steps} contradict each other",
            hint="give one of them",
        )
    _check_evaluation(run, train)
    if not all(0 <= beta < 1 for beta in train.adam_betas):
        raise UsageError(f"train.adam_betas: {train.adam_betas} is not allowed", hint="in [0, 1)")
    if recipe.task is Task.GRPO:
        if not train.rewards:
            raise UsageError("train.rewards: missing", hint="for example rewards: [exact]")
        if (recipe.num_generations or 8) < 2 and train.loss.scale_rewards == "group":
            raise UsageError(
                f"recipe.num_generations: {recipe.num_generations} leaves nothing to compare with",
                hint="2 or more (8 is usual)",
            )
    refuse_unhonoured(run, train)
    if train.loss.kl != "k3" and not recipe.beta:
        raise UsageError(f"train.loss.kl: {train.loss.kl} has no effect with recipe.beta 0")
