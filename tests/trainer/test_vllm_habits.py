"""Real vLLM: adapters that it cannot serve reach it merged; penalties and grammars with true log-probs."""

import json
import re

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from planner.errors import VramwiseError
from planner.run.runfile import make_recipe
from planner.units import MiB
from trainer.engines.protocol import SamplingSettings
from trainer.engines.vllm_push import VllmPushEngine
from trainer.model import load_policy
from trainer.sampling import penalise, shape_logits
from trainer.small_model import make_small_model

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]

PROMPTS = [[5, 6, 7, 8, 5, 6], [20, 21, 20]]


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    """Return an engine, and its policy: PiSSA, trained biases, and a tied embedding trained whole."""
    folder = make_small_model(
        tmp_path_factory.mktemp("m") / "m", hidden=128, attention_bias=True, initializer_range=0.1
    )
    recipe = make_recipe(
        task="grpo",
        dtype="fp32",
        context=64,
        engine={"kind": "vllm-push", "kv_bytes": 8 * MiB, "max_num_seqs": 8},
        lora={"rank": 4, "init": "pissa", "bias": "all", "modules_to_save": ["embed_tokens"]},
    )
    policy = load_policy(str(folder), recipe=recipe)
    engine = VllmPushEngine(policy, recipe=recipe, guided=True)
    yield engine, policy
    engine.close()


def test_pissa_biases_and_whole_modules_are_pushed_merged(pushed):
    engine, policy = pushed
    for _ in range(3):
        with torch.no_grad():
            for _, parameter in policy.trainable():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        engine.update_weights()
        assert engine.check("after a push") < 1e-5


@torch.no_grad()
def test_what_vllm_says_of_its_tokens_is_after_penalties_and_min_p(pushed):
    engine, policy = pushed
    settings = SamplingSettings(
        num_generations=2, max_new_tokens=8, temperature=0.8, min_p=0.02, top_k=40, seed=3,
        repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3,
    )  # fmt: skip
    for completion in engine.generate(PROMPTS, settings):
        prompt, said = PROMPTS[completion.prompt_index], list(completion.token_ids)
        logits = policy.model(input_ids=torch.tensor([prompt + said])).logits[0]
        for place, (token, told) in enumerate(zip(said, completion.logprobs, strict=True)):
            row = logits[len(prompt) + place - 1][None]
            shaped = shape_logits(
                penalise(row, [prompt], [said[:place]], settings),
                temperature=0.8,
                top_k=40,
                top_p=1.0,
                min_p=0.02,
            )
            assert shaped.log_softmax(-1)[0, token].item() == pytest.approx(told, abs=1e-3)


def test_a_grammar_holds_and_its_forced_tokens_are_certain(pushed):
    engine, policy = pushed
    settings = SamplingSettings(
        num_generations=2, max_new_tokens=12, guided_regex="<[ab]{2,4}>=[0-9]", seed=1
    )
    for completion in engine.generate(PROMPTS, settings):
        text = policy.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert re.fullmatch("<[ab]{2,4}>=[0-9]", text)
        assert completion.finished
        # "<" is the only way to begin
        assert completion.logprobs[0] == pytest.approx(0, abs=1e-6)
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}  # fmt: skip
    settings = SamplingSettings(num_generations=1, max_new_tokens=30, guided_json=schema, seed=1)
    (first, _) = engine.generate(PROMPTS, settings)
    if first.finished:  # white space may go on and on
        assert json.loads(policy.tokenizer.decode(first.token_ids, skip_special_tokens=True))["n"] in (1, 2)  # fmt: skip


def test_a_grammar_that_vllm_does_not_take_is_named(pushed):
    engine, _ = pushed
    settings = SamplingSettings(num_generations=1, max_new_tokens=4, guided_json={"type": 7})
    with pytest.raises(VramwiseError, match=r"train\.sampling\.guided_json"):
        engine.generate(PROMPTS, settings)
