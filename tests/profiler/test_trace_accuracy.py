"""The trace tier: older releases' allocations, extrapolation over layers, published rows."""

from dataclasses import replace
from typing import Any

import pytest

from planner.accuracy.prediction import NotCovered
from planner.accuracy.rows import Row, read_rows
from planner.accuracy.score import measurement_files
from planner.families import model_spec_from_config
from planner.run.recipe import Method
from profiler.recording import Recording
from profiler.subjects.hf_sft import HfSft
from profiler.subjects.options import StepOptions
from profiler.subjects.trl_grpo import Temperature, TrlGrpo
from profiler.trace import trace
from profiler.trace_accuracy import peak_bytes, predict, subject_of

VOCAB = 8192
TOKENS = 512
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
OPTIONS = StepOptions(config=CONFIG, micro_batch=2, length=TOKENS, steps=1, warm_optimizer=True)


def phases(subject: HfSft) -> dict[str, int]:
    return {phase.name: phase.peak_bytes for phase in trace(subject).phases}


def loss_peak(release: str, **fields: Any) -> int:
    return phases(HfSft(replace(OPTIONS, transformers=release, **fields)))["loss"]


def test_each_release_keeps_its_own_copies_of_the_logits() -> None:
    logits = OPTIONS.micro_batch * TOKENS * VOCAB
    upcast_in_forward, upcast_in_loss, labels_shifted = map(loss_peak, ("4.45.2", "4.48", "4.49"))
    assert upcast_in_loss - upcast_in_forward == pytest.approx(2 * logits, rel=0.02)
    assert labels_shifted == loss_peak("")
    assert upcast_in_loss - labels_shifted == pytest.approx(2 * logits, rel=0.02)


def test_old_matmuls_hold_their_input_while_a_layer_is_recomputed() -> None:
    width = 640
    config = {**CONFIG, "vocab_size": 256, "intermediate_size": width}
    options = replace(
        OPTIONS, config=config, method=Method.QLORA, reentrant=True, prepare_kbit=False
    )
    freed = phases(HfSft(options))["backward"]
    held = phases(HfSft(replace(options, keeps_matmul_input=True)))["backward"]
    assert held - freed >= OPTIONS.micro_batch * TOKENS * width * 2
    assert phases(HfSft(options))["backward"] == freed, "the patch must not outlive its trace"


def test_only_norms_stay_in_fp32_after_kbit_preparation() -> None:
    options = replace(OPTIONS, method=Method.QLORA)
    everything, norms = (
        phases(HfSft(replace(options, kbit_norms_only=only)))["step"] for only in (False, True)
    )
    assert everything - norms == 2 * 2 * VOCAB * 64  # embeddings and head, 2 bytes an element


def test_dividing_a_slice_in_place_copies_the_gradient_of_all_logits() -> None:
    options = replace(OPTIONS, autocast="bf16", fp32_outputs=True, completion=TOKENS - 8)
    peaks = {
        way: phases(TrlGrpo(options, fused=False, temperature=way))["loss"]
        for way in (Temperature.IN_PLACE, Temperature.COPY)
    }
    extra = peaks[Temperature.IN_PLACE] - peaks[Temperature.COPY]
    assert extra == pytest.approx(4 * OPTIONS.micro_batch * TOKENS * VOCAB, rel=0.05)


@pytest.mark.parametrize("method", [Method.LORA, Method.FULL], ids=str)
def test_two_depths_extrapolate_to_a_third(method: Method) -> None:
    deep = {**CONFIG, "num_hidden_layers": 7}
    options = replace(OPTIONS, config=deep, method=method)
    guess = peak_bytes(options, model_spec_from_config(deep, name="deep", source="test"))
    whole = max(phases(HfSft(options)).values())
    assert guess == pytest.approx(whole, rel=0.001)


def full_depth(published: Row) -> Recording:
    return trace(subject_of(published))


def row(identifier: str) -> Row:
    found = [row for path in measurement_files() for row in read_rows(path) if row.id == identifier]
    return found[0]


@pytest.mark.parametrize("identifier", ["S00318", "S00112", "CI03"])
def test_published_runs_are_met(identifier: str) -> None:
    """LoRA under transformers 4.45, QLoRA under 4.48, GRPO with full logits under TRL 1.12."""
    published = row(identifier)
    assert predict(published).value == pytest.approx(published.truth(), rel=0.01)


@pytest.mark.parametrize(
    ("identifier", "reason"),
    [("S00036", "fused kernels"), ("S00196", "experts as separate"), ("S00873", "length")],
)
def test_rows_without_a_step_say_why(identifier: str, reason: str) -> None:
    with pytest.raises(NotCovered, match=reason):
        predict(row(identifier))


def test_reserved_memory_of_a_published_run_is_met() -> None:
    """The probe printed 2.744 GiB allocated and the reserved peak of the same run."""
    allocated, reserved = row("CI03"), row("CI04")
    assert allocated["notes"][:60] == reserved["notes"][:60]
    recording = full_depth(allocated)
    assert recording.peak_bytes == pytest.approx(allocated.truth(), rel=0.01)
    assert recording.peak_reserved_bytes == pytest.approx(reserved.truth(), rel=0.05)
