"""Published quantisations: their names, what they leave in 16 bits, the checkpoint's bytes."""

from dataclasses import replace
from typing import Any

import pytest

from planner.errors import UsageError
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.models.quantization import left_in_16_bit, quantization_name
from planner.plan import plan
from planner.run.recipe import Recipe, Task


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


def test_what_kimi_leaves_alone() -> None:
    spec = catalogue_model("kimi-k2.5")
    assert spec.checkpoint_quantization == "compressed-int4"
    left = {m.name for la in spec.layers for m in la.modules if left_in_16_bit(spec, m)}
    assert {"self_attn.q_a_proj", "mlp.gate_proj", "mlp.shared_experts.down_proj"} <= left
    assert "mlp.experts" not in left


@pytest.mark.parametrize(
    "listed", [["re:(a+)+$"], ["re:(.*)*"], ["re:(["], "q_proj", 5, ["x"] * 5000]
)
def test_hostile_patterns_are_refused(listed: Any) -> None:
    spec = replace(
        catalogue_model("llama-3.2-1b"), quantization_config={"modules_to_not_convert": listed}
    )
    with pytest.raises(UsageError, match="quantization_config"):
        left_in_16_bit(spec, spec.layers[0].modules[0])


def test_plain_names_match_whole_components() -> None:
    spec = replace(
        catalogue_model("llama-3.2-1b"),
        quantization_config={"modules_to_not_convert": ["q_proj", "model.layers.*.mlp"]},
    )
    left = {m.name for m in spec.layers[0].modules if left_in_16_bit(spec, m)}
    assert left == {"self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
