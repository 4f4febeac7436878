"""What the doctor says a run holds is the planner's figure, and is proven only where the model is known."""

import pytest

from planner.doctor.cause import Certainty
from planner.doctor.context import Context, read_context
from planner.doctor.diagnose import diagnose
from planner.doctor.state import (
    kbit_upcast_bytes,
    sampler_bytes,
    saved_bytes,
    static_state,
    weights_bytes,
)
from planner.machines.machine import make_machine
from planner.models.hub import find_model
from planner.plan import plan
from planner.run.recipe import Method, Optimizer, Recipe
from planner.terms.standing import model_of_size
from planner.units import GiB

BILLION = 10**9


def known(name, **fields):
    model = find_model(name)
    return Context(model=model, model_name=name, parameters=model.parameters, **fields)


def test_a_served_checkpoint_has_its_stored_size():
    # 4.25 bits for the experts, 16 for the rest: about 61 GiB, not 117 B parameters x 2 B = 217
    size = weights_bytes(known("gpt-oss-120b", task="serve"))
    served = plan(find_model("gpt-oss-120b"), Recipe(task="serve"), make_machine("h200"))
    weights = sum(t.bytes for t in served.phase("load").terms if t.name == "weights")
    assert size == weights
    assert 58 * GiB < size < 66 * GiB


def test_an_mxfp4_checkpoint_that_fits_is_not_called_too_large():
    text = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`\nmodel: openai/gpt-oss-120b\nvllm serve"
    cause = diagnose(text, gpu="h100").failures[0].causes[0]
    assert cause.category == "vllm_no_cache_blocks"
    assert cause.certainty is not Certainty.PROVEN


def test_static_state_of_full_fine_tuning_by_hand():
    # 7e9 parameters in 16 bit: 2 weight + 2 gradient + 4 Adam = 8 B; fp32: 4 + 4 + 8 = 16 B
    state = static_state(Context(parameters=7 * BILLION, method="full", task="sft"))
    assert (state.low_bytes, state.high_bytes) == (56 * BILLION, 112 * BILLION)
    assert not state.exact


def test_zero3_divides_all_of_it_by_hand():
    context = Context(parameters=8 * BILLION, method="full", sharding="zero3", numbers={"gpus": 4})
    # DeepSpeed's engine: 2 B weight + 2 B gradient + 4 B master + 8 B Adam = 16 B, over 4 ranks
    assert static_state(context).low_bytes == 8 * BILLION * 16 // 4


def test_sharding_without_a_number_of_ranks_says_nothing():
    assert static_state(Context(parameters=BILLION, method="full", sharding="zero3")) is None


def test_ppo_holds_two_trained_and_two_frozen_models_by_hand():
    state = static_state(Context(parameters=BILLION, task="ppo"))
    assert state.low_bytes == 2 * 8 * BILLION + 2 * 2 * BILLION


def test_static_state_of_a_known_model_is_the_plans():
    state = static_state(known("llama-3.1-8b", method="lora"))
    recipe = Recipe(
        method="lora", framework="hf-trainer", dtype="bf16", optimizer="adamw", context=1
    )
    result = plan(find_model("llama-3.1-8b"), recipe, make_machine("h100"))
    phases = {"forward": ("weights", "adapters", "optimizer"), "step": ("gradients",)}
    expected = sum(
        term.bytes
        for name, terms in phases.items()
        for term in result.phase(name).terms
        if term.name in terms
    )
    assert state.low_bytes == state.high_bytes == expected
    assert state.exact


def test_savings_are_the_difference_of_two_plans_by_hand():
    context = Context(parameters=7 * BILLION, method="full")
    matrices = 7 * BILLION // 4096**2 * 4096**2
    # 16-bit states 2 x 2 B; 8-bit ones 2 x (1 + 4/256) B; the rest is a small vector of its own
    expected = matrices * (4 - 2 * (1 + 4 / 256))
    assert saved_bytes(context, optimizer=Optimizer.ADAMW_8BIT) == pytest.approx(expected, rel=1e-3)
    assert saved_bytes(Context(), method=Method.QLORA) is None


def test_a_size_read_from_a_name_proves_nothing():
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB\nfull fine-tuning SFT of model: acme/thing-70B\nbackward"
    causes = diagnose(text).failures[0].causes
    state = next(cause for cause in causes if cause.category == "static_state")
    assert state.certainty is Certainty.CONSISTENT


@pytest.mark.parametrize("parameters", [1, 1000, 4096**2, 7 * BILLION + 3])
def test_a_stand_in_has_exactly_that_many_parameters(parameters):
    assert model_of_size(parameters).parameters == parameters


def test_context_reads_the_size_of_an_unknown_model():
    assert read_context("model: acme/thing-70B SFT").parameters == 70 * BILLION


def test_kbit_preparation_makes_embeddings_and_head_fp32_by_hand():
    # Llama-3.1-8B: 2 x 128,256 x 4,096 x 4 B, and 65 norms of 4,096 x 4 B
    size = kbit_upcast_bytes(known("llama-3.1-8b", method="qlora", task="sft"))
    assert size == 2 * 128_256 * 4096 * 4 + 65 * 4096 * 4


def test_the_sorting_sampler_holds_its_buffers_by_hand():
    # 16-bit and fp32 logits 2 + 4, sorted 4 + 8, unsorted indices 8, the radix sort's copy 4 + 8
    assert sampler_bytes(Context(), 1024, 100_000) == 1024 * 100_000 * 38
