"""Causes, candidates, fixes and warnings on cases written here (not those of data/doctor)."""

import pytest

from planner.doctor.cause import Certainty
from planner.doctor.diagnose import Diagnosis, diagnose
from planner.units import GiB, MiB

FULL = (
    "CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of {total} of which {free} is free."
    " Including non-PyTorch memory, this process has {proc} memory in use. Of the allocated memory {alloc} is allocated by"
    " PyTorch, and {unalloc} is reserved by PyTorch but unallocated.\n"
)


def lead(found: Diagnosis) -> tuple[str, Certainty]:
    cause = found.failures[0].causes[0]
    return cause.category, cause.certainty


@pytest.mark.parametrize(
    ("category", "text"),
    [
        (
            "optimizer_temp",
            "Tried to allocate 3.14 GiB\n_multi_tensor_adamw: torch._foreach_sqrt(device_exp_avg_sqs)\nfull SFT, LLaMA-7B ZeRO-2, 8 x A100 80GB",
        ),
        (
            "upcast_fp32",
            "Tried to allocate 500.00 MiB\nin prepare_model_for_kbit_training\nLoRA, model: meta-llama/Llama-2-7b-hf",
        ),
        (
            "save_full_state",
            "Tried to allocate 270.00 MiB\nFSDP state_dict() clone after the last epoch",
        ),
        (
            "static_state",
            "Tried to allocate 112.00 MiB\nloss.backward()\nfull fine-tune Meta-Llama-3-8B bf16 on A100 40GB",
        ),
        ("eval_accumulation", "Tried to allocate 10.00 GiB\nin evaluation_loop\nin nested_concat"),
        (
            "attention_quadratic",
            "Tried to allocate 8.00 GiB\nin eager_attention_forward\nattn_weights = softmax(attn_weights)",
        ),
        (
            "host_full_copy_per_rank",
            "failed (exitcode: -9) local_rank: 3\nLoading checkpoint shards: 40%\nmodel: Qwen/Qwen2.5-72B-Instruct 8 GPUs",
        ),
        (
            "full_copy_per_gpu",
            "Tried to allocate 462.00 MiB\nin _load_state_dict_into_meta_model\nQwen2.5-72B-Instruct, 4 x A100 80GB",
        ),
        ("vllm_cuda_graphs", "Tried to allocate 2.00 MiB\nin capture_model\ntorch.cuda.graph(g)"),
        (
            "wake_up_order",
            "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62\nllm.wake_up()",
        ),
        (
            "kv_cache",
            "Tried to allocate 20.00 MiB\nkey_states = torch.cat([past_key_value[0], key_states], dim=2)",
        ),
        (
            "gather_full_params",
            "Tried to allocate 1.96 GiB\nunwrap_model_for_generation\nGatheredParameters, ZeRO-3",
        ),
    ],
)
def test_causes(category: str, text: str) -> None:
    found = diagnose(f"CUDA out of memory. {text}" if text.startswith("Tried") else text)
    assert lead(found)[0] == category


def test_other_process_by_subtraction() -> None:
    text = "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 23.69 GiB total capacity; 10.00 GiB already allocated; 10.00 MiB free; 10.20 GiB reserved in total by PyTorch)"
    found = diagnose(text)
    assert lead(found) == ("other_process", Certainty.PROVEN)
    assert found.failures[0].advice.fixes[0].saved_bytes == pytest.approx(13.48 * GiB, rel=1e-3)


def test_missing_reserved_figure_accuses_nobody() -> None:
    text = "CUDA out of memory. Tried to allocate 2.72 GiB (GPU 0; 31.75 GiB total capacity; 23.68 GiB already allocated; 2.36 GiB free; 27.8"
    assert lead(diagnose(text))[0] == "unknown"


def test_fragmentation_only_when_the_holes_would_have_held_it() -> None:
    sizes = {
        "tried": "1.20 GiB",
        "total": "79.15 GiB",
        "free": "800.00 MiB",
        "proc": "78.30 GiB",
        "alloc": "60.00 GiB",
        "unalloc": "17.50 GiB",
    }
    assert lead(diagnose(FULL.format(**sizes))) == ("fragmentation", Certainty.CONSISTENT)
    small = diagnose(FULL.format(**sizes | {"alloc": "77.00 GiB", "unalloc": "500.00 MiB"}))
    assert lead(small)[0] != "fragmentation"
    assert any(
        "expandable_segments is printed always" in warning
        for warning in small.failures[0].advice.warnings
    )


def test_a_request_of_many_cards_is_a_shape_bug() -> None:
    cause = (
        diagnose(
            FULL.format(
                tried="355.43 GiB",
                total="79.32 GiB",
                free="18.06 GiB",
                proc="61.25 GiB",
                alloc="52.51 GiB",
                unalloc="8.25 GiB",
            )
        )
        .failures[0]
        .causes[0]
    )
    assert cause.category == "unknown"
    assert "shape bug" in cause.explanation


def test_collisions_are_all_listed() -> None:
    """270.00 MiB is one bf16 matrix of Qwen2.5-32B; another shape of the run prints the same."""
    text = "CUDA out of memory. Tried to allocate 270.00 MiB.\nloss.backward()\nmodel: Qwen/Qwen2.5-32B\nper_device_train_batch_size: 1\nmax_length: 5120"
    found = diagnose(text).failures[0].candidates
    assert {candidate.kind for candidate in found} >= {"weight", "activation"}
    assert sum(candidate.likelihood for candidate in found) == pytest.approx(1, abs=0.01)


def test_a_batch_longer_than_stated_is_said() -> None:
    text = "CUDA out of memory. Tried to allocate 6.54 GiB.\nF.cross_entropy\nmodel: Qwen/Qwen2.5-3B\nlocal_batch: 1\nseq_length: 4096"
    cause = diagnose(text).failures[0].causes[0]
    assert "2.8 times the stated 4,096 tokens" in cause.explanation


def test_tiny_request_has_no_candidates() -> None:
    failure = diagnose(
        "CUDA out of memory. Tried to allocate 20.00 MiB.\nmodel: Qwen/Qwen3-8B"
    ).failures[0]
    assert failure.candidates == ()
    assert failure.budget is not None
    assert failure.budget.tiny_request


def test_kv_advice_is_exact() -> None:
    text = "ValueError: To serve at least one request with the model's max seq len (262144), (62.00 GiB KV cache is needed, which is larger than the available KV cache memory (48.66 GiB). Based on the available memory, the estimated maximum model length is 205728.\ngpu_memory_utilization=0.9"
    found = diagnose(text, gpu="h200")
    fixes = found.failures[0].advice.fixes
    assert lead(found) == ("vllm_kv_too_small", Certainty.PROVEN)
    assert "253,952 B a token" in found.failures[0].causes[0].formula
    assert fixes[0].change.startswith("--max-model-len 205728")
    assert fixes[0].saved_bytes == round(62.00 * GiB) - round(48.66 * GiB)
    assert "lowering gpu_memory_utilization" in found.failures[0].advice.warnings[0]


def test_utilization_at_the_top_is_not_raised_further() -> None:
    text = "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`\nmodel: Qwen1.5-14B-Chat\ngpu_memory_utilization: 0.95"
    advice = diagnose(text).failures[0].advice
    assert not any("HIGHER" in fix.change for fix in advice.fixes)
    assert any("no way out at 0.95" in warning for warning in advice.warnings)


def test_startup_check_gives_the_share_that_starts() -> None:
    text = "Free memory on device (31.44/47.38 GiB) on startup is less than desired GPU memory utilization (0.95, 45.01 GiB)."
    fixes = diagnose(text).failures[0].advice.fixes
    assert any("--gpu-memory-utilization 0.66" in fix.change for fix in fixes)


def test_planner_prices_the_fixes() -> None:
    text = "CUDA out of memory. Tried to allocate 9.27 GiB.\nF.cross_entropy\nLoRA\nmodel: Qwen/Qwen3-8B\nper_device_train_batch_size: 4\nmax_length: 4096"
    failure = diagnose(text, gpu="rtx-4090").failures[0]
    assert failure.planned is not None
    chunked = next(fix for fix in failure.advice.fixes if fix.change.startswith("loss=chunked"))
    assert chunked.saved_bytes is not None
    assert chunked.saved_bytes > 9 * GiB


def test_model_by_flag_wins_and_unknown_models_are_notes() -> None:
    found = diagnose(
        "CUDA out of memory. Tried to allocate 462.00 MiB.\nmodel.to(device)",
        model="Qwen2.5-72B-Instruct",
        gpu="a100-sxm4-80gb",
    )
    assert found.failures[0].candidates[0].bytes == 462 * MiB
    assert lead(found)[0] in ("weights", "full_copy_per_gpu")
    odd = diagnose("CUDA out of memory.", model="nobody/knows-this", gpu="a-card-of-2040")
    assert any("not in the catalogue" in note for note in odd.notes)
    assert any("a-card-of-2040" in note for note in odd.notes)


def test_code_around_an_error_is_not_taken_for_the_model() -> None:
    text = "  model = AutoModelForCausalLM.from_pretrained(\n    in _load_state_dict_into_meta_model\nCUDA out of memory. Tried to allocate 462.00 MiB.\nmodel = Qwen/Qwen2.5-72B-Instruct"
    found = diagnose(text, gpu="a100-sxm4-80gb")
    assert found.context.model_name == "Qwen/Qwen2.5-72B-Instruct"
    assert found.failures[0].candidates[0].formula.startswith("29,568 * 8,192 * 2 B")


def test_refusals_without_numbers_stay_unknown() -> None:
    text = (
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    )
    cause = diagnose(text).failures[0].causes[0]
    assert (cause.category, cause.certainty) == ("unknown", Certainty.UNKNOWN)
    assert "no sizes are printed" in cause.explanation


def test_slurm_and_ray_kills_are_host_memory() -> None:
    slurm = diagnose(
        "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0.\nLoading checkpoint shards: 33%"
    )
    ray = diagnose(
        "Memory on the node (IP: 1) where the task was running was 482.10GB / 503.50GB (0.957), which exceeds"
    )
    assert lead(slurm)[0] == "host_full_copy_per_rank"
    assert ray.parsed["host_used_bytes"] == round(482.10 * GiB)


def test_what_fills_the_card_is_said_even_when_the_cause_is_unknown() -> None:
    full = FULL.format(
        tried="108.00 MiB",
        total="15.89 GiB",
        free="65.12 MiB",
        proc="15.82 GiB",
        alloc="15.36 GiB",
        unalloc="168.02 MiB",
    )
    cause = diagnose(full).failures[0].causes[0]
    assert (cause.category, cause.certainty) == ("unknown", Certainty.UNKNOWN)
    assert "own tensors hold 97% of the card" in cause.explanation
    large = FULL.format(
        tried="74.16 GiB",
        total="44.40 GiB",
        free="29.89 GiB",
        proc="14.51 GiB",
        alloc="13.44 GiB",
        unalloc="738.96 MiB",
    )
    assert "larger than the whole card" in diagnose(large).failures[0].causes[0].explanation


def test_attention_scores_explain_an_impossible_request() -> None:
    text = FULL.format(
        tried="64.00 GiB",
        total="14.75 GiB",
        free="5.48 GiB",
        proc="9.27 GiB",
        alloc="8.79 GiB",
        unalloc="351.89 MiB",
    )
    failure = diagnose(text, model="codellama/CodeLlama-7b-hf").failures[0]
    assert failure.causes[0].category == "attention_quadratic"
    assert any(
        "4 * 32 * 16,384 * 16,384 * 2 B" in candidate.formula for candidate in failure.candidates
    )
