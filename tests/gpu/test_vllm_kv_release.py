"""On a GPU: KV memory is given back while training, and the shared weights stay where they are."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from planner.run.recipe import Method, Recipe
from planner.units import GiB
from trainer.engines.protocol import SamplingSettings
from trainer.engines.vllm_shared import VllmSharedEngine
from trainer.model import Policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

KV_BYTES = 2 * GiB


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen2")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        eos_token_id=1,
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["eager", "cuda graphs"])
def test_kv_memory_comes_back_for_training(folder, cuda_graphs):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
        )
    policy = Policy(
        model=model,
        tokenizer=SimpleNamespace(eos_token_id=1),
        method=Method.FULL,
        source=folder,
        revision=None,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
    )
    recipe = Recipe(
        task="grpo",
        method="full",
        context=1024,
        engine={"kv_bytes": KV_BYTES, "max_num_seqs": 8, "cuda_graphs": cuda_graphs},
    )
    engine = VllmSharedEngine(policy, recipe=recipe)
    sampling = SamplingSettings(num_generations=2, max_new_tokens=16, seed=1)
    try:
        for _ in range(3):
            first = engine.generate([[5, 6, 7]], sampling)
            pointers = [p.data_ptr() for p in model.parameters()]
            before = torch.cuda.mem_get_info()[0]
            engine.release()
            freed = torch.cuda.mem_get_info()[0] - before
            assert freed > 0.95 * KV_BYTES
            ids = torch.tensor([[5, 6, 7, 8]], device="cuda")
            model(input_ids=ids, labels=ids).loss.backward()
            model.zero_grad(set_to_none=True)
            engine.resume()
            assert [p.data_ptr() for p in model.parameters()] == pointers
            engine.update_weights()
            assert engine.generate([[5, 6, 7]], sampling) == first
    finally:
        engine.close()
