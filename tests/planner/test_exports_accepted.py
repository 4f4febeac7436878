"""What is exported is accepted by the tool it is for: TRL's own parser, and the other tools' own schemas."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.errors import UnsupportedError
from planner.exporters import export_run
from planner.run.recipe import MachineSection, RunFile
from planner.run.runfile import make_recipe
from tests.planner.test_exporters import _fields

SCHEMAS = json.loads(Path(__file__).with_name("exporter_schemas.json").read_text(encoding="utf-8"))
RUNS: tuple[dict[str, Any], ...] = (
    {"method": "qlora", "context": 4096, "micro_batch_size": 2, "checkpointing": "offload"},
    {"method": "lora", "packing": True, "loss": "chunked", "optimizer": "paged-adamw-8bit"},
    {"method": "full", "sharding": "fsdp2", "attention": "flash", "dtype": "bf16"},
    {"method": "full", "sharding": "zero3", "optimizer_offload": True},
    {"method": "lora", "lora": {"targets": ("q_proj", "v_proj"), "dora": True, "use_rslora": True}},
    {"task": "grpo", "method": "lora", "num_generations": 8, "beta": 0.04, "prompt_length": 512,
     "completion_length": 512, "engine": {"kind": "vllm-push", "gpu_memory_utilization": 0.4}},
    {"task": "dpo", "method": "qlora", "context": 2048, "beta": 0.1},
)  # fmt: skip


def exported(tool: str, fields: dict[str, Any]) -> dict[str, Any]:
    run = RunFile(
        model="llama-3.1-8b", recipe=make_recipe(**fields), machine=MachineSection(gpus=8)
    )
    try:
        text = export_run(run, tool).text
    except UnsupportedError:
        pytest.skip(f"{tool} has no such task")
    document: dict[str, Any] = yaml.safe_load(text)
    return document


@pytest.mark.parametrize("tool", ["trl", "axolotl", "llamafactory"])
@pytest.mark.parametrize("fields", RUNS, ids=range(len(RUNS)))
def test_a_catalogue_name_leaves_as_its_hub_id(tool: str, fields: dict[str, Any]) -> None:
    written = exported(tool, fields)
    name = written.get("base_model") or written["model_name_or_path"]
    assert name == "meta-llama/Llama-3.1-8B"


def test_a_server_is_started_by_the_hub_id() -> None:
    run = RunFile(model="Qwen3-8B", recipe=make_recipe(task="serve", framework="vllm"))
    assert export_run(run, "vllm").command.startswith("vllm serve Qwen/Qwen3-8B")
    own = RunFile(model="my/own-model", recipe=make_recipe(task="serve", framework="vllm"))
    assert export_run(own, "vllm").command.startswith("vllm serve my/own-model")


@pytest.mark.parametrize("fields", RUNS, ids=range(len(RUNS)))
def test_axolotl_has_every_key(fields: dict[str, Any]) -> None:
    written, schema = exported("axolotl", fields), SCHEMAS["axolotl"]
    assert set(written) <= set(schema["top"])
    for section in ("trl", "vllm", "fsdp_config"):
        assert set(written.get(section) or {}) <= set(schema[section])


@pytest.mark.parametrize("fields", RUNS, ids=range(len(RUNS)))
def test_llamafactory_has_every_key(fields: dict[str, Any]) -> None:
    written = exported("llamafactory", fields)
    known = set(SCHEMAS["llamafactory"]["top"]) | _fields("transformers", "TrainingArguments")
    assert set(written) <= known


@pytest.mark.slow
@pytest.mark.parametrize("fields", RUNS, ids=range(len(RUNS)))
def test_trl_parses_what_is_written(fields: dict[str, Any], tmp_path: Path) -> None:
    if importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed")
    import trl

    task = fields.get("task", "sft")
    config = {"sft": trl.SFTConfig, "grpo": trl.GRPOConfig, "dpo": trl.DPOConfig}[task]
    path = tmp_path / "config.yaml"
    written = exported("trl", fields)
    # what only a GPU or another package could accept is this machine's matter, not the file's
    beside = {"bf16": False, "use_cpu": True, "output_dir": str(tmp_path)}
    beside |= {"use_vllm": False} if "use_vllm" in written else {}
    path.write_text(yaml.safe_dump({**written, **beside}), encoding="utf-8")
    parser = trl.TrlParser((trl.ScriptArguments, config, trl.ModelConfig))
    _, training, model, *rest = parser.parse_args_and_config(["--config", str(path)])
    assert rest in ([], [[]])
    assert model.model_name_or_path == "meta-llama/Llama-3.1-8B"
    for key, value in written.items():
        if key not in beside and hasattr(training, key):
            assert getattr(training, key) == value or str(value) in str(getattr(training, key)), key
