"""The eight cases of the survey and the laws of measured runs: what plan() must reproduce."""

import pytest

from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.plan import Plan, plan
from planner.run.runfile import make_recipe
from planner.terms.kv_cache import bytes_per_token, sequence_bytes
from planner.units import GiB, MiB

ROOMY = make_machine(vram="4TiB")
TRAINING = ("forward", "loss", "backward", "step")


def planned(model: str, **fields: object) -> Plan:
    return plan(catalogue_model(model), make_recipe(**fields), ROOMY)


def tensor_gib(result: Plan, phases: tuple[str, ...] = TRAINING) -> float:
    """Largest of the phases without library workspaces, which tensor-level runs do not see."""
    sizes = [
        sum(term.bytes for term in phase.terms if term.name != "overhead")
        for phase in result.phases
        if phase.name in phases
    ]
    return max(sizes) / GiB


def test_weights_of_llama_8b_are_exact() -> None:
    result = planned("llama-3.1-8b", method="full", framework="hf-trainer", context=128)
    weights = next(term for term in result.phase("load").terms if term.name == "weights")
    assert weights.bytes == 2 * 8_030_261_248
    assert weights.bytes / GiB == pytest.approx(14.958, abs=5e-4)


@pytest.mark.parametrize(
    ("dtype", "mixed", "expected"), [("fp32", "bf16", 149.58), ("bf16", "none", 74.79)]
)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_full_fine_tune_peaks_in_the_optimizer_step(
    dtype: str, mixed: str, expected: float, checkpointing: str
) -> None:
    result = planned(
        "llama-3.1-8b",
        method="full",
        framework="hf-trainer",
        dtype=dtype,
        mixed_precision=mixed,
        optimizer="adamw",
        context=2048,
        micro_batch_size=1,
        checkpointing=checkpointing,
    )
    assert result.peak_phase == "step"
    assert tensor_gib(result) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(
    ("framework", "first", "second"), [("hf-trainer", 29.01, 29.33), ("peft-loop", 30.97, 31.28)]
)
def test_lora_step_with_outputs_dropped_or_kept(
    framework: str, first: float, second: float
) -> None:
    result = planned(
        "llama-3.1-8b",
        method="lora",
        framework=framework,
        context=4096,
        micro_batch_size=2,
        checkpointing="full",
        optimizer="adamw",
    )
    states = next(t.bytes for t in result.phase("loss").terms if t.name == "optimizer")
    assert result.peak_phase == "loss"
    assert tensor_gib(result) == pytest.approx(second, rel=0.003)
    assert tensor_gib(result) - states / GiB == pytest.approx(first, rel=0.003)


def test_eager_attention_on_a_t4() -> None:
    # allocated on the card: 6,616 MiB
    result = planned(
        "tinyllama-1.1b",
        method="lora",
        framework="peft-loop",
        dtype="fp16",
        micro_batch_size=2,
        context=2048,
        attention="eager",
        lora={"rank": 32, "targets": ("q_proj", "k_proj", "v_proj", "o_proj")},
    )
    assert result.peak_phase == "backward"
    assert result.peak_bytes / MiB == pytest.approx(6616, rel=0.001)


def test_held_outputs_are_16_bytes_a_logit_after_kbit_preparation() -> None:
    kept = planned(
        "tinyllama-1.1b",
        method="qlora",
        framework="peft-loop",
        dtype="fp16",
        context=512,
        checkpointing="full",
    )
    logits = 512 * 32_000
    found = {
        phase.name: sum(term.bytes for term in phase.terms if term.name == "logits")
        for phase in kept.phases
    }
    assert (found["loss"], found["backward"], found["step"]) == (
        16 * logits,
        4 * logits,
        4 * logits,
    )


GRPO = {
    "task": "grpo",
    "method": "lora",
    "context": 20480,
    "checkpointing": "full",
    "optimizer": "adamw",
    "dtype": "bf16",
    "beta": 0.0,
    "mixed_precision": "none",
    "attention": "flash",  # no mask: the figures are of full rows
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"framework": "trl-0.15", "micro_batch_size": 8, "mixed_precision": "bf16"}, 370.0),
        ({"framework": "trl-0.15", "micro_batch_size": 8}, 176.7),
        ({"framework": "trl", "micro_batch_size": 8}, 118.9),
        ({"framework": "trl", "micro_batch_size": 1}, 28.1),
    ],
)
def test_grpo_of_eight_long_completions(changes: dict[str, object], expected: float) -> None:
    result = planned("llama-3.1-8b", **{**GRPO, **changes})
    assert tensor_gib(result) == pytest.approx(expected, rel=0.03)


def test_deepseek_v3_caches_its_latent_only() -> None:
    assert bytes_per_token(catalogue_model("deepseek-v3")) == 70_272


def test_gemma_2_cache_depends_on_the_engine() -> None:
    model = catalogue_model("gemma-2-9b")
    assert sequence_bytes(model, 8192) / GiB == pytest.approx(1.969, abs=5e-4)
    assert sequence_bytes(model, 8192, capped=False) / GiB == pytest.approx(2.625, abs=5e-4)


@pytest.mark.parametrize("batch", [4, 8, 16])
def test_mistral_qlora_follows_the_measured_line(batch: int) -> None:
    # law 4, exact to 0.001 GiB in the measured runs: 4.012 + 2.0319 * b
    result = planned(
        "mistral-7b-v0.1",
        method="qlora",
        framework="fms-hf-tuning-foak==4.45",
        context=4096,
        micro_batch_size=batch,
        lora={"rank": 16, "targets": ("q_proj", "k_proj", "v_proj", "o_proj")},
    )
    assert tensor_gib(result) == pytest.approx(4.012 + 2.0319 * batch, rel=0.015)


@pytest.mark.parametrize(("batch", "expected"), [(4, 21.914), (8, 30.169), (16, 46.677)])
def test_mistral_lora_follows_the_measured_runs(batch: int, expected: float) -> None:
    # law 3: Mistral-7B, r16 on q, k, v, o, 4096 tokens, fused cross-entropy, checkpointing
    result = planned(
        "mistral-7b-v0.1",
        method="lora",
        framework="fms-hf-tuning-foak==4.45",
        context=4096,
        micro_batch_size=batch,
        lora={"rank": 16, "targets": ("q_proj", "k_proj", "v_proj", "o_proj")},
    )
    assert tensor_gib(result) == pytest.approx(expected, rel=0.02)


def test_pure_bf16_full_fine_tune_is_ten_bytes_a_parameter() -> None:
    # law 1
    result = planned(
        "mistral-7b-v0.1",
        method="full",
        framework="hf-trainer",
        optimizer="adamw",
        context=2048,
        micro_batch_size=1,
        checkpointing="full",
    )
    per_parameter = tensor_gib(result) * GiB / catalogue_model("mistral-7b-v0.1").parameters
    assert per_parameter == pytest.approx(10.0, abs=0.01)


def test_fsdp_under_mixed_precision_is_twenty_bytes_a_parameter() -> None:
    # law 2: shards are upcast to fp32 on two GPUs or more
    machine = make_machine(vram="4TiB", gpus=2)
    model = catalogue_model("mistral-7b-v0.1")
    recipe = make_recipe(
        method="full",
        framework="hf-trainer",
        optimizer="adamw",
        mixed_precision="bf16",
        sharding="fsdp",
        context=512,
        micro_batch_size=1,
        checkpointing="full",
    )
    step = plan(model, recipe, machine).phase("step")
    size = sum(term.bytes for term in step.terms if term.name != "overhead")
    assert 2 * size / model.parameters == pytest.approx(20.0, abs=0.02)


def test_num_generations_alone_does_not_move_the_training_peak() -> None:
    # law 8
    eight = planned("llama-3.1-8b", **{**GRPO, "framework": "trl", "micro_batch_size": 8})
    sixteen = planned(
        "llama-3.1-8b",
        **{**GRPO, "framework": "trl", "micro_batch_size": 8, "num_generations": 16},
    )
    assert tensor_gib(eight) == tensor_gib(sixteen)


def test_a_large_vocabulary_moves_the_peak_into_the_loss() -> None:
    # law 9
    fields = {
        "method": "lora",
        "framework": "hf-trainer",
        "context": 4096,
        "micro_batch_size": 2,
        "checkpointing": "full",
    }
    assert planned("llama-3.1-8b", **fields).peak_phase == "loss"
    assert planned("mistral-7b-v0.1", **fields).peak_phase == "backward"


@pytest.mark.parametrize(
    ("fields", "per_token"),
    [
        ({"method": "lora", "lora": {"dtype": "bf16"}}, 45.8),
        ({"method": "full"}, 49.5),
        ({"method": "lora", "mixed_precision": "bf16"}, 53.8),
        ({"method": "full", "dtype": "fp32", "mixed_precision": "bf16"}, 60.0),
        ({"method": "lora"}, 73.0),
    ],
)
def test_one_layer_keeps_what_was_counted(fields: dict[str, object], per_token: float) -> None:
    # traced on CPU, in bytes per token and hidden unit; Llama-8B shapes
    model = catalogue_model("llama-3.1-8b")
    result = planned(
        "llama-3.1-8b",
        framework="hf-trainer",
        micro_batch_size=1,  # no padding, so no mask
        context=2048,
        checkpointing="none",
        **fields,
    )
    activations = next(t for t in result.phase("loss").terms if t.name == "activations")
    kept = {name: each for name, _, each in activations.args[0].acts.parts}
    kept_per_token = kept["layers' saved tensors"] / model.num_layers
    assert kept_per_token / model.hidden == pytest.approx(per_token, rel=0.02)
