"""On a GPU: memory is given back while training, shared weights stay where they are, pushed ones come back."""

import gc
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from planner.run.recipe import Method, Recipe
from planner.units import GiB
from trainer.engines.protocol import SamplingSettings
from trainer.engines.vllm_push import VllmPushEngine
from trainer.engines.vllm_shared import VllmSharedEngine
from trainer.model import Policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

KV_BYTES = 2 * GiB
SAMPLING = SamplingSettings(num_generations=2, max_new_tokens=16, seed=1)


@pytest.fixture(scope="module", autouse=True)
def needs_vllm():
    pytest.importorskip("vllm", reason="vLLM is not installed")


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


@pytest.fixture
def ballast():
    """A tenth of the card: more than what vLLM's default share of 0.92 leaves to others."""
    total = torch.cuda.get_device_properties(0).total_memory
    held = [torch.empty(total // 10, dtype=torch.uint8, device="cuda")]
    yield
    held.clear()
    gc.collect()
    torch.cuda.empty_cache()


def policy_of(folder, model):
    return Policy(
        model=model,
        tokenizer=SimpleNamespace(eos_token_id=1),
        method=Method.FULL,
        source=folder,
        revision=None,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
    )


def recipe(**engine):
    return Recipe(
        task="grpo",
        method="full",
        context=1024,
        engine={"kv_bytes": KV_BYTES, "max_num_seqs": 8, **engine},
    )


def train(model):
    """Move every weight a little, in place, after a real backward."""
    ids = torch.tensor([[5, 6, 7, 8]], device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.grad)
    model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["eager", "cuda graphs"])
def test_kv_memory_comes_back_for_training(folder, ballast, cuda_graphs):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
        )
    engine = VllmSharedEngine(policy_of(folder, model), recipe=recipe(cuda_graphs=cuda_graphs))
    try:
        assert engine.llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        for _ in range(3):
            engine.generate([[5, 6, 7]], SAMPLING)
            pointers = [p.data_ptr() for p in model.parameters()]
            before = torch.cuda.mem_get_info()[0]
            engine.release()
            freed = torch.cuda.mem_get_info()[0] - before
            assert freed > 0.95 * KV_BYTES
            train(model)
            engine.resume()
            assert [p.data_ptr() for p in model.parameters()] == pointers
            engine.update_weights()
            engine.check("after a step")
            first = engine.generate([[5, 6, 7]], SAMPLING)
            assert engine.generate([[5, 6, 7]], SAMPLING) == first
    finally:
        engine.close()


@pytest.mark.parametrize("level", [1, 2])
def test_a_pushed_copy_sleeps_and_comes_back(folder, ballast, level):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda")
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    engine = VllmPushEngine(policy_of(folder, model), recipe=recipe(sleep_level=level))
    try:
        for _ in range(3):
            before = torch.cuda.mem_get_info()[0]
            engine.release()
            freed = torch.cuda.mem_get_info()[0] - before
            assert freed > 0.95 * (KV_BYTES + weights)
            train(model)
            engine.resume()
            engine.update_weights()
            engine.check("after a step")
            engine.generate([[5, 6, 7]], SAMPLING)
    finally:
        engine.close()
