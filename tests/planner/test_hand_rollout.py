"""A rollout by transformers and a packed mask by hand: what a plan of training holds of them."""

from typing import Any

import pytest

from planner.layer.costs import no_grad_costs
from planner.layer.tape import largest
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.plan import plan
from planner.replay.player import Player
from planner.replay.rollout import play_rollout
from planner.run.resolve import resolve
from planner.run.runfile import make_recipe
from planner.terms.activations import activations, masks, op_settings
from planner.terms.generation import rolling
from planner.terms.kv_cache import sequence_bytes
from tests.planner.toys import LLAMA, choices
from trainer.engines.transformers import PREFILL_TOKENS

GRPO: dict[str, Any] = {
    "task": "grpo",
    "method": "lora",
    "engine": {"kind": "transformers"},
    "micro_batch_size": 8,
    "num_generations": 8,
    "dtype": "bf16",
}


def test_generate_reads_the_prompt_of_every_completion_at_once() -> None:
    r = choices(**GRPO, framework="trl==1.9", context=528, prompt_length=512, completion_length=16)
    full, short = (8 * sequence_bytes(LLAMA, tokens, "bf16") for tokens in (528, 512))
    settings = op_settings(LLAMA, r)
    layer = largest(no_grad_costs(LLAMA.layers[0], 64, settings), 4096).at(4096)
    # 4,096 tokens: their embeddings of 64 x 2 B beside the layer at work, and the cache as it is then
    assert rolling(LLAMA, r).bytes == short + 4096 * 128 + layer - full


def test_our_engine_reads_a_group_s_prompt_once() -> None:
    r = choices(**GRPO, framework="vramwise", context=528, prompt_length=512, completion_length=16)
    full = 8 * sequence_bytes(LLAMA, 528, "bf16")
    one = largest(no_grad_costs(LLAMA.layers[0], 64, op_settings(LLAMA, r, 8)), 8).at(8)
    # a layer's keys and values of the prompt, of which eight rows are made; 16 tokens are written in place
    prompts = sequence_bytes(LLAMA, 512, "bf16") // 3
    assert prompts > one
    assert rolling(LLAMA, r).bytes == prompts
    short = choices(**GRPO, framework="vramwise", context=24, prompt_length=8, completion_length=16)
    # of a short prompt less than what a layer of a token holds
    assert sequence_bytes(LLAMA, 8, "bf16") // 3 < one == rolling(LLAMA, short).bytes
    copied = choices(
        **GRPO, framework="vramwise", context=528, prompt_length=512, completion_length=16,
        switches={"generates_in_place": False},
    )  # fmt: skip
    # else the keys of one of three layers are copied for the last token
    assert rolling(LLAMA, copied).bytes == full // 6 + one
    # sixteen held-out prompts are different ones: read 2,048 tokens at a time, no more
    settings = op_settings(LLAMA, r, 2048)
    tokens = largest(no_grad_costs(LLAMA.layers[0], 64, settings), 2048).at(2048)
    cache = 16 * sequence_bytes(LLAMA, 512, "bf16")
    assert rolling(LLAMA, r, prompts=16).bytes == cache + 2048 * 128 + tokens - full
    assert r.switches.prefill_tokens == PREFILL_TOKENS


def test_a_rollout_of_the_plan_has_it_and_other_engines_do_not() -> None:
    recipe = make_recipe(
        **GRPO, framework="trl==1.9", context=528, prompt_length=512, completion_length=16
    )
    found = plan(LLAMA, recipe, make_machine("h100-sxm"))
    terms = {term.name: term.bytes for term in found.phase("rollout").terms}
    assert terms["activations"] == rolling(LLAMA, found.resolved).bytes > 0
    served = choices(**{**GRPO, "engine": {"kind": "vllm-push"}}, framework="trl==1.9")
    assert rolling(LLAMA, served).bytes == 0


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_packed_mask_lives_as_long_as_the_layers_that_saved_it(checkpointing: str) -> None:
    r, plain = (
        choices(
            task="sft", method="lora", framework="vramwise", context=512, packing=packing,
            checkpointing=checkpointing, micro_batch_size=1, attention="sdpa",
        )
        for packing in (True, False)
    )  # fmt: skip
    mask = masks(LLAMA, r, op_settings(LLAMA, r))
    assert mask == 2 * 512 * 512
    with_it, without = (activations(LLAMA, one, 512) for one in (r, plain))
    repeated = with_it.kept - without.kept - mask  # keys and values for every query head
    assert repeated == (0 if checkpointing == "full" else 3 * 512 * 2 * 64)
    for moment, other in zip(with_it.backward, without.backward, strict=True):
        assert moment.activations - other.activations >= mask


def test_torch_saves_the_additive_mask_that_attention_is_given() -> None:
    import torch

    q, k, v = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))
    mask, seen = torch.zeros(1, 1, 16, 16), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: seen.append(tensor.untyped_storage().data_ptr()) or tensor, lambda kept: kept
    ):
        torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert mask.untyped_storage().data_ptr() in seen


def test_layers_with_a_window_copy_no_more_than_it() -> None:
    spec = catalogue_model("gemma-3-1b")
    recipe = make_recipe(**GRPO, context=32768)
    r = resolve(spec, recipe, make_machine("h100-sxm"))
    player = Player()
    play_rollout(spec, r, player)
    # by default vramwise has room for all from the start: only windows of 512 tokens are copied
    assert player.device.peak_allocated_bytes <= 8 * sequence_bytes(spec, 32768) + 8 * 512 * 256 * 2
    growing = make_recipe(**GRPO, context=32768, framework="trl==1.9")
    play_rollout(spec, resolve(spec, growing, make_machine("h100-sxm")), player := Player())
    # the whole cache, and beside it the longest layer's keys once more
    whole = 8 * sequence_bytes(spec, 32768, "bf16")
    longest = 8 * 32768 * 256 * 2
    assert whole < player.device.peak_allocated_bytes <= whole + longest


def test_a_window_longer_than_the_sequence_is_copied_all_the_same() -> None:
    """transformers gives a layer with a window a cache that copies, whatever the length."""
    spec = catalogue_model("gemma-3-1b")
    r = resolve(spec, make_recipe(**GRPO, context=256, prompt_length=128), make_machine("h100-sxm"))
    one = largest(no_grad_costs(spec.layers[0], spec.hidden, op_settings(spec, r, 8)), 8)
    # eight rows' keys of 256 tokens, one head of 256, in bf16, beside a layer of eight tokens
    assert rolling(spec, r).bytes >= 8 * 256 * 256 * 2 + int(one.per_token * 8)
