"""What only a server's command line has: `--max-model-len` in vLLM's words, and `auto`."""

from typing import TYPE_CHECKING, Any

from planner.errors import UsageError

if TYPE_CHECKING:
    from planner.machines.machine import Machine
    from planner.models.spec import ModelSpec
    from planner.run.recipe import RunFile

AUTO = ("auto", "-1")
"""vLLM's words for the longest that starts."""


def put_length(recipe: dict[str, Any], flags: dict[str, Any], *, serves: bool) -> None:
    """Write --max-model-len into a recipe's fields; prompt and completion stay what a request has."""
    text = flags.get("max_model_len")
    if text is None:
        return
    if not serves:
        raise UsageError(
            f"max-model-len: {text} has no meaning without --task serve", hint="--context has"
        )
    if flags.get("context") is not None:
        raise UsageError(
            f"max-model-len: {text} beside context {flags['context']}", hint="one of them"
        )
    if text.strip().lower() in AUTO:
        recipe.pop("context", None)
    else:
        recipe["context"] = _tokens(text)


def _tokens(text: str) -> int:
    from planner.importers.settings import as_int

    tokens = as_int(text.strip())
    if tokens is None or tokens < 1:
        raise UsageError(
            f"max-model-len: cannot read {text[:40]!r}",
            hint="a number of tokens as vLLM reads it: 8192, 8k (8,000), 8K (8,192), or auto",
        )
    return tokens


def with_auto_length(
    run: "RunFile", model: "ModelSpec", machine: "Machine", flags: dict[str, Any]
) -> "RunFile":
    """Return the run with the longest length that starts, where --max-model-len auto asks for it."""
    from planner.answers.serving import longest_length

    text = flags.get("max_model_len")
    if text is None or text.strip().lower() not in AUTO:
        return run
    tokens = longest_length(model, run.recipe, machine)
    if not tokens:  # nothing starts: the plan of the usual length says why
        return run
    return run.model_copy(update={"recipe": run.recipe.model_copy(update={"context": tokens})})
