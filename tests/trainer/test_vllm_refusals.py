"""Engines that must not start, or must not share: each says why and what to do instead.

A file of its own: vLLM keeps process-wide groups, and these engines need them fresh.
"""

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MixtralConfig

from planner.errors import UsageError
from planner.run.recipe import Method, Recipe
from tests.trainer.policies import policy_over
from trainer.engines.vllm_push import VllmPushEngine
from trainer.engines.vllm_shared import VllmSharedEngine

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]


def make_folder(path, config):
    AutoModelForCausalLM.from_config(config).float().save_pretrained(path)
    return str(path)


def recipe(**engine):
    return Recipe(task="grpo", method="full", context=256, engine={"max_num_seqs": 8, **engine})


SMALL = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def test_a_mixture_of_experts_is_refused_with_the_reason(tmp_path):
    config = MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
    folder = make_folder(tmp_path / "mixtral", config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with pytest.raises(UsageError, match="mixture of experts") as caught:
        VllmSharedEngine(policy_over(folder, model, Method.FULL), recipe=recipe())
    assert "vllm-push" in caught.value.hint


def test_an_engine_that_cannot_start_says_what_to_change(tmp_path):
    folder = make_folder(tmp_path / "llama", LlamaConfig(**SMALL))
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(UsageError, match="vLLM cannot start") as caught:
        VllmPushEngine(policy_over(folder, model, Method.FULL), recipe=recipe(kv_bytes=4096))
    assert "kv_bytes" in caught.value.hint


def test_without_a_length_the_engine_is_not_started(tmp_path):
    folder = make_folder(tmp_path / "llama", LlamaConfig(**SMALL))
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(UsageError, match="longest sequence"):
        VllmPushEngine(
            policy_over(folder, model, Method.FULL), recipe=Recipe(task="grpo", method="full")
        )


def test_the_caches_dtype_and_block_are_what_was_asked_for(tmp_path):
    """fp8 keys and values are a quarter of fp32's: the same pool holds four times the tokens."""
    from trainer.engines.protocol import SamplingSettings
    from trainer.engines.vllm_llm import reported_kv_tokens

    folder = make_folder(tmp_path / "llama", LlamaConfig(**SMALL))
    model = AutoModelForCausalLM.from_pretrained(folder)
    asked = {"kv_bytes": 2**20, "kv_dtype": "fp8", "block_size": 64, "max_num_seqs": 2}
    engine = VllmPushEngine(policy_over(folder, model, Method.FULL), recipe=recipe(**asked))
    cache = engine.llm.llm_engine.vllm_config.cache_config
    assert (cache.cache_dtype, cache.block_size) == ("fp8", 64)
    assert reported_kv_tokens(engine.llm) == 2**20 // 256, "2 x 128 B a token, not 4 x that"
    settings = SamplingSettings(temperature=1.0, num_generations=2, max_new_tokens=4, seed=1)
    made = engine.generate([(5, 6, 7)], settings)
    engine.close()
    assert [len(completion.token_ids) > 0 for completion in made] == [True, True]


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"kv_dtype": "fp16"}, "kv_dtype: fp16 is not what vLLM can hold beside fp32 weights"),
        ({"block_size": 20}, "block_size: 20 tokens fit no attention kernel"),
    ],
)
def test_a_cache_that_no_kernel_reads_is_refused(tmp_path, engine, said):
    folder = make_folder(tmp_path / "llama", LlamaConfig(**SMALL))
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(UsageError, match=said):
        VllmPushEngine(policy_over(folder, model, Method.FULL), recipe=recipe(**engine))
