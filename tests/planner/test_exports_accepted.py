"""What is exported is accepted by the tool it is for: TRL's own parser, and the other tools' own schemas."""

import importlib.util
import json
import random
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.errors import UnsupportedError, VramwiseError
from planner.exporters import export_run
from planner.run.recipe import Attention, MachineSection, Optimizer, RunFile, Sharding
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


@cache
def random_runs() -> tuple[RunFile, ...]:
    """Return runs of random settings that the recipe itself allows."""
    draw, runs = random.Random(22), []
    while len(runs) < 600:
        fields: dict[str, Any] = {
            "task": draw.choice(["sft", "grpo", "dpo", "kto", "orpo", "simpo"]),
            "method": draw.choice(["full", "lora", "qlora"]),
            "dtype": draw.choice([None, "bf16", "fp16"]),
            "optimizer": draw.choice([None, *Optimizer]),
            "sharding": draw.choice([*Sharding]),
            "optimizer_offload": draw.random() < 0.2,
            "checkpointing": draw.choice([None, "none", "full", "offload"]),
            "attention": draw.choice([None, *Attention]),
            "loss": draw.choice([None, "full", "chunked"]),
            "packing": draw.choice([None, True, False]),
            "micro_batch_size": draw.choice([None, 1, 2, 8]),
            "gradient_accumulation": draw.choice([1, 3, 8]),
            "beta": draw.choice([None, 0.0, 0.1]),
            "lora": {
                "rank": draw.choice([8, 16]),
                "targets": draw.choice(["all-linear", "attention", "mlp", ("q_proj", "v_proj")]),
                "dora": draw.random() < 0.3,
                "use_rslora": draw.random() < 0.3,
                "modules_to_save": draw.choice([(), ("lm_head",)]),
            },
        }
        if fields["task"] == "grpo":
            fields |= {
                "num_generations": draw.choice([None, 2, 4, 8]),
                "prompt_length": 256,
                "completion_length": 256,
                "engine": {"kind": draw.choice(["hf", "vllm-push", "vllm-server"])},
            }
        else:
            fields["context"] = draw.choice([None, 2048])
        try:
            recipe = make_recipe(**fields)
        except VramwiseError:
            continue
        machine = MachineSection(gpus=draw.choice([1, 2, 8]))
        runs.append(RunFile(model="llama-3.1-8b", recipe=recipe, machine=machine))
    return tuple(runs)


def takes(field: str | dict[str, Any], value: object) -> bool:
    """Whether a field of a schema takes a value of YAML; whole numbers are floats too, switches are not numbers."""
    if field == "any":
        return True
    kinds = field if isinstance(field, str) else field.get("type", "")
    if isinstance(field, dict) and value in field["one_of"] and not isinstance(value, bool):
        return True
    kind = {"NoneType": "null"}.get(type(value).__name__, type(value).__name__)
    return kind in kinds.split("|") or (kind == "int" and "float" in kinds.split("|"))


def refusals(written: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    """Return why a tool would refuse a file: types, words, files it has not, settings that exclude each other."""
    found = [
        f"{section}.{key}: {value!r}"
        for section, keys in [("top", written), *written.items()]
        if isinstance(keys, dict) and section in schema
        for key, value in keys.items()
        if not takes(schema[section].get(key, "any"), value)
    ]
    for key, files in schema["files"].items():
        if key in written and written[key] not in files:
            found.append(f"{key}: no file {written[key]}")
    for rule in schema["refused"]:
        if all(
            bool(written.get(key)) if allowed == "set" else written.get(key) in allowed
            for key, allowed in rule.items()
        ):
            found.append(f"together: {rule}")
    return found


def ungrouped(written: dict[str, Any], gpus: int) -> bool:
    """Whether axolotl's check of a GRPO batch fails: whole groups, and one for each GPU."""
    section = written.get("trl") or {}
    group = section.get("num_generations")
    if written.get("rl") != "grpo" or group is None:
        return False
    batch = section.get("generation_batch_size") or (
        written["micro_batch_size"] * written["gradient_accumulation_steps"]
    )
    return bool(group < 2 or batch % group or (gpus > 1 and batch < group * gpus))


@pytest.mark.parametrize("tool", ["axolotl", "llamafactory"])
def test_random_runs_are_accepted(tool: str) -> None:
    schema, accepted = SCHEMAS[tool], 0
    names = set(schema["top"]) | (
        _fields("transformers", "TrainingArguments") if tool == "llamafactory" else set()
    )
    for run in random_runs():
        try:
            export = export_run(run, tool)
        except UnsupportedError:
            continue
        written = yaml.safe_load(export.text)
        accepted += 1
        assert set(written) <= names
        assert refusals(written, schema) == [], run.recipe
        assert not ungrouped(written, run.machine.gpus), run.recipe
        if tool == "llamafactory" and "deepspeed" in written:
            assert "FORCE_TORCHRUN=1" in export.command
    assert accepted > 150


@pytest.mark.parametrize(
    ("tool", "written", "said"),
    [
        ("axolotl", {"micro_batch_size": "2"}, "micro_batch_size"),
        ("axolotl", {"attn_implementation": "flash"}, "attn_implementation"),
        ("axolotl", {"rl": "dpo", "sample_packing": True}, "together"),
        ("axolotl", {"trl": {"vllm_mode": "shared"}}, "trl.vllm_mode"),
        ("llamafactory", {"deepspeed": "examples/deepspeed/ds_z1_config.json"}, "no file"),
        ("llamafactory", {"lora_rank": True}, "lora_rank"),
    ],
)
def test_the_check_itself_refuses(tool: str, written: dict[str, Any], said: str) -> None:
    assert any(said in each for each in refusals(written, SCHEMAS[tool]))


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


SERVED: tuple[dict[str, Any], ...] = (
    {},
    {"context": 8192, "quantization": "fp8", "dtype": "bf16"},
    {"engine": {"kv_dtype": "fp8", "gpu_memory_utilization": 0.85, "max_num_seqs": 64}},
    {"engine": {"tensor_parallel": 4, "data_parallel": 2, "max_num_batched_tokens": 4096}},
    {"engine": {"pipeline_parallel": 2, "tensor_parallel": 4, "cuda_graphs": False}},
    {"engine": {"max_loras": 4, "max_lora_rank": 32, "prefix_caching": False}},
    {"engine": {"kv_bytes": 8 << 30, "prefix_caching": True}},
)


@pytest.mark.slow
@pytest.mark.parametrize("fields", SERVED, ids=range(len(SERVED)))
def test_vllm_parses_what_is_written(fields: dict[str, Any]) -> None:
    """vLLM's own parser of `vllm serve` reads every flag, and the value that was asked for."""
    pytest.importorskip("vllm")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    recipe = make_recipe(task="serve", framework="vllm", **fields)
    run = RunFile(model="llama-3.1-8b", recipe=recipe, machine=MachineSection(gpus=8))
    words = shlex.split(export_run(run, "vllm").command)
    assert words[:2] == ["vllm", "serve"]
    read = make_arg_parser(FlexibleArgumentParser()).parse_args(words[2:])
    assert read.model_tag == "meta-llama/Llama-3.1-8B"
    asked = recipe.engine
    assert read.tensor_parallel_size == asked.tensor_parallel
    assert read.pipeline_parallel_size == asked.pipeline_parallel
    assert read.data_parallel_size == asked.data_parallel
    assert read.enforce_eager == (asked.cuda_graphs is False)
    for name, value in (
        ("max_model_len", recipe.context),
        ("max_num_seqs", asked.max_num_seqs),
        ("max_num_batched_tokens", asked.max_num_batched_tokens),
        ("kv_cache_memory_bytes", asked.kv_bytes),
        ("enable_prefix_caching", asked.prefix_caching),
        ("max_loras", asked.max_loras),
    ):
        if value is not None:
            assert getattr(read, name) == value, name


@pytest.mark.parametrize("task", ["dpo", "kto", "orpo", "simpo"])
def test_axolotl_takes_beta_in_every_task_of_pairs(task: str) -> None:
    assert exported("axolotl", {"task": task, "method": "lora", "beta": 0.2})["rl_beta"] == 0.2


def test_what_a_tool_asks_for_beside_is_said_and_fp32_is_no_bf16() -> None:
    for tool in ("axolotl", "llamafactory"):
        run = RunFile(model="llama-3.1-8b", recipe=make_recipe(method="lora"))
        assert any(line.startswith("dataset") for line in export_run(run, tool).left_out)
    assert "bf16" not in exported("llamafactory", {"method": "full", "dtype": "fp32"})
    assert exported("llamafactory", {"method": "lora"})["bf16"] is True
