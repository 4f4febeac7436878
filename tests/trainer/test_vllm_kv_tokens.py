"""The planner's KV block arithmetic gives exactly the token count that real vLLM reports."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from benchmarks.kv_tokens import architectures, planned_tokens, vllm_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]


@pytest.mark.parametrize("name", list(architectures()))
def test_planned_tokens_are_vllms_own(name, tmp_path):
    config = architectures()[name]
    assert planned_tokens(config) == vllm_tokens(config, tmp_path / "model")
