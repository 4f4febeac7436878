"""A real `vllm serve` in a process of its own: adapters and full weights reach it over HTTP."""

import json
import urllib.request

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config

from planner.errors import UsageError, VramwiseError
from planner.models.hub import find_model
from planner.run.parallel import layout_of
from planner.run.recipe import Method, Recipe
from tests.trainer import store_wire
from tests.trainer.parallel.gloo import free_port, on_ranks
from tests.trainer.policies import policy_over
from tests.trainer.serving import save_word_tokenizer, serving
from trainer.engines import vllm_transfer
from trainer.engines.protocol import SamplingSettings
from trainer.engines.vllm_server import VllmServerEngine
from trainer.model import load_policy
from trainer.parallel.sharding import over_ranks, shard_policy

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]


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
    save_word_tokenizer(path, 256)
    return str(path)


@pytest.fixture(scope="module")
def started(folder, tmp_path_factory):
    flags = (
        *("--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "8", "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(16 * 2**20)),
        *("--enable-lora", "--max-loras", "1", "--max-lora-rank", "8"),
        *("--logprobs-mode", "processed_logprobs"),
        *("--weight-transfer-config", '{"backend": "nccl"}'),
        *("--worker-extension-cls", "tests.trainer.store_wire.Worker"),
    )
    with serving(folder, tmp_path_factory.mktemp("log"), *flags, TORCHDYNAMO_DISABLE="1") as url:
        yield url


@pytest.fixture
def server(started, folder):
    """The server with its base as it was, whatever the tests before have sent it."""
    reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
    post(started, "/collective_rpc", reload)
    return started


def post(url, path, body):
    request = urllib.request.Request(
        url + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=60).read()


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
        policy_over(folder, model, Method.LORA), recipe=recipe(server, "lora")
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
    engine = VllmServerEngine(policy_over(folder, full, Method.FULL), recipe=recipe(server, "full"))
    agrees(engine, full)
    engine.close()


@pytest.fixture
def wire(server, monkeypatch):
    """vLLM's NCCL transfer over a store, here and in the server's worker; a policy on a CPU is let through."""
    store_wire.install(monkeypatch.setattr)
    monkeypatch.setattr(vllm_transfer, "check_policy", lambda policy, kind: None)
    post(server, "/collective_rpc", {"method": "use_store_wire"})


@pytest.mark.parametrize("method", ["full", "lora"])
def test_all_weights_reach_the_server_by_vllms_own_transfer(server, folder, wire, method):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if method == "lora":
        torch.manual_seed(1)
        model = get_peft_model(
            model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        )
    policy = policy_over(folder, model, Method(method))
    asked = recipe(server, method, engine={"url": server, "transfer": "nccl"})
    engine = VllmServerEngine(policy, recipe=asked)
    try:
        agrees(engine, model)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
        with pytest.raises(AssertionError):
            agrees(engine, model)
        engine.update_weights()
        agrees(engine, model)
        sent = engine._sender._engine.model_update_group.sizes
        base = policy.base.state_dict() if method == "full" else dict(engine._sender._source)
        assert len(sent) == 2 * len(base)  # a tensor at a time, twice
        assert max(sent) == max(tensor.nbytes for tensor in base.values())
    finally:
        engine.close()


def sent_from_two(ranks, folder, url, method):
    store_wire.install()
    vllm_transfer.check_policy = lambda policy, kind: None
    wanted = recipe(
        url, method, sharding="fsdp2", dtype="fp32", lora={"rank": 4},
        engine={"url": url, "transfer": "nccl"},
    )  # fmt: skip
    policy = load_policy(folder, recipe=wanted)
    layout = layout_of(find_model(folder), wanted, ranks.size)
    policy = shard_policy(policy, over_ranks(wanted, ranks.size), layout, ranks)
    engine = VllmServerEngine(policy, recipe=wanted)
    torch.manual_seed(ranks.rank)
    with torch.no_grad():
        for _, rows in policy.stepped():
            rows.add_(torch.randn_like(rows) * 0.1)
    engine.update_weights()
    agrees(engine, lambda input_ids: policy.whole(lambda: policy.model(input_ids=input_ids)))
    ranks.barrier()
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_first_of_two_ranks_sends_what_both_hold(server, folder, wire, method):
    on_ranks(2, sent_from_two, folder, server, method)


def test_a_transfer_that_cannot_be_is_refused_before_anything_waits(server, folder, monkeypatch):
    def start(method="full", transfer="nccl", url=server):
        model = AutoModelForCausalLM.from_pretrained(folder)
        asked = recipe(url, method, engine={"url": url, "transfer": transfer})
        VllmServerEngine(policy_over(folder, model, Method(method)), recipe=asked)

    with pytest.raises(
        UsageError, match="nccl sends from a GPU, and the policy is on cpu"
    ) as caught:
        start()
    assert caught.value.hint == "transfer: folder"
    with pytest.raises(UsageError, match="a 4-bit base has none to merge into"):
        start(method="qlora")
    monkeypatch.setattr(vllm_transfer, "check_policy", lambda policy, kind: None)
    with pytest.raises(
        UsageError, match="transfer: ipc, but the server takes weights by nccl"
    ) as caught:
        start(transfer="ipc")
    assert '--weight-transfer-config \'{"backend": "ipc"}\'' in caught.value.hint


def test_a_sender_that_fails_is_one_line(server, folder, wire, monkeypatch):
    def fails():
        raise RuntimeError("NCCL error: unhandled system error\nand its stack")

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = recipe(server, "full", engine={"url": server, "transfer": "nccl"})
    engine = VllmServerEngine(policy_over(folder, model, Method.FULL), recipe=asked)
    monkeypatch.setattr(engine._sender._engine.client, "start_weight_update", fails)
    try:
        with pytest.raises(VramwiseError) as caught:
            engine.update_weights()
        told = "the weights did not reach the vLLM server: NCCL error: unhandled system error"
        assert caught.value.message == f"recipe.engine.transfer: {told}"
    finally:
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
    if method == "qlora":  # the server's base is not in 4 bits: what reaches it is the adapter
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        handed = ranks.broadcast_object(str(engine._folder))
        agrees(engine, PeftModel.from_pretrained(base, handed))
        ranks.barrier()
    else:
        agrees(engine, lambda input_ids: policy.whole(lambda: policy.model(input_ids=input_ids)))
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full", "qlora"])
def test_what_two_ranks_hold_reaches_the_server_whole(server, folder, method):
    on_ranks(2, served_from_two, folder, server, method)


def test_a_context_longer_than_the_servers_is_refused(server, folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(UsageError, match="takes 128"):
        VllmServerEngine(
            policy_over(folder, model, Method.FULL), recipe=recipe(server, "full", context=4096)
        )


def test_a_server_that_is_not_there_is_one_clear_error(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(VramwiseError, match="no answer from the vLLM server") as caught:
        VllmServerEngine(policy_over(folder, model, Method.FULL), recipe=recipe(url, "full"))
    assert "vllm serve" in caught.value.hint
