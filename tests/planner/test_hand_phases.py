"""Which terms are alive in which phase, and the moments where a phase is largest, by hand.

The toy (tests/planner/toys.py), 16 tokens, 16 bit: weights 478,080; rank-8 adapters 24,576 parameters in fp32.
"""

from dataclasses import replace
from typing import Any

import pytest

from planner.machines.machine import make_machine
from planner.models.spec import ModelSpec
from planner.phases import budget
from planner.plan import plan
from planner.reserved import Reserved
from planner.run.logits_law import LogitsLaw
from planner.run.runfile import make_recipe
from tests.planner.toys import (
    A_GPU,
    LLAMA,
    PARAMETERS,
    TIED,
    TRAINING_CUBLAS,
    choices,
    gpus,
    host,
    planned,
    terms,
)

WEIGHTS = 478_080
LORA = 98_304
"""24,576 x 4 B; its gradients as many, AdamW's states twice."""
ADAPTED = {"method": "lora", "lora": {"rank": 8}, "checkpointing": "full", "optimizer": "adamw"}
TRAINED = {"method": "full", "checkpointing": "full", "optimizer": "adamw"}


def test_the_phases_of_lora() -> None:
    result = planned(**ADAPTED)
    assert [p.name for p in result.phases] == ["load", "forward", "loss", "backward", "step"]
    assert terms(result, "load") == {"weights": WEIGHTS, "adapters": LORA}
    fixed = {
        "weights": WEIGHTS,
        "adapters": LORA,
        "optimizer": 2 * LORA,
        "overhead": TRAINING_CUBLAS,
    }
    # positions 1,024, three inputs of 2,048, a layer without a graph less its own input
    assert terms(result, "forward") == {**fixed, "activations": 7_168 + 2_176 * 16 - 2_048}
    # 16 x 1,000 logits x 12 B in the loss's backward; the final norm 260 a token, its output gone
    loss = terms(result, "loss")
    assert loss == {**fixed, "activations": 7_168 + 260 * 16, "logits": 192_000}
    assert terms(result, "step") == {
        "weights": WEIGHTS,
        "adapters": LORA,
        "gradients": LORA,
        "optimizer": 2 * LORA + LORA,  # foreach's square roots
        "overhead": TRAINING_CUBLAS,
    }
    backward = terms(result, "backward")
    assert set(backward) == {*fixed, "activations", "gradients"}


def test_gradients_exist_from_the_start_when_they_accumulate() -> None:
    result = planned(**ADAPTED, gradient_accumulation=2)
    for phase in ("forward", "loss", "backward", "step"):
        assert terms(result, phase)["gradients"] == LORA
    assert "gradients" not in terms(result, "load")


def test_the_peak_is_the_largest_phase_and_the_capacity_what_the_context_leaves() -> None:
    result = planned(**ADAPTED)
    largest = max(result.phases, key=lambda phase: phase.total_bytes)
    assert (result.peak_phase, result.peak_bytes) == (largest.name, largest.total_bytes)
    assert result.peak_bytes == sum(term.bytes for term in largest.terms)
    machine = make_machine("h100-sxm")
    assert machine.gpu is not None
    on_card = planned(machine=machine, **ADAPTED)
    assert on_card.capacity_bytes == machine.vram_bytes - machine.context_bytes
    assert on_card.headroom_bytes == on_card.capacity_bytes - on_card.peak_bytes
    assert terms(on_card, "loss")["overhead"] == 2 * 32 * 2**20


def test_the_document_says_its_version() -> None:
    assert planned(**ADAPTED).to_dict()["schema_version"] == 1


def test_loading_quantises_one_weight_at_a_time() -> None:
    result = planned(method="qlora", lora={"rank": 8}, checkpointing="full")
    # the largest linear, 8,192, in 16 bit
    assert terms(result, "load")["overhead"] == 16_384
    assert terms(result, "loss")["overhead"] == TRAINING_CUBLAS
    stored = planned(method="lora", lora={"rank": 8}, quantization="gptq-4bit")
    assert "overhead" not in terms(stored, "load")


def test_litgpt_loads_the_whole_model_on_every_rank() -> None:
    two = {"machine": gpus(2), "sharding": "fsdp", "framework": "litgpt", "method": "lora"}
    result = planned(**two)
    whole = WEIGHTS + 2 * (128_064 + 36_992)  # and a gathered root and layer
    assert terms(result, "load")["overhead"] == whole
    assert terms(result, "load")["weights"] == WEIGHTS // 2


def test_full_fine_tuning_makes_the_heads_gradient_in_the_loss() -> None:
    result = planned(**TRAINED)
    # the logits' backward 192,000 and the norm 516 a token; the head's gradient 128,000 + 34,048 is less
    assert terms(result, "loss") == {
        "weights": WEIGHTS,
        "optimizer": 2 * WEIGHTS,
        "overhead": TRAINING_CUBLAS,
        "activations": 1_024 + 3 * 2_048 + 516 * 16,
        "logits": 192_000,
    }
    # with fewer bytes a logit it is the larger
    few = planned(**TRAINED, context=4)
    found = terms(few, "loss")
    assert found["gradients"] == 128_000
    assert found["logits"] == 4 * 1_064 * 2
    assert terms(result, "step")["gradients"] == WEIGHTS


def embedding(model: ModelSpec, context: int, **fields: Any) -> dict[str, int]:
    """Return the backward of a run whose largest moment is the embedding's."""
    return terms(
        planned(model, **{**TRAINED, "optimizer": "sgd", **fields}, context=context), "backward"
    )


def test_the_embeddings_gradient_comes_last() -> None:
    # all gradients, and the stream's 128 B a token
    found = embedding(LLAMA, 16)
    assert found["gradients"] == WEIGHTS
    assert found["activations"] == 128 * 16
    # tied: the head's gradient, the embedding's own, and their sum of 128,000 each; 350,080 + 2 x 128,000
    found = embedding(TIED, 16)
    assert found["gradients"] == 350_080 + 256_000
    assert found["activations"] == 128 * 16
    # under a fused loss the head's gradient is no view: one buffer less
    found = embedding(TIED, 16, framework="liger")
    assert found["gradients"] == 350_080 + 128_000


@pytest.mark.parametrize(
    ("model", "fields", "more"),
    [
        (LLAMA, {}, 128_000),  # the embedding's new gradient beside the one it is added to
        (TIED, {}, 3 * 128_000),  # the head's, the embedding's and their sum beside it
        (TIED, {"framework": "liger"}, 2 * 128_000),
        # our head adds its own into the one that is there
        (TIED, {"framework": "vramwise", "loss": "chunked"}, 128_000),
    ],
)
def test_an_accumulated_embeddings_gradient_is_made_beside_the_old_one(
    model: ModelSpec, fields: dict[str, Any], more: int
) -> None:
    found = embedding(model, 16, gradient_accumulation=2, **fields)
    whole = WEIGHTS if model is LLAMA else 350_080
    assert found["gradients"] == whole + more


@pytest.mark.parametrize(
    ("tokens", "scratch"),
    [
        (3_072, 0),
        # indices: 3 a token, 2 a run, 1 a partial row; 307 + 3,073 rows of 64 fp32 sums
        (3_073, 8 * 5 * 3_073 + (8 + 4 * 64) * 3_380),
    ],
)
def test_cuda_sorts_the_tokens_of_a_long_embedding_backward(tokens: int, scratch: int) -> None:
    # a vocabulary so large that its gradients outweigh any activation
    wide = replace(
        TIED,
        vocab=2**24,
        embeddings=(replace(TIED.embeddings[0], shapes=((2**24, 64),)),),
    )
    fields = {**TRAINED, "optimizer": "sgd", "framework": "liger", "context": tokens}
    found = terms(planned(wide, **fields), "backward")
    # 64 features x 2 B a token; above 3,072 tokens what sorting them takes
    assert found["activations"] == tokens * 128 + scratch


def test_sharding_keeps_the_root_unit_through_the_loss() -> None:
    two = {"machine": gpus(2), "sharding": "fsdp", **TRAINED}
    result = planned(**two)
    half = WEIGHTS // 2
    root, layer = 2 * 128_064, 2 * 36_992
    assert terms(result, "forward")["weights"] == half + root + layer
    assert terms(result, "loss")["weights"] == half + root
    assert terms(result, "backward")["weights"] == half + root + layer
    assert terms(result, "step")["weights"] == half
    assert terms(result, "step")["gradients"] == half


def test_grpo_rolls_out_and_scores() -> None:
    fields = {"task": "grpo", "num_generations": 8, "completion_length": 10, "prompt_length": 6,
              "context": None, "engine": {"kind": "transformers"}}  # fmt: skip
    result = planned(**ADAPTED, **fields)
    names = ["load", "rollout", "score", "forward", "loss", "backward", "step"]
    assert [p.name for p in result.phases] == names
    fixed = {
        "weights": WEIGHTS,
        "adapters": LORA,
        "optimizer": 2 * LORA,
        "overhead": TRAINING_CUBLAS,
    }
    # 8 sequences x 16 tokens x 384 B
    # the prompts' forward before it: 48 tokens of cache, embeddings and a layer, less what the cache grows by
    prompts = 48 * 384 + 48 * 128 + 48 * 2_176 - 8 * 16 * 384
    assert terms(result, "rollout") == {
        **fixed,
        "kv_cache": 8 * 16 * 384,
        "activations": prompts,
    }
    score = terms(result, "score")
    assert score["activations"] == 1_024 + 2_176 * 16
    assert set(score) == {*fixed, "activations", "logits"}


def test_dpo_asks_only_a_reference_it_has() -> None:
    with_it = planned(**ADAPTED, task="dpo")
    assert [p.name for p in with_it.phases][1] == "reference"
    fixed = {"weights", "adapters", "optimizer", "overhead"}
    # the policy's graph waits: its inputs and what its head saved; and the reference's own layer or head
    assert set(terms(with_it, "reference")) == fixed | {"activations", "logits"}
    without = planned(**ADAPTED, task="dpo", beta=0.0)
    assert "reference" not in [p.name for p in without.phases]


def test_what_outlives_a_step_is_there_in_the_next_forward() -> None:
    held = {"keeps_outputs": True, "frozen_embedding_leaf": True, "reentrant": False}
    holding, bare = (
        {
            phase.name: {term.name: term.bytes for term in phase.terms}
            for phase in budget(LLAMA, choices(switches=switches, **ADAPTED), A_GPU).phases
        }
        for switches in (held, {**held, "keeps_outputs": False})
    )
    # the embeddings' output made a leaf, 2,048, and its gradient
    assert holding["forward"]["activations"] - bare["forward"]["activations"] == 2 * 2_048
    assert holding["step"]["activations"] == 2 * 2_048
    assert "activations" not in bare["step"]


def test_the_hosts_share() -> None:
    offloaded = planned(**{**TRAINED, "checkpointing": "offload"}, optimizer_offload=True)
    # by DeepSpeed: fp32 master and states, fp32 gradients, a 16-bit copy, the largest gradient
    states, rest = 12 * PARAMETERS, 4 * PARAMETERS + 2 * PARAMETERS + 2 * 64_000
    assert host(offloaded) == {
        "activations": 2 * 2_048,
        "optimizer": states,
        "gradients": 4 * PARAMETERS,
        "weights": 2 * PARAMETERS + 2 * 64_000,
    }
    assert offloaded.host_peak_bytes == 4_096 + states + rest
    assert "optimizer" not in terms(offloaded, "step")
    assert host(planned(**TRAINED)) == {}


def test_a_host_that_is_too_small_does_not_fit() -> None:
    recipe = make_recipe(
        framework="hf-trainer", context=16, micro_batch_size=1, optimizer_offload=True, **TRAINED
    )
    need = 18 * PARAMETERS + 2 * 64_000
    for ram, fits in ((need, True), (need - 1, False)):
        machine = make_machine(vram="64GiB", host_ram=ram)
        assert plan(LLAMA, recipe, machine).fits is fits


def test_unified_memory_pays_for_what_the_host_holds() -> None:
    machine = make_machine("gb10")
    plain = planned(machine=machine, **TRAINED)
    moved = planned(machine=machine, **TRAINED, optimizer_offload=True)
    assert plain.capacity_bytes - moved.capacity_bytes == 18 * PARAMETERS + 2 * 64_000


def test_gradients_that_exist_when_the_last_layer_runs() -> None:
    # final norm and head of 239,040 parameters come first: 64,064 x 2 B exist; then the last layer's
    result = planned(**TRAINED, context=8192)
    found = terms(result, "backward")
    # tokens so many that a layer's largest moment wins: no weight gradient of its own but down's
    assert found["gradients"] == 2 * 64_064 + 16_384


def test_adapters_gradients_come_layer_by_layer() -> None:
    # the largest moment is the first layer's: two of three layers have theirs, of 24,576 x 4 B
    assert terms(planned(**ADAPTED), "backward")["gradients"] == 2 * 98_304 // 3


def test_autocasts_casts_are_there_in_the_losss_forward() -> None:
    law = LogitsLaw(kind="full", forward=(("a", "fp32"), ("b", "fp32")), backward=(("a", "fp32"),))
    r = choices(
        method="full", checkpointing="full", dtype="fp32", mixed_precision="bf16", context=64
    )
    phases = budget(LLAMA, replace(r, law=law), A_GPU).phases
    loss = next(phase for phase in phases if phase.name == "loss")
    held = {term.name: term.bytes for term in loss.terms}
    # 64 positions x 16 in fp32 twice, three inputs of 256 a token; the norm's fp32 input, 4, its result and
    # output; 16-bit casts of 110,592 weights
    assert held["activations"] == 2 * 64 * 64 + (3 * 256 + 772) * 64 + 2 * 110_592


def test_a_plan_above_the_card_is_certain() -> None:
    small = planned(machine=make_machine(vram="0.525GiB"), **TRAINED)
    assert small.peak_bytes > small.capacity_bytes
    assert small.risk.p_oom == 1.0


def test_a_search_leaves_a_tenth_for_fragments() -> None:
    result = planned(**TRAINED)
    spread = result._spread("allocated").quantile(1 - result.risk_allowed)
    enough = int(result.peak_bytes * 1.1 * spread) + 1
    assert replace(result, capacity_bytes=enough).has_room
    assert not replace(result, capacity_bytes=enough - 2).has_room


def test_the_lower_end_holds_what_is_there_for_certain() -> None:
    fields = {"task": "grpo", "num_generations": 512, "completion_length": 2_000, "prompt_length": 48,
              "context": None, "engine": {"kind": "transformers"}}  # fmt: skip
    result = planned(**ADAPTED, **fields)
    # 512 sequences x 2,048 tokens x 384 B of cache stand beside weights, adapters and their states
    certain = WEIGHTS + LORA + 2 * LORA + 512 * 2_048 * 384
    assert result._standing_bytes == certain
    assert certain <= result.low_bytes <= result.reserved_peak_bytes
    # an allocator that holds nothing beside it: the spread alone would say 95% of what is there
    result.__dict__["reserved"] = Reserved(certain, certain, certain)
    assert result._spread("reserved").quantile(0.05) < 1
    assert result.low_bytes == certain
