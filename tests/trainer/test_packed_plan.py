"""What packing moves is planned: the mask that keeps samples apart, and keys repeated beside it."""

from planner.machines.machine import Machine
from planner.models.hub import find_model
from planner.plan import plan
from planner.run.recipe import Attention, Recipe
from planner.terms.activations import activations, op_settings
from trainer.shared_prefix import mask_bytes


def resolved(**fields):
    recipe = Recipe(context=2000, micro_batch_size=3, dtype="bf16", **fields)
    return plan(find_model("Qwen/Qwen2.5-0.5B"), recipe, Machine(vram_bytes=2**36)).resolved


def test_the_planned_mask_is_the_trainers():
    spec, packed = find_model("Qwen/Qwen2.5-0.5B"), resolved(packing=True)
    assert op_settings(spec, packed).masked
    parts = {name: size * count for name, count, size in activations(spec, packed, 6000).parts}
    assert parts["attention masks"] == mask_bytes(3, 2000, 2)
    plain = activations(spec, resolved(), 6000)
    assert {name: size for name, _, size in plain.parts}["attention masks"] == 0


def test_flash_attention_needs_none():
    spec = find_model("Qwen/Qwen2.5-0.5B")
    flash = activations(spec, resolved(packing=True, attention=Attention.FLASH), 6000)
    assert {name: size for name, _, size in flash.parts}["attention masks"] == 0
