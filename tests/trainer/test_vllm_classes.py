"""A policy whose architecture vLLM runs on transformers' own classes trains beside it."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from transformers import AutoModelForCausalLM, SmolLM3Config, SmolLM3Model

from planner.run.recipe import Method, Recipe
from planner.units import MiB
from trainer.engines.protocol import SamplingSettings
from trainer.engines.vllm_llm import vllm_model
from trainer.engines.vllm_push import VllmPushEngine
from trainer.model import Policy

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]


def test_vllm_leaves_transformers_classes_to_the_policy(tmp_path):
    config = SmolLM3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=2,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    model.save_pretrained(tmp_path)
    before = (SmolLM3Model.__init__, SmolLM3Model.__call__, SmolLM3Model.__bases__)
    policy = Policy(
        model=model,
        tokenizer=SimpleNamespace(eos_token_id=1),
        method=Method.FULL,
        source=str(tmp_path),
        revision=None,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    recipe = Recipe(
        task="grpo",
        context=128,
        method="full",
        engine={"kv_bytes": 16 * MiB, "max_num_seqs": 4},
    )
    compiles = torch._dynamo.config.disable
    engine = VllmPushEngine(policy, recipe=recipe)  # compares log-probs of both when it is built
    try:
        assert (SmolLM3Model.__init__, SmolLM3Model.__call__, SmolLM3Model.__bases__) == before
        theirs = [type(part) for part in vllm_model(engine.llm).modules()]
        (twin,) = (kind for kind in theirs if issubclass(kind, SmolLM3Model))
        assert twin is not SmolLM3Model
        settings = SamplingSettings(num_generations=2, max_new_tokens=3)
        assert len(engine.generate([list(range(3, 20))], settings)) == 2
        model(input_ids=torch.tensor([[3, 4, 5]])).logits.sum().backward()
        AutoModelForCausalLM.from_config(config)
        assert torch._dynamo.config.disable == compiles
    finally:
        engine.close()
