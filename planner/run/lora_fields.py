"""The adapters of a recipe: what was asked for, or what an adapter that exists already has."""

from typing import Any

from planner.dtypes import normal_dtype
from planner.errors import UsageError
from planner.models.adapter_file import AdapterFile, read_adapter
from planner.models.lora_targets import lora_counts
from planner.models.spec import ModelSpec
from planner.run.recipe import LoraSection, Method, Recipe, Reference, Task
from planner.run.switches import Switches


def with_start(model: ModelSpec, recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Return the recipe with the rank, targets ... of the adapter that it starts from, and what to say.

    Raises UsageError where the recipe says otherwise than the adapter.
    """
    lora = recipe.lora
    if lora.start_from is None or recipe.method is Method.FULL or recipe.task is Task.SERVE:
        return recipe, []
    found = read_adapter(lora.start_from)
    has: dict[str, Any] = {
        "rank": found.rank,
        "targets": "all-linear" if found.targets == ("all-linear",) else found.targets,
        "target_parameters": found.target_parameters,
        "modules_to_save": found.modules_to_save,
        "dora": found.dora,
        "use_rslora": found.use_rslora,
        "bias": found.bias,
    }
    for name, value in has.items():
        said = getattr(lora, name)
        if name in lora.model_fields_set and said != value and not _same(model, name, said, value):
            raise _conflict(name, said, value, found)
    if lora.init != "default":
        raise UsageError(
            f"lora.init: {lora.init} has no effect: the adapter in {found.where} is there already",
            hint="leave it out, or leave out lora.from",
        )
    notes = [_other_base(model, found)] if found.base else []
    return recipe.model_copy(update={"lora": lora.model_copy(update=has)}), list(
        filter(None, notes)
    )


def _same(model: ModelSpec, name: str, said: Any, value: Any) -> bool:
    """Say whether two spellings of names mean the same modules."""
    if name != "targets":
        return isinstance(said, tuple) and isinstance(value, tuple) and set(said) == set(value)
    ours, theirs = (lora_counts(model, targets, rank=1) for targets in (said, value))
    return ours.adapted == theirs.adapted


def _conflict(name: str, said: Any, value: Any, found: AdapterFile) -> UsageError:
    shown = ", ".join(value) if isinstance(value, tuple) else value
    asked = ", ".join(said) if isinstance(said, tuple) else said
    return UsageError(
        f"lora.{name}: {asked}, but the adapter in {found.where} has {shown or 'none'}",
        hint="leave it out: what the adapter has holds",
    )


def _other_base(model: ModelSpec, found: AdapterFile) -> str:
    name = found.base.rstrip("/").rsplit("/", 1)[-1].lower()
    known = {model.name.rsplit("/", 1)[-1].lower(), model.hub_id.rsplit("/", 1)[-1].lower()}
    if name in known:
        return ""
    return f"lora.from: the adapter says it was made for {found.base}; this run's model is {model.name}"


def lora_fields(
    recipe: Recipe, switches: Switches, quantization: str, dtype: str, reference: Reference
) -> dict[str, Any]:
    """Return Resolved's fields about adapters."""
    lora = recipe.lora
    usual = switches.adapter_dtype_quantized if quantization else switches.adapter_dtype
    adapter = lora.dtype or usual
    return {
        # "weights": adapters in the dtype of the base (our own trainer)
        "adapter_dtype": normal_dtype(
            dtype if adapter == "weights" else adapter, field="lora.dtype"
        ),
        "lora_rank": lora.rank,
        "lora_targets": lora.targets,
        "target_parameters": lora.target_parameters,
        "modules_to_save": lora.modules_to_save,
        "lora_bias": lora.bias,
        "lora_init": lora.init,
        "keeps_start": reference is Reference.ADAPTER_OFF
        and recipe.method is not Method.FULL
        and _differs_at_start(lora, switches),
        "started": lora.start_from is not None,
        "dora": lora.dora,
        "lora_dropout": lora.dropout,
    }


def _differs_at_start(lora: LoraSection, switches: Switches) -> bool:
    """Say whether the policy without its adapters is not what it was when the run began."""
    if lora.start_from is not None:
        return True
    return switches.ties_saved_modules and (lora.init.startswith("pissa") or lora.bias != "none")
