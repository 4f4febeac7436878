"""Exports: the keys exist in the stated version, and reading them back gives the same recipe."""

import ast
import dataclasses
import importlib.util
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from benchmarks.foreign_examples import load_examples, render
from planner.errors import UnsupportedError, VramwiseError
from planner.exporters import EXPORTERS, export_run
from planner.importers import import_config
from planner.run.framework import pick
from planner.run.recipe import Recipe, RunFile, Task
from planner.run.runfile import make_recipe

SAME = (
    "task",
    "method",
    "micro_batch_size",
    "gradient_accumulation",
    "checkpointing",
    "quantization",
    "optimizer",
    "context",
    "completion_length",
    "num_generations",
    "packing",
)
EXAMPLES = load_examples()


@pytest.mark.parametrize("tool", EXPORTERS)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.id)
def test_round_trip(example, tool: str) -> None:  # type: ignore[no-untyped-def]
    run = import_config(render(example)[1]).run
    try:
        exported = export_run(run, tool)
    except UnsupportedError as error:
        grouped = tool == "axolotl" and "whole groups" in str(error)
        served = (run.recipe.task is Task.SERVE) != (tool == "vllm")
        if not (grouped or served or (tool == "llamafactory" and run.recipe.task is Task.GRPO)):
            raise
        return
    back = import_config(exported.text)
    assert back.tool == tool
    assert back.run.model == run.model
    sent, got = run.recipe, back.run.recipe
    differing = {
        name: (getattr(sent, name), getattr(got, name))
        for name in SAME
        if getattr(sent, name) != getattr(got, name)
    }
    if sent.task is Task.GRPO:
        differing.pop("context", None)
        differing.pop("packing", None)
    if sent.task is Task.DPO:
        differing.pop("packing", None)
    said = " ".join(exported.left_out)
    assert all(name.removesuffix("ing") in said for name in differing), differing
    assert (sent.lora.rank, sent.lora.targets) == (
        got.lora.rank,
        got.lora.targets,
    ) or sent.method == "full"


def _fields(package: str, *classes: str) -> set[str]:
    """Return the dataclass fields and arguments of classes in a package's source, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    names: set[str] = set()
    for path in Path(spec.submodule_search_locations[0]).rglob("*.py"):
        if not path.name.endswith(("config.py", "arg_utils.py", "training_args.py")):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name in classes:
                names |= {
                    item.target.id
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                }
    return names


@pytest.mark.parametrize(
    ("task", "config"), [("sft", "SFTConfig"), ("grpo", "GRPOConfig"), ("dpo", "DPOConfig")]
)
def test_trl_keys_exist_in_the_installed_release(task: str, config: str) -> None:
    known = _fields("trl", config, "ModelConfig", "_BaseConfig", "BaseConfig") | _fields(
        "transformers", "TrainingArguments"
    )
    written: set[str] = set()
    for example in EXAMPLES:
        run = import_config(render(example)[1]).run
        if run.recipe.task.value == task:
            exported = export_run(run, "trl", version=version("trl"))
            written |= set(yaml.safe_load(exported.text))
    assert len(written) > 8
    # transformers renamed the key and keeps the old one as an alias
    assert written - known - {"gradient_checkpointing"} == set()


def test_vllm_flags_exist_in_the_installed_release() -> None:
    known = _fields("vllm", "EngineArgs", "AsyncEngineArgs")
    for example in EXAMPLES:
        if example.method == "serve":
            words = export_run(import_config(render(example)[1]).run, "vllm").command.split()
            flags = {
                word.removeprefix("--").replace("-", "_") for word in words if word.startswith("--")
            }
            assert flags - known == set()


def test_old_trl_gets_old_names() -> None:
    run = RunFile(
        model="Qwen/Qwen3-8B",
        recipe=Recipe(
            task=Task.GRPO,
            dtype="bf16",
            prompt_length=512,
            completion_length=512,
            num_generations=8,
            micro_batch_size=8,
            loss="chunked",
        ),
    )
    old, new = (
        yaml.safe_load(export_run(run, "trl", version=version).text)
        for version in ("0.18.0", "1.16.0")
    )
    assert {"torch_dtype", "max_prompt_length", "use_liger_loss"} <= set(old)
    assert "dtype" in new
    assert not {"torch_dtype", "max_prompt_length", "use_liger_loss"} & set(new)
    assert any("prompt" in sentence for sentence in export_run(run, "trl").left_out)


def test_what_cannot_be_expressed_is_said() -> None:
    run = RunFile(
        model="Qwen/Qwen3-8B", recipe=Recipe(loss="full", sharding="zero3", optimizer="muon")
    )
    said = " ".join(export_run(run, "trl").left_out)
    assert "full logits" in said
    assert "zero3" in said
    assert "muon" in said
    with pytest.raises(VramwiseError, match="unknown tool"):
        export_run(run, "keras")


def test_exported_is_plain_data() -> None:
    exported = export_run(RunFile(model="m"), "axolotl")
    assert dataclasses.asdict(exported)["command"] == "axolotl train axolotl.yaml"


@pytest.mark.parametrize(
    ("framework", "task", "loss", "version", "key"),
    [
        ("trl", "sft", "chunked", "1.16.0", None),
        ("trl==1.9.2", "sft", "chunked", "1.9.2", ("loss_type", "chunked_nll")),
        ("trl==1.9.2", "sft", "full", "1.9.2", ("loss_type", "nll")),
        ("trl==1.9.2", "grpo", "chunked", "1.9.2", ("use_liger_kernel", True)),
        ("trl==0.18.0", "grpo", "chunked", "0.18.0", ("use_liger_loss", True)),
        ("vramwise", "sft", "chunked", "1.16.0", None),
    ],
)
def test_an_export_is_of_the_version_that_was_planned(
    framework: str, task: str, loss: str, version: str, key: tuple[str, object] | None
) -> None:
    recipe = make_recipe(framework=framework, task=task, loss=loss)
    exported = export_run(RunFile(model="Qwen/Qwen3-0.6B", recipe=recipe), "trl")
    keys = yaml.safe_load(exported.text)
    assert exported.version == version
    assert [keys.get(name) for name in ("loss_type", "use_liger_kernel", "use_liger_loss")] == [
        key[1] if key and key[0] == name else None
        for name in ("loss_type", "use_liger_kernel", "use_liger_loss")
    ]
    back = import_config(exported.text).run.recipe
    assert back.loss == loss
    assert pick(back.framework).name == pick(framework).name or framework == "vramwise"


def test_vllm_ranks_and_adapter_slots_come_back() -> None:
    line = (
        "vllm serve mistralai/Mixtral-8x7B-v0.1 --max-model-len 4096 --tensor-parallel-size 2 "
        "--pipeline-parallel-size 2 --enable-expert-parallel --enable-lora --max-loras 3 "
        "--max-lora-rank 32"
    )
    first = import_config(line + "\n").run
    again = import_config(export_run(first, "vllm").command + "\n").run
    engine = again.recipe.engine
    assert (engine.tensor_parallel, engine.pipeline_parallel, engine.expert_parallel) == (
        2,
        2,
        True,
    )
    assert (engine.max_loras, engine.max_lora_rank) == (3, 32)
    assert again.recipe == first.recipe
    assert again.machine.gpus == 4


def test_vllm_without_bitsandbytes_is_said() -> None:
    run = RunFile(model="llama-3.1-8b", recipe=Recipe(task=Task.SERVE, quantization="nf4"))
    with pytest.raises(UnsupportedError, match="no bitsandbytes"):
        export_run(run, "vllm")
    assert "--quantization bitsandbytes" in export_run(run, "vllm", version="0.10.2").command
