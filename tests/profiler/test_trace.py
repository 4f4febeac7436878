"""The trace sees exactly what torch allocates, and follows CUDA where the CPU differs."""

from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import profile

from planner.errors import UnsupportedError, UsageError
from planner.families import model_spec_from_config
from planner.machines.machine import make_machine
from planner.models.catalogue import load_catalogue
from planner.plan import plan
from planner.run.recipe import Attention, Checkpointing, Method, Optimizer, Recipe
from planner.terms.overhead import blas_workspace_bytes
from planner.units import GiB
from profiler import trace as tracing
from profiler.attribute import assign_terms, summarise
from profiler.cuda_behaviour import CudaBehaviour
from profiler.materialise import materialise
from profiler.recording import Recording
from profiler.storages import HOST, StorageTracker, TraceTimeoutError
from profiler.subjects.from_recipe import step_options
from profiler.subjects.hf_sft import HfSft
from profiler.subjects.options import StepOptions
from profiler.subjects.trl_grpo import TrlGrpo

LLAMA = dict(load_catalogue()["llama-3.2-1b"]["config"])
TINY = LLAMA | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 2000,
}
OPTIONS = StepOptions(config=TINY, micro_batch=2, length=128, steps=2)


def byte_events(tracker: StorageTracker) -> list[int]:
    """Return allocations (+) and frees (-) after loading, frees of one moment in order of size.

    Autocast drops its cached casts in the order of a hash table of addresses.
    """
    first = next(i for i, event in enumerate(tracker.events) if event.phase != "load")
    sizes: list[int] = []
    freed: list[int] = []
    for event in tracker.events[first:]:
        if not event.alloc:
            freed.append(-event.block.bytes)
            continue
        sizes += [*sorted(freed), event.block.bytes]
        freed = []
    return sizes + sorted(freed)


def peak(sizes: list[int]) -> int:
    total = highest = 0
    for size in sizes:
        total += size
        highest = max(highest, total)
    return highest


@pytest.mark.parametrize(
    "options",
    [
        replace(OPTIONS, method=Method.FULL, checkpointing=Checkpointing.NONE, dtype="fp32"),
        replace(OPTIONS, attention=Attention.FLASH, adapter_dtype="bf16"),
        replace(OPTIONS, dtype="fp32", autocast="bf16", method=Method.FULL),
        replace(OPTIONS, attention=Attention.EAGER, checkpointing=Checkpointing.OFFLOAD),
        replace(OPTIONS, gradient_accumulation=2, optimizer=Optimizer.ADAMW_FUSED),
        replace(OPTIONS, lora_dropout=0.1, checkpointing=Checkpointing.NONE),
    ],
    ids=["full-fp32", "lora-flash", "full-autocast", "eager-offload", "accumulate", "dropout"],
)
def test_fake_tensors_give_the_events_of_real_ones(options: StepOptions) -> None:
    fake = byte_events(tracing.run_subject(HfSft(options), fake=True))
    real = byte_events(tracing.run_subject(HfSft(options), fake=False))
    assert fake == real


class Untracked:
    """A tracker that watches nothing, so that torch runs with no mode at all."""

    phase = ""

    def in_phase(self, _name: str) -> Any:
        return nullcontext()

    def on_host(self) -> Any:
        return nullcontext()

    def block_of(self, _tensor: torch.Tensor) -> None:
        return None

    def adopt(self, *_: Any, **__: Any) -> None:
        return None


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        (replace(OPTIONS, method=Method.FULL, checkpointing=Checkpointing.NONE), 0.0005),
        (replace(OPTIONS, method=Method.FULL, checkpointing=Checkpointing.FULL), 0.0005),
        (replace(OPTIONS, method=Method.LORA, checkpointing=Checkpointing.FULL), 0.0015),
    ],
    ids=["full", "full-checkpointed", "lora-checkpointed"],
)
def test_the_trace_equals_torch_own_allocator(options: StepOptions, tolerance: float) -> None:
    """No mode, no fake tensors: torch's profiler reports the same allocations, accumulation in place."""
    options = replace(options, dtype="fp32", attention=Attention.EAGER, steps=1)
    traced = StorageTracker()
    subject = HfSft(options)
    model = subject.build()
    with FakeTensorMode(), traced:
        materialise(model, traced)
        before = len(traced.events)
        with masks_as_in_a_real_run(traced):
            subject.run(model, traced)
    mine = [e.block.bytes if e.alloc else -e.block.bytes for e in traced.events[before:]]

    subject = HfSft(options)
    model = subject.build()
    untracked: Any = Untracked()
    materialise(model, untracked)
    with profile(profile_memory=True) as profiled:
        subject.run(model, untracked)
    memory = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    theirs = [event.nbytes() for event in memory]
    assert peak(mine) == pytest.approx(peak(theirs), rel=tolerance)
    large = 8192
    missing = Counter(s for s in mine if s > large) - Counter(s for s in theirs if s > large)
    assert not missing, f"traced, but never allocated: {missing}"
    unseen = Counter(s for s in theirs if s > large) - Counter(s for s in mine if s > large)
    assert not unseen, f"allocated, but not traced: {unseen}"


@contextmanager
def masks_as_in_a_real_run(tracker: StorageTracker) -> Any:
    """Let transformers decide about masks as it does with real tensors."""
    with CudaBehaviour(tracker):
        yield


def run(options: StepOptions, **settings: Any) -> Recording:
    return tracing.trace(HfSft(options), **settings)


def test_known_figures_of_llama_8b_on_fewer_layers() -> None:
    """Other fake-tensor runs: 29.33 GiB outputs dropped, 31.28 kept, both at 32 layers.

    Those hold a 4-D mask of 0.03 GiB that transformers makes for fake tensors only, and tensors
    alone: no workspaces. The layer term is linear in the layers, so two and four layers give thirty-two.
    """
    config = load_catalogue()["llama-3.1-8b"]["config"]
    options = StepOptions(config=config, micro_batch=2, length=4096, workspace_bytes=0)

    def at_32_layers(**changes: Any) -> float:
        two, four = (
            run(replace(options, layers=layers, **changes)).peak_bytes for layers in (2, 4)
        )
        return (two + (four - two) * 15) / GiB

    assert at_32_layers() == pytest.approx(29.33 - 0.03, abs=0.01)
    assert at_32_layers(keep_outputs=True) == pytest.approx(31.28 - 0.03, abs=0.02)


def test_full_fine_tuning_peaks_in_the_step() -> None:
    config = load_catalogue()["llama-3.1-8b"]["config"]
    options = StepOptions(
        config=config, method=Method.FULL, length=2048, dtype="fp32", autocast="bf16", layers=1
    )
    recording = run(options)
    parameters = 128256 * 4096 * 2 + 4096 + 218_112_000
    assert recording.peak_phase == "step"
    assert recording.peak_bytes == pytest.approx(20 * parameters, rel=0.002)


def test_phases_terms_and_peak_agree() -> None:
    recording = run(replace(OPTIONS, method=Method.FULL))
    names = [phase.name for phase in recording.phases]
    assert names == ["load", "forward", "loss", "backward", "step"]
    for phase in recording.phases:
        assert sum(phase.terms_bytes.values()) == phase.peak_bytes
        assert sum(phase.modules_bytes.values()) == phase.peak_bytes
    assert recording.peak_bytes == max(phase.peak_bytes for phase in recording.phases)
    assert recording.peak_reserved_bytes is not None
    assert recording.peak_reserved_bytes >= recording.peak_bytes
    assert len(recording.largest) == 10
    assert recording.largest[0].bytes == max(tensor.bytes for tensor in recording.largest)
    step = next(phase for phase in recording.phases if phase.name == "step")
    weights = step.terms_bytes["weights"]
    assert step.terms_bytes["gradients"] == pytest.approx(weights, rel=0.01)
    # m and v, and foreach AdamW's square root of v
    assert step.terms_bytes["optimizer"] == pytest.approx(3 * weights, rel=0.02)
    assert Recording.from_dict(recording.to_dict()) == recording


@pytest.mark.parametrize("gpu", ["rtx-4090", "h100-sxm", "b200"])
def test_blas_workspaces_stand_from_the_first_product_on_as_planned(gpu: str) -> None:
    machine = make_machine(gpu)
    recipe = Recipe(
        task="sft",
        method="lora",
        framework="hf-trainer",
        context=128,
        micro_batch_size=1,
        attention="sdpa",
        optimizer="adamw",
        checkpointing="full",
    )
    planned = plan(model_spec_from_config(TINY, name="tiny", source="test"), recipe, machine)
    options = step_options(planned.resolved, TINY, gpu=machine.gpu)
    traced = {phase.name: phase for phase in tracing.trace(HfSft(options)).phases}
    for phase in planned.phases:
        overhead = sum(term.bytes for term in phase.terms if term.name == "overhead")
        assert traced[phase.name].terms_bytes.get("overhead", 0) == overhead, phase.name
    assert traced["forward"].terms_bytes["overhead"] == 2 * blas_workspace_bytes(machine.gpu)


def test_fused_adamw_has_no_temporary() -> None:
    foreach = run(replace(OPTIONS, method=Method.FULL))
    fused = run(replace(OPTIONS, method=Method.FULL, optimizer=Optimizer.ADAMW_FUSED))
    sizes = [
        next(p.terms_bytes["optimizer"] for p in recording.phases if p.name == "step")
        for recording in (foreach, fused)
    ]
    assert sizes[1] == pytest.approx(sizes[0] * 2 / 3, rel=0.02)


def test_8bit_states_and_paged_states() -> None:
    plain = run(replace(OPTIONS, method=Method.FULL, dtype="fp32"))
    eight = run(replace(OPTIONS, method=Method.FULL, dtype="fp32", optimizer=Optimizer.ADAMW_8BIT))
    states = eight.phases[1].terms_bytes["optimizer"]
    trained = plain.phases[1].terms_bytes["optimizer"] / 8
    # the HF Trainer keeps embeddings in 32 bit; the rest has two bytes and the block constants
    embedding = TINY["vocab_size"] * TINY["hidden_size"]
    assert states == pytest.approx(8 * embedding + 2.03 * (trained - embedding), rel=0.03)
    paged = run(
        replace(OPTIONS, method=Method.FULL, dtype="fp32", optimizer=Optimizer.PAGED_ADAMW_8BIT)
    )
    assert (
        paged.phases[1].terms_bytes.get("optimizer", 0) < 0.3 * states
    )  # tensors under 100,000 elements stay
    assert (paged.host_peak_bytes or 0) > 0.7 * states


def test_qlora_weights_and_the_dequantised_weight() -> None:
    options = replace(OPTIONS, method=Method.QLORA, autocast="bf16")
    recording = run(options)
    linears = 2 * (256 * 256 * 2 + 128 * 256 * 2 + 3 * 256 * 512)
    rest = 2000 * 256 + 5 * 256
    quantised = linears * (0.5 + 1 / 64 + 4 / (64 * 256))
    # k-bit preparation upcasts the embedding (tied) and the norms to fp32
    assert recording.phases[0].terms_bytes["weights"] == pytest.approx(
        quantised + 4 * rest, rel=0.03
    )
    temporaries = [e for e in recording.events if "4bit" in e.op and e.kind == "alloc"]
    assert any(event.bytes == 256 * 512 * 2 for event in temporaries)
    unprepared = run(replace(options, prepare_kbit=False))
    assert unprepared.phases[0].terms_bytes["weights"] == pytest.approx(
        quantised + 2 * rest, rel=0.03
    )


def test_offloaded_checkpoints_live_on_the_host() -> None:
    config = TINY | {"num_hidden_layers": 8}
    options = replace(OPTIONS, config=config, length=512)
    kept = run(replace(options, checkpointing=Checkpointing.FULL))
    moved = run(replace(options, checkpointing=Checkpointing.OFFLOAD))
    one = 2 * 512 * 256 * 2
    assert kept.host_peak_bytes == 0
    assert moved.host_peak_bytes == 7 * one
    forward = [next(p for p in r.phases if p.name == "loss") for r in (kept, moved)]
    saved = forward[0].terms_bytes["activations"] - forward[1].terms_bytes["activations"]
    # the first input, PEFT's leaf that requires a gradient, stays with autograd
    assert saved == 6 * one


def test_fp16_with_a_gradient_scaler_runs() -> None:
    recording = run(replace(OPTIONS, dtype="fp32", autocast="fp16", method=Method.FULL))
    assert any("_amp" in event.op or event.phase == "step" for event in recording.events)


def ops(options: StepOptions) -> Counter[str]:
    return Counter(event.op for event in run(options).events if event.kind == "alloc")


def test_dropout_keeps_a_one_byte_mask() -> None:
    options = replace(OPTIONS, lora_dropout=0.1, checkpointing=Checkpointing.NONE, steps=1)
    tracker = tracing.run_subject(HfSft(options))
    masks = [
        e.block for e in tracker.events if e.alloc and e.block.op == "aten.native_dropout.default"
    ]
    assert {block.dtype for block in masks} >= {"bool"}
    assert all(block.bytes == 2 * 128 * block.shape[-1] for block in masks if block.dtype == "bool")


def test_autocast_has_cudas_fp32_list() -> None:
    """Softmax of half inputs runs in fp32 under CUDA's autocast, not under the CPU's."""

    def softmax_dtype(*, behave: bool) -> torch.dtype:
        tracker = StorageTracker()
        mode = CudaBehaviour(tracker) if behave else nullcontext()
        with tracker, mode, torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.rand(4, 4, dtype=torch.bfloat16).logsumexp(-1).dtype

    assert softmax_dtype(behave=True) == torch.float32
    assert softmax_dtype(behave=False) == torch.bfloat16


def test_autocast_is_seen_by_code_that_asks_for_cuda() -> None:
    tracker = StorageTracker()
    with tracker, CudaBehaviour(tracker), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled()
    assert not torch.is_autocast_enabled()


def attention_sizes(dtype: torch.dtype, *, kv_heads: int, masked: bool = False) -> list[int]:
    """Return what F.scaled_dot_product_attention allocates, largest first."""
    tracker = StorageTracker()
    with FakeTensorMode(), tracker, CudaBehaviour(tracker):
        q = torch.empty(1, 8, 1024, 64, dtype=dtype, requires_grad=True)
        k = torch.empty(1, kv_heads, 1024, 64, dtype=dtype)
        mask = torch.ones(1, 1, 1024, 1024, dtype=torch.bool) if masked else None
        before = len(tracker.events)
        torch.nn.functional.scaled_dot_product_attention(
            q, k, k, attn_mask=mask, enable_gqa=kv_heads != 8
        )
        events = tracker.events[before:]
    return sorted((event.block.bytes for event in events if event.alloc), reverse=True)


def test_attention_backends_follow_cuda() -> None:
    out, lse = 8 * 1024 * 64 * 2, 8 * 1024 * 4
    assert attention_sizes(torch.bfloat16, kv_heads=2) == [out, lse]
    # a mask: memory-efficient; the boolean mask becomes an additive one in bf16
    assert attention_sizes(torch.bfloat16, kv_heads=8, masked=True)[:1] == [1024 * 1024 * 2]
    # fp32 and grouped queries: no fused kernel, the scores exist
    assert attention_sizes(torch.float32, kv_heads=2)[0] == 8 * 1024 * 1024 * 4
    assert attention_sizes(torch.float32, kv_heads=8) == [2 * out, lse]


def test_flash_backward_states_its_accumulators() -> None:
    tracker = StorageTracker()
    with FakeTensorMode(), tracker, CudaBehaviour(tracker):
        q = torch.empty(1, 8, 1000, 64, dtype=torch.bfloat16, requires_grad=True)
        k = torch.empty(1, 2, 1000, 64, dtype=torch.bfloat16, requires_grad=True)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
        before = len(tracker.events)
        out.backward(torch.empty_like(out))
        sizes = [event.block.bytes for event in tracker.events[before:] if event.alloc]
    assert 8 * 1024 * 64 * 4 in sizes  # fp32 dq, rows rounded up to 128
    assert 8 * 1024 * 4 in sizes  # softmax_d


def test_host_and_device_are_told_apart() -> None:
    tracker = StorageTracker()
    with FakeTensorMode(), tracker, CudaBehaviour(tracker):
        on_device = torch.empty(100)
        host = on_device.to("cpu")
        back = host.to("cuda")
        pinned = torch.empty(100, pin_memory=True)
        places = [tracker.block_of(t) for t in (on_device, host, back, pinned)]
    assert [b.place == HOST for b in places if b is not None] == [False, True, False, True]


def test_embedding_backward_sorts_above_3072_tokens() -> None:
    options = replace(OPTIONS, method=Method.FULL, micro_batch=1, length=4096, steps=1)
    events = run(options).events
    op = "aten.embedding_dense_backward.default"
    sizes = [e.bytes for e in events if e.op == op and e.kind == "alloc"]
    # sorted, where they were and where runs begin; 2,000 different tokens there can be
    assert sizes.count(8 * 4096) == 3
    assert sizes.count(8 * 2000) == 2
    assert 8 * (409 + 2000) in sizes


def test_in_place_accumulation_is_cheaper_than_what_modes_see() -> None:
    """Fake-tensor figures published elsewhere count gather's gradient twice."""
    options = replace(OPTIONS, fp32_outputs=True, length=512, steps=1)
    as_run = tracing.trace(TrlGrpo(options, fused=False))
    as_counted = tracing.trace(TrlGrpo(options, fused=False), in_place=False)
    logit = 2 * 511 * 2000 * 4
    assert as_run.peak_phase == as_counted.peak_phase == "loss"
    assert as_counted.peak_bytes - as_run.peak_bytes == pytest.approx(logit, rel=0.02)


def test_time_limit_says_where() -> None:
    with pytest.raises(TraceTimeoutError, match="ran out of time in phase"):
        run(OPTIONS, time_limit_s=0.0)


class Branching(HfSft):
    """A step that branches on a token."""

    def micro_step(self, model: Any, tracker: StorageTracker, scaler: Any) -> None:
        tracker.phase = "forward"
        if torch.zeros(3, dtype=torch.long).argmax():
            super().micro_step(model, tracker, scaler)


def test_data_dependent_control_flow_is_named() -> None:
    with pytest.raises(UnsupportedError, match="data-dependent control flow at operator"):
        tracing.trace(Branching(OPTIONS))


class Breaking(HfSft):
    """A step with an operator that cannot work."""

    def micro_step(self, model: Any, tracker: StorageTracker, scaler: Any) -> None:
        tracker.phase = "forward"
        torch.zeros(2, 3) @ torch.zeros(2, 3)


def test_a_failing_operator_is_named() -> None:
    with pytest.raises(UnsupportedError, match="RuntimeError at operator"):
        tracing.trace(Breaking(OPTIONS))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (replace(OPTIONS, config={"model_type": "nonsense"}), "nonsense"),
        (replace(OPTIONS, config={}), "None"),
        (replace(OPTIONS, lora_targets=("no_such_proj",)), "no_such_proj"),
        (replace(OPTIONS, dtype="fp8"), "fp8"),
        (replace(OPTIONS, optimizer=Optimizer.MUON), "muon"),
    ],
)
def test_bad_input_is_one_line(options: StepOptions, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        run(options)
    assert "\n" not in caught.value.message


def test_gradients_are_gradients_from_their_first_byte() -> None:
    tracker = tracing.run_subject(HfSft(replace(OPTIONS, method=Method.FULL, steps=1)))
    assign_terms(tracker.events, vocab=2000)
    made = [e.block for e in tracker.events if e.alloc and e.block.term == "gradients"]
    assert all(block.phase in ("loss", "backward") for block in made)
    assert summarise(tracker.events).peak_bytes > 0


@pytest.mark.parametrize(
    "name", ["phi-3-mini-128k", "gpt2", "gpt-oss-20b", "qwen3-30b-a3b", "gemma-3-4b", "mamba2-130m"]
)
def test_unusual_architectures_trace(name: str) -> None:
    """Long-context rotary branches, Conv1D, no SDPA, grouped experts, vision models, state space."""
    config = load_catalogue()[name]["config"]
    targets = ("in_proj",) if "mamba" in name else "all-linear"
    options = StepOptions(
        config=config, length=256, layers=2, steps=1, lora_targets=targets, adapter_dtype="bf16"
    )
    assert run(options).peak_bytes > 0
