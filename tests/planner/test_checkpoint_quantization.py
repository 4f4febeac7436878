"""Published quantisations: their names, what they leave in 16 bits, the checkpoint's bytes."""

import json
from typing import Any

import pytest

from planner.answers.model_facts import model_facts
from planner.datafiles import data_dir
from planner.errors import UnsupportedError, UsageError
from planner.families import model_spec_from_config
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model, load_catalogue
from planner.models.quantization import quantization_name
from planner.models.spec import ModelSpec
from planner.plan import plan
from planner.quant.methods import BLOCKSIZES
from planner.quant.patterns import exact_or_regex
from planner.quant.table import canonical, scheme_table
from planner.run.recipe import Method, Recipe, Task


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({}, ""),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-block"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "gptq", "bits": 8}, "gptq-8bit"),
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bnb-nf4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bnb-int8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
    ],
)
def test_names(config: dict[str, Any], name: str) -> None:
    assert quantization_name(config) == name


@pytest.mark.parametrize(
    ("weights", "name"),
    [
        ({"type": "int", "num_bits": 4}, "compressed-int4"),
        ({"type": "int", "num_bits": 8}, "int8"),
        ({"type": "float", "num_bits": 8}, "fp8"),
        ({"type": "float", "num_bits": 8, "strategy": "block"}, "fp8-block"),
    ],
)
def test_compressed_tensors(weights: dict[str, Any], name: str) -> None:
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights}},
    }
    assert quantization_name(config) == name
    assert quantization_name({"quant_method": "compressed-tensors"}) == "compressed-tensors"


@pytest.mark.parametrize(("name", "size"), [("gpt-oss-20b", 13_761_264_768)])
def test_bytes_of_a_published_checkpoint(name: str, size: int) -> None:
    """The size of openai/gpt-oss-20b's safetensors: experts in MXFP4, all else in bf16.

    vLLM adds its rotary table: 131,072 positions x 64 x 2 B.
    """
    planned = plan(catalogue_model(name), Recipe(task=Task.SERVE), make_machine("h100"))
    weights = {
        term.bytes for phase in planned.phases for term in phase.terms if term.name == "weights"
    }
    assert weights == {size + 131072 * 64 * 2}


def _left(spec: ModelSpec) -> set[str]:
    """Return the linears of the first two layers that stay in 16 bits."""
    table = scheme_table(spec, canonical(spec.checkpoint_quantization))
    return {
        f"{number}.{module.name}"
        for number in range(2)
        for module in spec.layers[spec.layer_order[number]].modules
        if module.kind.value in ("linear", "experts")
        and table.by_layer[number][module.name] is None
    }


def _with(config: dict[str, Any], name: str = "llama-3.2-1b") -> ModelSpec:
    entry = load_catalogue()[name]["config"]
    return model_spec_from_config({**entry, "quantization_config": config}, name=name)


BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def test_what_kimi_leaves_alone() -> None:
    spec = catalogue_model("kimi-k2.5")
    assert spec.checkpoint_quantization == "compressed-int4"
    left = _left(spec)
    assert {"0.self_attn.q_a_proj", "0.mlp.gate_proj", "1.mlp.shared_experts.down_proj"} <= left
    assert "1.mlp.experts" not in left


@pytest.mark.parametrize("listed", [["re:(["], ["re:(a)\\1"], ["re:" + "a" * 500], "q_proj", 5])
def test_unreadable_lists_are_refused(listed: Any) -> None:
    spec = _with({**COMPRESSED, "ignore": listed})
    with pytest.raises(UsageError, match="quantization_config"):
        scheme_table(spec, "gptq-4bit")


@pytest.mark.parametrize("listed", ["re:(a+)+$", "re:(.*)*x", "re:(m|mo|o|d)*(.*.*.*.*.*.*)*!"])
def test_hostile_patterns_take_linear_time(listed: str) -> None:
    """Python's own engine takes hours for these; the states of a pattern are visited once a place."""
    assert not exact_or_regex(listed)("model." + "layers." * 20 + "a" * 40 + "?")


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "g": {
            "targets": ["Linear"],
            "weights": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128},
        }
    },
    "ignore": ["lm_head"],
}
PROJ = tuple(f"self_attn.{letter}_proj" for letter in "qkvo")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def _on(*layers: int, names: tuple[str, ...] = MLP) -> set[str]:
    return {f"{layer}.{name}" for layer in layers for name in names}


@pytest.mark.parametrize(
    ("config", "left"),
    [
        ({**BNB, "llm_int8_skip_modules": ["model.layers.1.mlp"]}, _on(1)),
        # a prefix: layer 1 and layers 10 to 15
        ({**BNB, "llm_int8_skip_modules": ["model.layers.1"]}, _on(1, names=(*MLP, *PROJ))),
        # neither a prefix nor a suffix of anything inside
        ({**BNB, "llm_int8_skip_modules": ["mlp"]}, set()),
        ({**BNB, "llm_int8_skip_modules": ["down_proj"]}, _on(0, 1, names=MLP[2:])),
        ({"quant_method": "awq", "modules_to_not_convert": ["mlp"]}, _on(0, 1)),
        (
            {"quant_method": "awq", "modules_to_not_convert": ["layers.0."]},
            _on(0, names=(*MLP, *PROJ)),
        ),
        ({**COMPRESSED, "ignore": ["mlp"]}, set()),
        (
            {**COMPRESSED, "ignore": ["re:model.layers.[0-3].mlp.(?:up|gate)_proj"]},
            _on(0, 1, names=MLP[:2]),
        ),
        ({**COMPRESSED, "ignore": [r"re:.*\.1\..*(?<!x)"]}, None),
        ({**COMPRESSED, "ignore": [r"re:.*layers\.\d+\.self_attn.*"]}, _on(0, 1, names=PROJ)),
        ({**COMPRESSED, "ignore": ["Linear"]}, _on(0, 1, names=(*MLP, *PROJ))),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "exclude_modules": ["model.layers.1.self_attn*"],
            },
            _on(1, names=PROJ),
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["self_attn*"]}, set()),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}},
                "exclude": ["*layers.0.mlp*"],
            },
            _on(0),
        ),
        (
            {
                "quant_method": "hqq",
                "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}},
                "skip_modules": ["mlp.up_proj"],
            },
            _on(0, 1, names=MLP[1:2]),
        ),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {r"-:.*\.0\.mlp": {}}},
            _on(0),
        ),
        (
            {
                "quant_method": "gptq",
                "bits": 4,
                "modules_in_block_to_quantize": [["self_attn.q_proj"]],
            },
            _on(0, 1, names=(*MLP, *PROJ[1:])),
        ),
        (
            {
                "quant_method": "auto-round",
                "bits": 4,
                "extra_config": {"model.layers.1.mlp.up_proj": {"bits": 16}},
            },
            _on(1, names=MLP[1:2]),
        ),
        (
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}},
                "modules_to_not_convert": ["model.layers.0.mlp", "up_proj"],
            },
            _on(0),
        ),
    ],
)
def test_each_library_matches_names_its_own_way(
    config: dict[str, Any], left: set[str] | None
) -> None:
    spec = _with(config)
    if left is None:
        with pytest.raises(UsageError, match="pattern"):
            _left(spec)
    else:
        assert _left(spec) == left


def _rows() -> list[dict[str, Any]]:
    file = data_dir() / "models" / "quantized_checkpoints.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("row", _rows(), ids=lambda row: row["name"])
def test_bytes_of_published_blocks(row: dict[str, Any]) -> None:
    """25 blocks, read or as their tools write them: bytes counted on the models transformers builds."""
    spec = _with(row["quantization_config"], row["model"])
    facts = model_facts(spec)
    assert facts["weight_bytes"] == row["weight_bytes"]
    held = {"stored": row["weight_bytes"], "16-bit": 2 * spec.parameters, "nothing": None}
    assert facts["trained_weight_bytes"] == held[row["trained"]]


def test_a_long_list_does_not_fit() -> None:
    row = next(row for row in _rows() if row["name"] == "unsloth-dynamic-qwq-32b-first-layers")
    spec = _with(row["quantization_config"], row["model"])
    recipe, card = (
        Recipe(task=Task.SFT, method=Method.QLORA, context=1024),
        make_machine("rtx-4090"),
    )
    dynamic = plan(spec, recipe, card)
    assert not dynamic.fits
    assert dynamic.peak_bytes > dynamic.capacity_bytes
    plain = plan(_with({**BNB, "bnb_4bit_use_double_quant": True}, row["model"]), recipe, card)
    assert plain.peak_bytes < plain.capacity_bytes


def test_a_list_that_matches_nothing_is_said() -> None:
    spec = _with({**BNB, "llm_int8_skip_modules": ["model.layer.3.mlp"]})
    recipe = Recipe(task=Task.SFT, method=Method.QLORA)
    planned = plan(spec, recipe, make_machine("rtx-4090"))
    assert any("matches nothing" in note for note in planned.assumptions)
    assert "matches nothing" in model_facts(spec)["quantization_notes"][0]
    fine = _with({**BNB, "llm_int8_skip_modules": ["lm_head", "merger", "model.layers.1.mlp"]})
    assert "quantization_notes" not in model_facts(fine)
    half = _with({**BNB, "llm_int8_skip_modules": ["model.layers.1.mlp", "model.layers.99.mlp"]})
    assert "1 of 2 listed names" in model_facts(half)["quantization_notes"][0]


@pytest.mark.parametrize(
    ("config", "loads"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, "vLLM"),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "inference only"),
        ({"quant_method": "fbgemm_fp8"}, "fbgemm"),
        ({"quant_method": "auto-round", "bits": 2}, "auto-round"),
        ({"quant_method": "exl2", "bits": 4.5}, "ExLlama"),
    ],
)
def test_what_cannot_be_trained_is_refused(config: dict[str, Any], loads: str) -> None:
    spec = _with(config)
    assert model_facts(spec)["trained_weight_bytes"] is None
    for method in (Method.LORA, Method.QLORA):
        with pytest.raises((UnsupportedError, UsageError), match=loads):
            plan(spec, Recipe(task=Task.SFT, method=method), make_machine("h100"))
    assert plan(spec, Recipe(task=Task.SERVE), make_machine("h100")).peak_bytes


def test_compressed_weights_are_16_bit_for_a_trainer() -> None:
    spec = _with(COMPRESSED, "llama-3.1-8b")
    planned = plan(spec, Recipe(task=Task.SFT, method=Method.LORA), make_machine("h100"))
    weights = {t.bytes for p in planned.phases for t in p.terms if t.name == "weights"}
    assert weights == {2 * spec.parameters}
    assert any("decompresses" in note for note in planned.assumptions)
    with pytest.raises(UsageError, match="already"):
        plan(spec, Recipe(task=Task.SFT, method=Method.QLORA), make_machine("h100"))


def test_gptq_is_trained_as_it_is() -> None:
    spec = _with({"quant_method": "gptq", "bits": 8}, "llama-3.1-8b")
    for method in (Method.LORA, Method.QLORA):
        planned = plan(spec, Recipe(task=Task.SFT, method=method), make_machine("h100"))
        weights = {t.bytes for p in planned.phases for t in p.terms if t.name == "weights"}
        assert weights == {model_facts(spec)["weight_bytes"]}


def test_an_unknown_method_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="vptq"):
        model_facts(_with({"quant_method": "vptq"}))


def test_block_sizes_that_quantize_lists_are_read_by_name() -> None:
    """4,096 x 14,336 in blocks of 32: twice the absmax, of which each 256 share an fp32 one."""
    block = {**BNB, "bnb_4bit_use_double_quant": True}
    listed = {"32": ["model.layers.1.mlp.down_proj"]}
    plain, mixed = (
        model_facts(_with(config, "llama-3.1-8b"))["weight_bytes"]
        for config in (block, {**block, BLOCKSIZES: listed})
    )
    assert mixed - plain == 4096 * 14336 // 64 + 4 * 4096 * 14336 // 64 // 256
    with pytest.raises(UsageError, match="vramwise_blocksizes: '48' is not allowed"):
        model_facts(_with({**block, BLOCKSIZES: {"48": listed["32"]}}, "llama-3.1-8b"))
