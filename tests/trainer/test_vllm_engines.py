"""Real vLLM in this process: one copy of the weights, pushed weights, log-probs equal to the policy's."""

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from planner.errors import UsageError, VramwiseError
from planner.units import MiB
from trainer.engines.protocol import SamplingSettings
from trainer.engines.vllm_llm import VllmSettings, prompt_logprobs, reported_kv_tokens, vllm_model
from trainer.engines.vllm_push import VllmPushEngine, merged_weights
from trainer.engines.vllm_shared import VllmSharedEngine, map_parameters

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]

PROBE = tuple(range(3, 40))
EOS = 1


def make_folder(path, config):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def qwen2_folder(tmp_path_factory):
    config = Qwen2Config(
        vocab_size=500,  # not a multiple of 64: vLLM pads the embedding to 512
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=EOS,
    )
    return make_folder(tmp_path_factory.mktemp("qwen2"), config)


def settings(folder, **changes):
    values = {
        "model": folder,
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "kv_bytes": 16 * MiB,
    }
    return VllmSettings(**values | changes)


def empty_policy(folder):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def shift(policy, names, scale=0.05):
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if names in name:
                parameter.add_(torch.randn_like(parameter) * scale)


def own_logprobs(policy):
    ids = torch.tensor([PROBE])
    with torch.no_grad():
        logits = policy(input_ids=ids).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


@pytest.fixture(scope="module")
def shared(qwen2_folder):
    engine = VllmSharedEngine(settings(qwen2_folder, lora_rank=8), eos_token_ids=[EOS])
    policy = engine.adopt(empty_policy(qwen2_folder))
    yield engine, policy
    engine.close()


@pytest.fixture(scope="module")
def shared_lora(shared):
    engine, base = shared
    torch.manual_seed(1)
    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    policy = get_peft_model(base, config)
    engine.attach(policy, probe_token_ids=PROBE)
    return engine, policy


def test_the_policy_holds_no_weights_of_its_own(shared):
    engine, policy = shared
    model = vllm_model(engine.llm)
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert all(p.untyped_storage().data_ptr() in storages for p in policy.parameters())
    assert engine.shared_bytes == sum(p.numel() * 4 for p in policy.parameters())
    # q, k and v are three slices of one storage
    attention = policy.get_submodule("model.layers.0.self_attn")
    pointers = {
        attention.get_submodule(n).weight.untyped_storage().data_ptr()
        if not hasattr(attention.get_submodule(n), "base_layer")
        else attention.get_submodule(n).base_layer.weight.untyped_storage().data_ptr()
        for n in ("q_proj", "k_proj", "v_proj")
    }
    assert len(pointers) == 1


def test_a_changed_adapter_changes_generation_ten_times_in_a_row(shared_lora):
    engine, policy = shared_lora
    before = own_logprobs(policy)
    for _ in range(10):
        shift(policy, "lora_")
        engine.update_weights()
        assert engine.check("after an update") < 1e-5
        after = own_logprobs(policy)
        # the check would be empty if the adapter did not move the log-probs at all
        assert (after - before).abs().mean() > 1e-3
        before = after


def test_an_adapter_that_was_not_published_is_caught(shared_lora):
    engine, policy = shared_lora
    shift(policy, "lora_", scale=0.5)
    with pytest.raises(VramwiseError, match="disagree"):
        engine.check("before publishing")
    engine.update_weights()
    engine.check("after publishing")


def test_sampled_logprobs_are_the_policys(shared_lora):
    engine, policy = shared_lora
    sampling = SamplingSettings(num_generations=3, max_new_tokens=6, temperature=0.7, seed=5)
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    completions = engine.generate(prompts, sampling)
    assert [c.prompt_index for c in completions] == [0, 0, 0, 1, 1, 1]
    assert len({c.token_ids for c in completions}) > 1
    for completion in completions:
        prompt = prompts[completion.prompt_index]
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logits = policy(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / 0.7
        expected = logits.log_softmax(-1)[
            range(len(completion.token_ids)), list(completion.token_ids)
        ]
        assert torch.allclose(expected, torch.tensor(completion.logprobs), atol=1e-4)


def test_a_seed_repeats_a_rollout(shared_lora):
    engine, _ = shared_lora
    sampling = SamplingSettings(num_generations=2, max_new_tokens=8, seed=11)
    first = engine.generate([[5, 6, 7]], sampling)
    assert engine.generate([[5, 6, 7]], sampling) == first


def test_a_rollout_that_takes_too_long_is_aborted_and_the_engine_lives(shared_lora):
    engine, _ = shared_lora
    from trainer.engines import vllm_llm

    sampling = SamplingSettings(num_generations=1, max_new_tokens=200)
    with pytest.raises(VramwiseError, match="took longer"):
        vllm_llm.generate(engine.llm, [[5, 6]], sampling, eos_token_ids=[EOS], timeout_s=0.0)
    again = engine.generate([[5, 6]], SamplingSettings(num_generations=1, max_new_tokens=4))
    assert len(again) == 1


def test_merging_restores_the_shared_weights_bit_for_bit(shared_lora):
    from trainer.engines.vllm_shared import MergedWeights

    engine, policy = shared_lora
    before = {n: p.detach().clone() for n, p in policy.named_parameters()}
    with_adapter = own_logprobs(policy)
    merged = MergedWeights(policy)
    merged.merge()
    engine.llm.reset_prefix_cache()
    served = prompt_logprobs(engine.llm, PROBE)  # no adapter request: the base weights alone
    merged.restore()
    engine.llm.reset_prefix_cache()
    assert torch.allclose(served, with_adapter, atol=1e-4)
    assert all(torch.equal(before[n], p) for n, p in policy.named_parameters())


def test_full_fine_tuning_writes_into_vllms_weights(shared_lora, qwen2_folder):
    engine, policy = shared_lora
    base = policy.get_base_model()
    for layer in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.gate_proj"):
        module = base.get_submodule(layer)
        weight = getattr(module, "base_layer", module).weight
        with torch.no_grad():
            weight.add_(torch.randn_like(weight) * 0.05)
    engine.update_weights()
    assert engine.check("after an in-place step") < 1e-5


def test_kv_cache_is_what_was_asked_for(shared):
    engine, _ = shared
    # 2 tensors x 2 layers x 2 heads x 32 x 4 bytes = 1024 bytes a token
    assert reported_kv_tokens(engine.llm) == 16 * MiB // 1024
    assert engine.memory()["kv_cache"] == 16 * MiB
    assert engine.memory()["weights"] == 0


def test_push_engine_takes_adapters_merged_and_full_weights(qwen2_folder):
    engine = VllmPushEngine(settings(qwen2_folder), eos_token_ids=[EOS])
    try:
        torch.manual_seed(2)
        base = AutoModelForCausalLM.from_pretrained(qwen2_folder, dtype=torch.float32)
        config = LoraConfig(
            r=4, target_modules="all-linear", init_lora_weights=False, use_dora=True
        )
        policy = get_peft_model(base, config)
        engine.attach(policy, probe_token_ids=PROBE)
        for _ in range(3):
            shift(policy, "lora_")
            engine.update_weights()
            assert engine.check("after a push") < 1e-5
        with torch.no_grad():
            norm = policy.get_base_model().get_submodule("model.norm").weight
            norm.mul_(1.5)
        with pytest.raises(VramwiseError, match="disagree"):
            engine.check("before the push")
        engine.update_weights()
        assert engine.check("after a full push") < 1e-5
    finally:
        engine.close()


def test_pushed_weights_are_pefts_own_merge(qwen2_folder):
    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_pretrained(qwen2_folder, dtype=torch.float32)
    policy = get_peft_model(
        base,
        LoraConfig(
            r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False, use_dora=True
        ),
    )
    pushed = dict(merged_weights(policy))
    expected = policy.merge_and_unload().state_dict()
    assert set(pushed) == set(expected) - {"lm_head.weight"}  # tied
    for name, tensor in pushed.items():
        assert torch.allclose(tensor, expected[name], atol=1e-6), name


def test_weights_that_vllm_packed_are_refused(qwen2_folder):
    engine = VllmPushEngine(settings(qwen2_folder), eos_token_ids=[EOS])
    try:
        with pytest.raises(UsageError, match="dropped the plain weight") as caught:
            map_parameters(empty_policy(qwen2_folder), vllm_model(engine.llm))
        assert "vllm-push" in caught.value.hint
    finally:
        engine.close()
