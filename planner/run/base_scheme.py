"""Which quantisation a run's base weights have: the recipe's, or the checkpoint's as its loader holds it."""

from planner.dtypes import QUANTIZATIONS
from planner.errors import UnsupportedError, UsageError
from planner.models.spec import ModelSpec
from planner.quant.reading import method_of
from planner.quant.table import canonical, is_published, scheme_table
from planner.quant.training import Held, Training
from planner.run.framework_files import Framework
from planner.run.recipe import Method, Recipe


def base_scheme(
    model: ModelSpec, recipe: Recipe, framework: Framework, *, trains: bool, notes: list[str]
) -> str:
    """Return the scheme of the base weights, "" for none; notes gain what is worth saying.

    Raises UnsupportedError for a quantisation that nothing trains, UsageError for contradictions.
    """
    published = canonical(model.checkpoint_quantization)
    asked = None if recipe.quantization is None else _known(recipe.quantization)
    if not trains:
        scheme = published if asked is None else asked
    elif asked is not None:
        scheme = _asked(model, recipe, framework, asked, notes)
    elif published:
        scheme = _of_checkpoint(model, recipe, framework, published, notes)
    else:
        scheme = "nf4" if recipe.method is Method.QLORA else ""
    if scheme:
        notes.extend(scheme_table(model, scheme).notes)
    return scheme


def _known(name: str) -> str:
    folded = QUANTIZATIONS.get(name or "none")
    if folded is None:
        raise UsageError(f"quantization: {name!r} is not known", hint=", ".join(QUANTIZATIONS))
    return folded


def _asked(
    model: ModelSpec, recipe: Recipe, framework: Framework, asked: str, notes: list[str]
) -> str:
    """Return a scheme that the recipe names."""
    if recipe.method is Method.FULL and asked:
        raise UnsupportedError(
            f"quantization: {recipe.quantization} weights cannot be trained in full",
            hint="use --method qlora, or leave quantization out",
        )
    if recipe.method is Method.QLORA and not asked:
        raise UsageError("quantization: qlora needs a quantised base", hint="leave it out for nf4")
    if asked and is_published(model, asked):
        return _of_checkpoint(model, recipe, framework, asked, notes)
    published = canonical(model.checkpoint_quantization)
    if asked and published and not _has_twin(model, framework):
        raise UsageError(
            f"quantization: {recipe.quantization} cannot be made of this checkpoint, whose weights "
            f"are {published} already",
            hint="leave quantization out, or give a 16-bit copy of the model",
        )
    return asked


def _has_twin(model: ModelSpec, framework: Framework) -> bool:
    """Say whether a name can mean a 16-bit copy: the catalogue's, and Unsloth's own repositories."""
    return model.source == "catalogue" or framework.name.startswith("unsloth")


def _of_checkpoint(
    model: ModelSpec, recipe: Recipe, framework: Framework, published: str, notes: list[str]
) -> str:
    """Return what a trainer holds of a checkpoint that is quantised already."""
    how = scheme_table(model, published).training
    assert how is not None
    if recipe.method is Method.FULL:
        notes.append(
            f"full training needs 16-bit weights: planned on them, not on the {published} checkpoint"
        )
        return ""
    if how.held is Held.STORED:
        return published
    if recipe.method is Method.QLORA:
        return _four_bit(model, framework, published, how, notes)
    if how.held is Held.NOTHING:
        raise UnsupportedError(
            f"quantization: nothing trains this checkpoint's {published} weights; {how.how}",
            hint="train the 16-bit checkpoint, or one in bitsandbytes, GPTQ, AWQ or HQQ form",
        )
    notes.append(f"the {published} checkpoint is held in 16 bits: {how.how}")
    return ""


def _four_bit(
    model: ModelSpec, framework: Framework, published: str, how: Training, notes: list[str]
) -> str:
    """Return NF4 where a 16-bit twin can be meant, or say that this checkpoint is no base for it."""
    if not _has_twin(model, framework):
        raise UsageError(
            f"method: qlora cannot make NF4 of this checkpoint, which is {published} "
            f"({method_of(model.quantization_config) or published}) already; {how.how}",
            hint="use --method lora, or a 16-bit or bitsandbytes copy of the model",
        )
    notes.append(
        f"NF4 is made from a 16-bit copy: the published weights are {published}, and transformers "
        "takes no BitsAndBytesConfig over them"
    )
    return "nf4"
