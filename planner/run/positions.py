"""A context above what the model was made for: said, and refused where the software refuses it."""

from math import ceil

from planner.errors import UsageError
from planner.models.spec import ModelSpec
from planner.run.recipe import VLLM, EngineKind


def context_notes(model: ModelSpec, tokens: int, engine: EngineKind) -> list[str]:
    """Return what to say of a sequence of `tokens`; raises UsageError where it cannot run.

    vLLM refuses a max_model_len above the derived one (config/model.py); a learned table of
    positions ends where it ends.
    """
    longest = model.longest
    if not longest or tokens <= longest:
        if engine in VLLM and tokens > model.max_position > 0 and model.yarn:
            return [
                f"vLLM from 0.32 on counts YaRN into max_position_embeddings and refuses more than "
                f"{model.max_position:,}: raise that field in the config.json too"
            ]
        return []
    if model.learned_positions:
        raise UsageError(
            f"context: {tokens:,} tokens, but {model.name or model.model_type} has a learned table "
            f"of {longest:,} positions",
            hint=f"at most {longest}",
        )
    factor = _factor(tokens / model.max_position)
    scaling = (
        f'{{"rope_type": "yarn", "factor": {factor:g}, '
        f'"original_max_position_embeddings": {model.max_position}}}'
    )
    if engine in VLLM:
        raise UsageError(
            f"context: {tokens:,} tokens are above the {longest:,} positions that "
            f"{model.name or model.model_type} was made for; vLLM refuses such a max_model_len",
            hint=f"at most {longest}, or a config.json with more max_position_embeddings and rope_scaling {scaling}",
        )
    return [
        f"the context of {tokens:,} tokens is above the {longest:,} positions the model was made "
        f"for; it needs rope_scaling {scaling}"
    ]


def _factor(ratio: float) -> float:
    """Return a scaling factor that reaches, rounded up to a half."""
    return ceil(2 * ratio) / 2
