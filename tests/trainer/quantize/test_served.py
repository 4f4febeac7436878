"""Real vLLM loads what is written for it, and computes what its dequantised weights say."""

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from transformers import AutoModelForCausalLM

from planner.units import MiB
from trainer.engines.vllm_llm import AGREEMENT, prompt_logprobs, start_llm
from trainer.engines.vllm_settings import VllmSettings
from trainer.quantize.compressed import CompressedTensors
from trainer.quantize.files import Files, stored_tensors

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]


def test_vllm_gives_the_log_probs_of_the_chosen_weights(written, source):
    folder, card = written[0] / "compressed-tensors", written[1]["formats"]["compressed-tensors"]
    assert set(card["blocks"]) == {"16-bit", "block 32", "block 64"}  # mixed, and some ignored
    files, form = Files(folder), CompressedTensors()
    chosen = {
        each["name"]: form.read_back(stored_tensors(files, each["name"]), torch.bfloat16)
        for each in card["linears"]
        if each["stored"] != "16-bit"
    }
    tokens = list(range(3, 60))
    own = _log_probs(source, tokens, chosen)
    llm = start_llm(
        VllmSettings(
            model=str(folder),
            dtype="bfloat16",
            max_model_len=256,
            max_num_seqs=2,
            kv_bytes=16 * MiB,
        )
    )
    served = prompt_logprobs(llm, tokens)
    near = (served - own).abs().mean()
    assert near < AGREEMENT[torch.bfloat16]
    assert near < (served - _log_probs(source, tokens, {})).abs().mean() / 3


def _log_probs(source, tokens, changed):
    """Return the log-probabilities of tokens after the first under the model with some weights changed."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, weight in changed.items():
            model.get_submodule(name).weight.copy_(weight)
        logs = model.float()(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return logs[:-1].gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)


def test_joined_linears_share_what_they_are_stored_in(written):
    stored = {
        each["name"]: each["stored"]
        for each in written[1]["formats"]["compressed-tensors"]["linears"]
    }
    for layer in range(12):
        for parent, names in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
            ways = {stored[f"model.layers.{layer}.{parent}.{name}_proj"] for name in names}
            assert len(ways) == 1


def test_the_library_unpacks_the_same(written):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    files = Files(written[0] / "compressed-tensors")
    name = next(n for n in files if n.endswith("weight_packed")).removesuffix(".weight_packed")
    tensors = stored_tensors(files, name)
    shape = torch.Size(tensors["weight_shape"].tolist())
    codes = helpers.unpack_from_int32(tensors["weight_packed"], 4, shape)
    theirs = dequantize(codes, tensors["weight_scale"])
    assert torch.equal(CompressedTensors().read_back(tensors, torch.bfloat16), theirs)
