"""Memory given back between rollouts, on real vLLM with what CUDA has by default: asynchronous scheduling.

The CPU build has the same scheduler and engine core; its platform only switches asynchronous scheduling
and sleep off. Both are switched on at that platform, and its worker, which cannot unmap memory, spoils
what a GPU would have dropped.
"""

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from planner.errors import VramwiseError
from planner.run.recipe import Method, Recipe
from planner.units import MiB
from tests.trainer.policies import policy_over
from trainer.engines import vllm_sleep
from trainer.engines.protocol import SamplingSettings
from trainer.engines.vllm_llm import vllm_model
from trainer.engines.vllm_push import VllmPushEngine
from trainer.engines.vllm_shared import VllmSharedEngine

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]

SAMPLING = SamplingSettings(num_generations=3, max_new_tokens=6, seed=5)
PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]
KV_BYTES = 16 * MiB


@pytest.fixture
def asked(monkeypatch):
    """Let vLLM's CPU platform be as CUDA is; return what the worker was asked to give back and to take."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.cpu_worker import CPUWorker

    platform = type(current_platform)
    real = platform.check_and_update_config.__func__
    log = []

    def asynchronous(cls, config):
        real(cls, config)
        config.scheduler_config.async_scheduling = True

    def spoil(tensors):
        with torch.no_grad():
            for tensor in tensors:
                tensor.fill_(1e3)

    def discard(self, tags):
        log.append(("discard", tags))
        spoil(self.model_runner.kv_caches)

    def sleep(self, level=1):
        log.append(("sleep", level))
        spoil(self.model_runner.kv_caches)
        if level == 2:
            spoil(self.model_runner.model.parameters())

    monkeypatch.setattr(platform, "check_and_update_config", classmethod(asynchronous))
    monkeypatch.setattr(platform, "is_sleep_mode_available", lambda self: True)
    monkeypatch.setattr(CPUWorker, "discard", discard)
    monkeypatch.setattr(CPUWorker, "sleep", sleep)
    monkeypatch.setattr(CPUWorker, "wake_up", lambda self, tags=None: log.append(("wake", tags)))
    return log


def recipe(method, **engine):
    return Recipe(
        task="grpo",
        method=method,
        context=256,
        lora={"rank": 4},
        engine={"kv_bytes": KV_BYTES, "max_num_seqs": 8, **engine},
    )


def full_policy(qwen2_folder):
    model = AutoModelForCausalLM.from_pretrained(qwen2_folder, dtype=torch.float32)
    return policy_over(qwen2_folder, model, Method.FULL)


def lora_policy(qwen2_folder):
    base = AutoModelForCausalLM.from_pretrained(qwen2_folder, dtype=torch.float32)
    config = LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"])
    return policy_over(qwen2_folder, get_peft_model(base, config), Method.LORA)


def train(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.02)


def core_of(engine):
    return engine.llm.llm_engine.engine_core.engine_core


def busy(engine):
    core = core_of(engine)
    return bool(core.scheduler.has_requests() or core.batch_queue)


@pytest.fixture
def pushes(monkeypatch):
    """Return the list that grows by one for every time all weights reach the worker."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    from trainer.engines.vllm_in_place import InPlace

    made = []

    def counted(real):
        def push(self, *arguments, **options):
            made.append(1)
            return real(self, *arguments, **options)

        return push

    for owner, name in ((CPUWorker, "reload_weights"), (InPlace, "write")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    return made


def test_kv_memory_goes_and_comes_back_step_after_step(asked, qwen2_folder):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(qwen2_folder))
    engine = VllmSharedEngine(policy_over(qwen2_folder, model, Method.FULL), recipe=recipe("full"))
    try:
        assert core_of(engine).batch_queue_size == 2  # asynchronous, or this test shows nothing
        for _ in range(3):
            engine.release()
            assert asked.pop() == ("discard", ("kv_cache",))
            assert engine.memory()["kv_cache"] == 0
            train(model)
            engine.resume()
            assert asked.pop() == ("wake", ["kv_cache"])
            assert engine.memory()["kv_cache"] == KV_BYTES
            engine.update_weights()
            first = engine.generate(PROMPTS, SAMPLING)
            assert engine.check("after a step") < 1e-5
            assert engine.generate(PROMPTS, SAMPLING) == first
        assert asked == []
    finally:
        engine.close()


def test_vllm_is_left_with_a_batch_queued_and_draining_ends_it(asked, qwen2_folder):
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    engine = VllmPushEngine(full_policy(qwen2_folder), recipe=recipe("full"))
    try:
        assert not busy(engine)  # whatever the engines did themselves is at rest
        engine.llm.generate(
            [TokensPrompt(prompt_token_ids=PROMPTS[0])],
            SamplingParams(max_tokens=4, detokenize=False),
            use_tqdm=False,
        )
        assert busy(engine)
        engine.llm.sleep(level=0)
        with pytest.raises(RuntimeError, match="requires a completed pause"):
            engine.llm.release_kv_cache_memory()
        engine.llm.wake_up(tags=["scheduling"])
        vllm_sleep.drain(engine.llm)
        assert not busy(engine)
        vllm_sleep.release_kv(engine.llm)
        assert asked == [("discard", ("kv_cache",))]
    finally:
        engine.close()


def test_an_engine_that_does_not_come_to_rest_is_one_line(asked, qwen2_folder):
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    engine = VllmPushEngine(full_policy(qwen2_folder), recipe=recipe("full"))
    try:
        engine.llm.llm_engine.add_request(
            "endless",
            TokensPrompt(prompt_token_ids=PROMPTS[0]),
            SamplingParams(max_tokens=200, ignore_eos=True, detokenize=False),
        )
        with pytest.raises(
            VramwiseError, match="did not come to rest in 0 s: 1 requests"
        ) as caught:
            vllm_sleep.drain(engine.llm, timeout_s=0)
        assert "\n" not in caught.value.message
        # sleeping aborts what is left, and nothing of it stays in the way
        vllm_sleep.drain(engine.llm)
        engine.release()
        assert asked == [("sleep", 2)]
    finally:
        engine.close()


def test_all_weights_are_pushed_once_a_step(asked, qwen2_folder, pushes):
    policy = full_policy(qwen2_folder)
    engine = VllmPushEngine(policy, recipe=recipe("full"))
    try:
        for _ in range(3):
            pushes.clear()
            engine.release()
            assert asked.pop() == ("sleep", 2)
            train(policy.model)
            engine.resume()
            assert asked.pop() == ("wake", None)
            with pytest.raises(VramwiseError, match="disagree"):
                engine.check("after the drop")  # the copy is gone: a push must come
            engine.update_weights()
            assert len(pushes) == 1
            assert engine.check("after a step") < 1e-5
            first = engine.generate(PROMPTS, SAMPLING)
            assert len(pushes) == 1
        engine.release()
        engine.resume()
        assert engine.generate(PROMPTS, SAMPLING) == first  # nobody updated: it pushed by itself
        assert len(pushes) == 2
    finally:
        engine.close()


@pytest.mark.parametrize(("level", "expected"), [(1, 0), (2, 1)])
def test_adapters_alone_bring_the_base_only_where_it_was_dropped(
    asked, qwen2_folder, pushes, level, expected
):
    policy = lora_policy(qwen2_folder)
    engine = VllmPushEngine(policy, recipe=recipe("lora", sleep_level=level))
    try:
        for _ in range(2):
            pushes.clear()
            engine.release()
            assert asked.pop() == ("sleep", level)
            train(policy.model)
            engine.resume()
            engine.update_weights()
            assert len(pushes) == expected
            assert engine.check("after a step") < 1e-5
    finally:
        engine.close()


def test_without_sleep_nothing_is_released_and_nothing_claimed(asked, qwen2_folder):
    engine = VllmPushEngine(lora_policy(qwen2_folder), recipe=recipe("lora", sleep_level=0))
    try:
        before = engine.memory()
        engine.release()
        assert asked == []
        assert engine.memory() == before
        assert before["kv_cache"] == KV_BYTES
        engine.resume()
        assert engine.generate(PROMPTS, SAMPLING) == engine.generate(PROMPTS, SAMPLING)
    finally:
        engine.close()


def test_memory_that_cannot_be_taken_back_is_one_line(asked, qwen2_folder, monkeypatch):
    from vllm.v1.worker.cpu_worker import CPUWorker

    def full(self, tags=None):
        raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:90\nmore")

    engine = VllmPushEngine(lora_policy(qwen2_folder), recipe=recipe("lora"))
    try:
        engine.release()
        with monkeypatch.context() as patch:
            patch.setattr(CPUWorker, "wake_up", full)
            with pytest.raises(VramwiseError) as caught:
                engine.resume()
        assert "could not take its memory back: CUDA Error: out of memory" in caught.value.message
        assert "\n" not in caught.value.message
    finally:
        engine.close()
    # woken before it was shut down: a GPU's unmapped memory cannot be unmapped again to free it
    assert asked == [("sleep", 1), ("wake", None)]


def test_shared_weights_outlive_the_engine(asked, qwen2_folder):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(qwen2_folder))
    engine = VllmSharedEngine(policy_over(qwen2_folder, model, Method.FULL), recipe=recipe("full"))
    addresses = {p.data_ptr() for p in vllm_model(engine.llm).parameters()}
    ids = torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        before = model(input_ids=ids).logits
    engine.release()
    engine.close()
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, before)
    assert model.get_input_embeddings().weight.data_ptr() in addresses
