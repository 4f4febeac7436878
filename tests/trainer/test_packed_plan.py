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


def test_a_plan_of_the_file_counts_the_mask_of_padding_free_rows(tmp_path, capsys):
    """As the trainer does; what is saved is the file as it was."""
    import json

    import yaml

    from app.cli import main

    def peak(name, **train):
        document = {"model": "qwen2.5-0.5b", "recipe": {"task": "sft", "context": 2000, "micro_batch_size": 3},
                    "machine": {"gpu": "rtx-4090"}, "train": {"output": "o", "dataset": "d.jsonl", **train}}  # fmt: skip
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        assert main(["plan", str(path), "--json", "--save", str(tmp_path / "saved.yaml")]) == 0
        saved = yaml.safe_load((tmp_path / "saved.yaml").read_text(encoding="utf-8"))
        assert "packing" not in saved["recipe"]
        return json.loads(capsys.readouterr().out)["phases"]

    plain, free = peak("plain"), peak("free", padding_free=True)
    forward = [
        next(p["total_bytes"] for p in phases if p["name"] == "forward") for phases in (plain, free)
    ]
    assert forward[1] - forward[0] >= mask_bytes(3, 2000, 2)
