"""NEFTune's noise and the router logits of a mixture's auxiliary loss, planned as the trace has them."""

import pytest

from planner.families import model_spec_from_config
from planner.machines.machine import Machine
from planner.models.catalogue import load_catalogue
from planner.plan import plan
from planner.run.runfile import make_recipe
from planner.run.train_bytes import with_train
from planner.terms.activations import activations
from profiler.subjects.build import shorten
from profiler.trace import trace
from trainer.dry_run import subject_for

LAYERS, EXPERTS, TOKENS = 3, 64, 2048
CONFIG = {
    **shorten(load_catalogue()["olmoe-1b-7b"]["config"], LAYERS),
    "hidden_size": 128, "intermediate_size": 64, "vocab_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 4,
}  # fmt: skip
LOGITS = LAYERS * TOKENS * EXPERTS * 2
"""bf16, of every layer."""


def both(**fields):
    """Return phase -> (planned, traced) bytes."""
    recipe = make_recipe(
        task="sft", dtype="bf16", context=512, micro_batch_size=4, checkpointing="full", tiled_mlp=False,
        lora={"targets": "attention", "dtype": "bf16"}, **fields,
    )  # fmt: skip
    planned = plan(model_spec_from_config(CONFIG), recipe, Machine(vram_bytes=2**40))
    traced = trace(subject_for(planned.resolved, recipe, CONFIG))
    sizes = {phase.name: phase.total_bytes for phase in planned.phases}
    return {p.name: (sizes[p.name], p.peak_bytes) for p in traced.phases if p.name in sizes}


@pytest.fixture(scope="module")
def plain():
    return both(router_loss=False)


def grown(with_it, without, phase):
    return tuple(more - less for more, less in zip(with_it[phase], without[phase], strict=True))


def test_router_logits_wait_for_the_loss_and_their_gradients_for_their_layer(plain):
    routed = both(router_loss=True)
    # the layer that runs at the forward's peak has its own logits with or without the loss
    assert grown(routed, plain, "forward") == (LOGITS * 2 // 3, LOGITS * 2 // 3)
    assert grown(routed, plain, "backward") == (LOGITS, LOGITS)
    assert grown(routed, plain, "loss") == (LOGITS, LOGITS), (
        "the head's tile is larger than softmaxes"
    )


def test_the_noise_is_gone_before_a_layer_needs_more(plain):
    noisy = both(neftune=True, router_loss=False)
    # the noise needs to know how long each token's sample is
    assert grown(noisy, plain, "forward") == (8 * TOKENS, 8 * TOKENS)
    # but where a layer needs next to nothing, it is what the forward holds most of
    recipe = make_recipe(task="sft", neftune=True, dtype="bf16", context=512, micro_batch_size=4)
    resolved = plan(model_spec_from_config(CONFIG), recipe, Machine(vram_bytes=2**40)).resolved
    least = activations(model_spec_from_config(CONFIG), resolved, TOKENS).forward
    assert least >= 4 * TOKENS * 128 * 2


@pytest.mark.parametrize(
    ("train", "field"),
    [({"neftune_alpha": 5.0}, "neftune"), ({"router_aux_loss_coef": 0.01}, "router_loss")],
)
def test_a_plan_of_the_file_knows_what_its_train_section_says(train, field):
    from planner.run.recipe import Recipe, RunFile

    run = with_train(RunFile(model="m", recipe=Recipe(task="sft"), train=train))
    assert getattr(run.recipe, field)
    assert with_train(RunFile(model="m", recipe=Recipe(task="grpo"), train=train)).recipe == Recipe(task="grpo")  # fmt: skip


def test_a_plan_without_a_word_has_the_loss_that_the_trainer_takes_from_the_config():
    from transformers import AutoConfig

    from trainer.router_loss import router_coefficient

    for given, on in (({}, True), ({"router_aux_loss_coef": 0.0}, False)):
        config = {**CONFIG, **given}
        assert bool(router_coefficient(AutoConfig.for_model(**config), None)) is on
        recipe = make_recipe(task="sft", context=512)
        model = model_spec_from_config(config)
        resolved = plan(model, recipe, Machine(vram_bytes=2**40)).resolved
        assert resolved.router_loss is model.router_loss is on
