"""The share of the card that vLLM is told, through vLLM's own start-up check with stated figures."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from planner.errors import UsageError
from planner.machines.machine import Machine
from planner.models.hub import find_model
from planner.plan import plan
from planner.run.recipe import Method, Recipe
from planner.units import GiB, MiB
from trainer.engines.vllm_memory import engine_parts, memory_share
from trainer.model import Policy

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]

TOTAL = 80 * GiB - 12_345_678
"""Not a round number: shares are floats."""


def request(free_bytes, share=None):
    """Return what vLLM takes for its own: its real check, on a snapshot of stated figures."""
    from vllm.config import CacheConfig
    from vllm.utils.mem_utils import MemorySnapshot
    from vllm.v1.worker.utils import request_memory

    snapshot = MemorySnapshot(
        free_memory=free_bytes, total_memory=TOTAL, device="cuda:0", auto_measure=False
    )
    config = CacheConfig() if share is None else CacheConfig(gpu_memory_utilization=share)
    return request_memory(snapshot, config)


PARTS = {"weights": 15 * GiB, "KV cache": 8 * GiB, "rest": 3 * GiB + 7}
NEEDED = sum(PARTS.values())


def test_vllms_default_share_refuses_any_policy_that_is_loaded():
    with pytest.raises(ValueError, match="is less than desired GPU memory utilization"):
        request(TOTAL - 16 * GiB)


@pytest.mark.parametrize("free", [TOTAL - 16 * GiB, 40 * GiB, NEEDED + 1])
def test_vllm_starts_where_what_it_needs_is_free(free):
    share = memory_share(PARTS, free_bytes=free, total_bytes=TOTAL, name="Some GPU")
    assert NEEDED <= request(free, share) <= NEEDED + 1


def test_no_free_size_passes_ours_and_fails_vllms():
    for free in range(NEEDED + 1, TOTAL, 1_234_567_891):
        parts = PARTS | {"rest": free - 1 - 23 * GiB}  # all but one byte of what is free
        request(free, memory_share(parts, free_bytes=free, total_bytes=TOTAL, name="Some GPU"))


def test_a_card_that_others_half_fill_is_one_line_with_the_numbers():
    with pytest.raises(UsageError) as caught:
        memory_share(PARTS, free_bytes=11 * GiB, total_bytes=24 * GiB, name="Some GPU")
    message = caught.value.message
    assert "vLLM needs 26.00 GiB on Some GPU" in message
    assert "11.00 GiB of 24.00 GiB are free" in message
    assert "weights 15.00 GiB, KV cache 8.00 GiB, rest 3.00 GiB" in message
    assert "\n" not in message
    assert "transformers" in caught.value.hint


@pytest.mark.parametrize("kind", ["vllm-shared", "vllm-push"])
@pytest.mark.parametrize("planned", [True, False])
def test_what_vllm_needs_is_its_weights_its_cache_and_the_plans_rest(tmp_path, kind, planned):
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    policy = Policy(
        model=model,
        tokenizer=SimpleNamespace(),
        method=Method.LORA,
        source=str(tmp_path),
        revision=None,
        dtype=torch.float32,
        device=torch.device("cuda"),
    )
    recipe = Recipe(task="grpo", dtype="fp32", context=256, engine={"kind": kind})
    made = plan(find_model(str(tmp_path)), recipe, Machine(vram_bytes=TOTAL))
    parts = engine_parts(
        policy,
        recipe=recipe,
        plan=made if planned else None,
        kv_bytes=64 * MiB,
        total_bytes=TOTAL,
    )
    weights, cache, rest = parts.values()
    # vLLM is started in the policy's dtype, in fp32 too
    assert weights == sum(p.numel() * 4 for p in model.parameters())
    assert cache == 64 * MiB
    terms = {term.name: term.bytes for term in made.phase("rollout").terms}
    # whatever the engine holds beside weights and cache, the same for both kinds
    copy = weights // 2 if kind == "vllm-push" else 0  # the planner's copy is 16 bits wide
    assert rest == terms["engine"] - copy
    assert rest > 0
