"""Engines that must not start, or must not share: each says why and what to do instead.

A file of its own: vLLM keeps process-wide groups, and these engines need them fresh.
"""

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MixtralConfig

from planner.errors import MissingExtraError, UsageError
from planner.units import MiB
from trainer.engines import vllm_llm
from trainer.engines.vllm_llm import VllmSettings
from trainer.engines.vllm_push import VllmPushEngine
from trainer.engines.vllm_shared import VllmSharedEngine

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]


def make_folder(path, config):
    AutoModelForCausalLM.from_config(config).float().save_pretrained(path)
    return str(path)


def settings(folder, **changes):
    values = {
        "model": folder,
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "kv_bytes": 16 * MiB,
    }
    return VllmSettings(**values | changes)


SMALL = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def test_a_mixture_of_experts_is_refused_with_the_reason(tmp_path):
    config = MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
    folder = make_folder(tmp_path / "mixtral", config)
    engine = VllmSharedEngine(settings(folder), eos_token_ids=[1])
    try:
        with torch.device("meta"):
            policy = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        with pytest.raises(UsageError, match="mixture of experts") as caught:
            engine.adopt(policy)
        assert "vllm-push" in caught.value.hint
    finally:
        engine.close()


def test_an_engine_that_cannot_start_says_what_to_change(tmp_path):
    folder = make_folder(tmp_path / "llama", LlamaConfig(**SMALL))
    with pytest.raises(UsageError, match="vLLM cannot start") as caught:
        VllmPushEngine(settings(folder, kv_bytes=4096), eos_token_ids=[1])
    assert "kv_bytes" in caught.value.hint


def test_without_vllm_the_extra_is_named(monkeypatch):
    def missing(name):
        raise vllm_llm.PackageNotFoundError(name)

    monkeypatch.setattr(vllm_llm, "version", missing)
    with pytest.raises(MissingExtraError) as caught:
        vllm_llm.installed_version()
    assert (caught.value.exit_code, "vllm" in caught.value.hint) == (5, True)


def test_an_old_vllm_is_refused(monkeypatch):
    monkeypatch.setattr(vllm_llm, "version", lambda name: "0.8.5.post1")
    with pytest.raises(UsageError, match="too old"):
        vllm_llm.installed_version()
