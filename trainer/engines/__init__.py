"""Generation engines: one factory, one constructor signature.

Every engine is built as `Engine(policy, recipe=recipe, plan=plan)`: `policy` is a trainer.model.Policy
(`.model`, `.base`, `.tokenizer`, `.source` = folder or hub id, `.revision`, `.dtype`, `.device`, `.method`),
`recipe` a planner.run.recipe.Recipe (lengths, num_generations, `.engine` settings), `plan` the planner's Plan
or None. Log-probabilities that an engine returns are after temperature, top-k and top-p.
"""

from typing import TYPE_CHECKING, Any

from planner.errors import UsageError
from planner.run.recipe import EngineKind, Recipe

if TYPE_CHECKING:
    from trainer.engines.protocol import Engine
    from trainer.model import Policy


def make_engine(
    policy: "Policy", *, recipe: Recipe, plan: Any = None, guided: bool = False
) -> "Engine":
    """Return the engine of `recipe.engine.kind`; transformers when it says none.

    `guided`: completions will follow a grammar, for which vLLM needs the tokenizer.
    """
    match recipe.engine.kind:
        case None | EngineKind.TRANSFORMERS:
            from trainer.engines.transformers import TransformersEngine

            return TransformersEngine(policy, recipe=recipe, plan=plan)
        case EngineKind.VLLM_SHARED:
            from trainer.engines.vllm_shared import VllmSharedEngine

            return VllmSharedEngine(policy, recipe=recipe, plan=plan, guided=guided)
        case EngineKind.VLLM_PUSH:
            from trainer.engines.vllm_push import VllmPushEngine

            return VllmPushEngine(policy, recipe=recipe, plan=plan, guided=guided)
        case EngineKind.VLLM_SERVER:
            from trainer.engines.vllm_server import VllmServerEngine

            return VllmServerEngine(policy, recipe=recipe, plan=plan)
    raise UsageError(
        f"recipe.engine.kind: {recipe.engine.kind} cannot generate",
        hint="transformers, vllm-shared, vllm-push or vllm-server",
    )
