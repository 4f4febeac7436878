"""On GPUs: vLLM's weight transfer with its own wires, to a server on another card and to one on the same."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from planner.run.recipe import Method, Recipe
from tests.trainer.serving import save_word_tokenizer, serving
from trainer.engines.protocol import SamplingSettings
from trainer.engines.vllm_server import VllmServerEngine
from trainer.model import Policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a card a rank")
EOS = 1


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
        max_position_embeddings=512,
        eos_token_id=EOS,
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(path)
    save_word_tokenizer(path, 1024)
    return str(path)


@torch.no_grad()
def gap(engine, model):
    """Return the mean difference of the server's log-probabilities from the policy's, per token."""
    prompt = list(range(5, 60))
    asked = SamplingSettings(num_generations=4, max_new_tokens=32, seed=3)
    differences = []
    for made in engine.generate([prompt], asked):
        ids = torch.tensor([[*prompt, *made.token_ids]], device="cuda:0")
        scores = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        ours = scores[range(len(made.token_ids)), list(made.token_ids)].cpu()
        differences.append((ours - torch.tensor(made.logprobs)).abs().mean().item())
    return max(differences)


@pytest.mark.parametrize("transfer", [pytest.param("nccl", marks=TWO), "ipc"])
def test_trained_weights_reach_the_server(folder, tmp_path, transfer):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda:0")
    policy = Policy(
        model=model,
        tokenizer=SimpleNamespace(eos_token_id=EOS),
        method=Method.FULL,
        source=folder,
        revision=None,
        dtype=torch.bfloat16,
        device=torch.device("cuda:0"),
    )
    flags = (
        *("--enforce-eager", "--gpu-memory-utilization", "0.3"),
        *("--max-model-len", "256", "--logprobs-mode", "processed_logprobs"),
        *("--weight-transfer-config", f'{{"backend": "{transfer}"}}'),
    )
    environment = {
        "CUDA_VISIBLE_DEVICES": "1" if transfer == "nccl" else "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    with serving(folder, tmp_path, *flags, **environment) as url:
        asked = Recipe(
            task="grpo",
            method="full",
            context=128,
            engine={"kind": "vllm-server", "url": url, "transfer": transfer},
        )
        engine = VllmServerEngine(policy, recipe=asked)
        assert gap(engine, model) < 0.1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        assert gap(engine, model) > 0.1
        held = torch.cuda.memory_allocated(0)
        torch.cuda.reset_peak_memory_stats(0)
        engine.update_weights()
        largest = max(parameter.nbytes for parameter in model.parameters())
        assert torch.cuda.max_memory_allocated(0) - held <= 2 * largest
        assert gap(engine, model) < 0.1
        engine.close()
