"""What a GRPO step says about itself: its metrics, its line, its completions."""

from typing import Any

from torch import Tensor

from trainer import metrics as report
from trainer.parallel.ranks import ALONE, Ranks
from trainer.rewards import Scores
from trainer.rollout import Rollout
from trainer.session import Session


def rollout_metrics(rollout: Rollout, scores: Scores, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Return what a rollout and its rewards say, over all ranks."""
    finished = [completion.finished for completion in rollout.completions]
    every = ranks.gather_objects((rollout.lengths, finished, scores))
    lengths = [length for own, _, _ in every for length in own]
    logged: dict[str, Any] = report.length_metrics(
        lengths, [ended for _, own, _ in every for ended in own]
    )
    names = scores.by_reward
    logged |= report.reward_metrics(
        {name: [value for *_, own in every for value in own.by_reward[name]] for name in names},
        {name: max(own.seconds[name] for *_, own in every) for name in names},
    )
    failures = [failure for *_, own in every for failure in own.failures]
    if failures:
        logged["reward_failures"] = len(failures)
        first = failures[0]
        where = "the whole step" if first.index is None else f"completion {first.index}"
        logged["reward_failure"] = f"{first.reward} on {where}: {first.error}"
    told = dict.fromkeys(name for *_, own in every for name in own.metrics)
    said = {name: [own.metrics[name] for *_, own in every if name in own.metrics] for name in told}
    return logged | {name: sum(values) / len(values) for name, values in said.items()}


def step_line(logged: dict[str, Any]) -> str:
    """Return the step's figures for the progress line."""
    parts = [f"reward {logged['reward']:.3f}", f"length {logged['completions/mean_length']:.1f}"]
    if "entropy" in logged:
        parts += [f"entropy {logged['entropy']:.2f}", f"grad {logged['grad_norm']:.2f}"]
    if logged.get("nothing_to_learn"):
        parts.append("all rewards of every group are equal: nothing to learn")
    if "reward_failure" in logged:
        parts.append(f"{logged['reward_failures']} reward failures: {logged['reward_failure']}")
    return "  ".join([*parts, f"{logged['seconds']:.1f} s"])


def show_completions(
    session: Session, step: int, rollout: Rollout, scores: Scores, advantages: Tensor, rows: int
) -> None:
    """Write the completions of all ranks to Parquet, and show the first `rows` on a terminal."""
    own: dict[str, list[Any]] = {
        "prompt": [prompt.text for prompt in rollout.prompts],
        "completion": rollout.texts,
        **{f"reward {name}": list(values) for name, values in scores.by_reward.items()},
        **scores.extra,
        "reward": scores.totals,
        "advantage": advantages.tolist(),
    }
    every = session.ranks.gather_objects(own)
    if not session.ranks.first:
        return
    columns = {
        name: [value for part in every for value in part.get(name, [None] * len(part["reward"]))]
        for name in dict.fromkeys(name for part in every for name in part)
    }
    report.save_completions(session.output, step, columns)
    if session.reports is not None:
        session.reports.completions(step, columns)
    if session.progress.console.is_terminal:
        session.progress.say(report.completions_table(columns, rows=rows))
