"""Real vLLM in this process: one copy of the weights, pushed weights, log-probs equal to the policy's."""

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    SmolLM3Config,
    SmolLM3Model,
)

from planner.errors import UsageError, VramwiseError
from planner.run.recipe import Method, Recipe
from planner.units import MiB
from tests.trainer.policies import EOS, policy_over
from trainer.engines.protocol import SamplingSettings
from trainer.engines.vllm_adapters import MergedWeights, merged_weights
from trainer.engines.vllm_in_place import in_place
from trainer.engines.vllm_llm import prompt_logprobs, reported_kv_tokens, vllm_model
from trainer.engines.vllm_push import VllmPushEngine
from trainer.engines.vllm_shared import VllmSharedEngine, map_parameters

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]

PROBE = tuple(range(3, 40))


RECIPE = Recipe(
    task="grpo",
    context=256,
    engine={"kv_bytes": 16 * MiB, "max_num_seqs": 8},
    lora={"rank": 8},
)


def empty_policy(folder):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def materialise_adapters(policy):
    for module in policy.modules():
        if hasattr(module, "get_delta_weight"):
            module.lora_A.to_empty(device="cpu")
            module.lora_B.to_empty(device="cpu")
            module.reset_lora_parameters("default", True)


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
    """An engine, and its policy that never had base weights of its own."""
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    model = get_peft_model(empty_policy(qwen2_folder), config)
    materialise_adapters(model)
    engine = VllmSharedEngine(policy_over(qwen2_folder, model), recipe=RECIPE)
    yield engine, model
    engine.close()


def test_the_policy_holds_no_weights_of_its_own(shared):
    engine, model = shared
    base = [(n, p) for n, p in model.named_parameters() if "lora_" not in n]
    storages = {p.untyped_storage().data_ptr() for p in vllm_model(engine.llm).parameters()}
    assert all(p.untyped_storage().data_ptr() in storages for _, p in base)
    assert engine.shared_bytes == sum(p.numel() * 4 for _, p in base)
    # q, k and v are three slices of one storage
    attention = "base_model.model.model.layers.0.self_attn."
    slices = {
        p.untyped_storage().data_ptr()
        for n, p in base
        if n.startswith(attention) and "_proj" in n and "o_proj" not in n and n.endswith("weight")
    }
    assert len(slices) == 1


def test_a_changed_adapter_changes_generation_ten_times_in_a_row(shared):
    engine, policy = shared
    before = own_logprobs(policy)
    for _ in range(10):
        shift(policy, "lora_")
        engine.update_weights()
        assert engine.check("after an update") < 1e-5
        after = own_logprobs(policy)
        # the check would be empty if the adapter did not move the log-probs at all
        assert (after - before).abs().mean() > 1e-3
        before = after


def test_an_adapter_that_was_not_published_is_caught(shared):
    engine, policy = shared
    shift(policy, "lora_", scale=0.5)
    with pytest.raises(VramwiseError, match="disagree"):
        engine.check("before publishing")
    engine.update_weights()
    engine.check("after publishing")


def test_sampled_logprobs_are_the_policys(shared):
    engine, policy = shared
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


def test_a_seed_repeats_a_rollout(shared):
    engine, _ = shared
    sampling = SamplingSettings(num_generations=2, max_new_tokens=8, seed=11)
    first = engine.generate([[5, 6, 7]], sampling)
    assert engine.generate([[5, 6, 7]], sampling) == first


def test_a_rollout_that_takes_too_long_is_aborted_and_the_engine_lives(shared):
    engine, _ = shared
    from trainer.engines import vllm_llm

    sampling = SamplingSettings(num_generations=1, max_new_tokens=200)
    with pytest.raises(VramwiseError, match="took longer"):
        vllm_llm.generate(engine.llm, [[5, 6]], sampling, eos_token_ids=[EOS], timeout_s=0.0)
    again = engine.generate([[5, 6]], SamplingSettings(num_generations=1, max_new_tokens=4))
    assert len(again) == 1


def test_merging_restores_the_shared_weights_bit_for_bit(shared):
    engine, policy = shared
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


def test_kv_cache_is_what_was_asked_for(shared):
    engine, _ = shared
    # 2 tensors x 2 layers x 2 heads x 32 x 4 bytes = 1024 bytes a token
    assert reported_kv_tokens(engine.llm) == 16 * MiB // 1024
    assert engine.memory()["kv_cache"] == 16 * MiB
    assert engine.memory()["weights"] == 0


def test_push_engine_takes_adapters_merged_and_full_weights(qwen2_folder):
    torch.manual_seed(2)
    base = AutoModelForCausalLM.from_pretrained(qwen2_folder, dtype=torch.float32)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, use_dora=True)
    model = get_peft_model(base, config)
    policy = policy_over(qwen2_folder, model)
    engine = VllmPushEngine(policy, recipe=RECIPE)
    try:
        assert engine._in_place is not None
        for _ in range(3):
            shift(model, "lora_")
            engine.update_weights()
            assert engine.check("after a push") < 1e-5
        with torch.no_grad():
            base.get_submodule("model.norm").weight.mul_(1.5)
            # tied: the output head must follow, whatever the engine made of it at start-up
            embedding = base.get_input_embeddings().weight
            embedding.add_(torch.randn_like(embedding) * 0.05)
        with pytest.raises(VramwiseError, match="disagree"):
            engine.check("before the push")
        engine.update_weights()
        assert engine.check("after a full push") < 1e-5
        # where vLLM holds something else than what it was given, nothing is written past its loader
        theirs = vllm_model(engine.llm)
        assert in_place(policy, theirs) is not None
        next(theirs.parameters()).data[1].add_(1)
        assert in_place(policy, theirs) is None
    finally:
        engine.close()


def test_push_engine_serves_plain_adapters_alone(qwen2_folder):
    torch.manual_seed(4)
    base = AutoModelForCausalLM.from_pretrained(qwen2_folder, dtype=torch.float32)
    model = get_peft_model(
        base, LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"])
    )
    engine = VllmPushEngine(policy_over(qwen2_folder, model), recipe=RECIPE)
    try:
        for _ in range(3):
            shift(model, "lora_")
            engine.update_weights()
            assert engine.check("after an adapter") < 1e-5
        # vLLM's own copy kept the base weights: without the adapter it gives other log-probs
        plain = prompt_logprobs(engine.llm, PROBE)
        assert (plain - own_logprobs(model)).abs().mean() > 1e-3
    finally:
        engine.close()


def test_full_fine_tuning_shares_trainable_weights(qwen2_folder):
    model = empty_policy(qwen2_folder)
    policy = policy_over(qwen2_folder, model, method=Method.FULL)
    engine = VllmSharedEngine(policy, recipe=RECIPE.model_copy(update={"method": Method.FULL}))
    try:
        assert all(p.requires_grad for p in model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            before = own_logprobs(model)
            ids = torch.tensor([PROBE])
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.update_weights()
            assert engine.check("after a step") < 1e-5
            assert (own_logprobs(model) - before).abs().mean() > 1e-3
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
    pushed = dict(merged_weights(policy_over(qwen2_folder, policy)))
    expected = policy.merge_and_unload().state_dict()
    assert set(pushed) == set(expected) - {"lm_head.weight"}  # tied
    for name, tensor in pushed.items():
        assert torch.allclose(tensor, expected[name], atol=1e-6), name


def test_weights_that_vllm_packed_are_refused(qwen2_folder):
    base = AutoModelForCausalLM.from_pretrained(qwen2_folder, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"]))
    engine = VllmPushEngine(policy_over(qwen2_folder, model), recipe=RECIPE)
    try:
        with pytest.raises(UsageError, match="dropped the plain weight") as caught:
            map_parameters(empty_policy(qwen2_folder), vllm_model(engine.llm))
        assert "vllm-push" in caught.value.hint
    finally:
        engine.close()


def test_vllm_leaves_transformers_classes_to_the_policy(tmp_path):
    # vLLM has no SmolLM3 of its own and decorates transformers' class, which is the policy's too
    config = SmolLM3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=EOS,
        pad_token_id=0,
        bos_token_id=2,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    folder = str(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = (SmolLM3Model.__init__, SmolLM3Model.__call__, SmolLM3Model.__bases__)
    compiles = torch._dynamo.config.disable
    # compares log-probs of both when it is built
    engine = VllmPushEngine(policy_over(folder, model, Method.FULL), recipe=RECIPE)
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
