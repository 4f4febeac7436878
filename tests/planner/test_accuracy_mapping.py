"""Rows are read by what their columns mean: recipes, names, kernels, engines."""

from math import exp
from statistics import NormalDist, median

import pytest

from benchmarks.laws.kernels import predict_kernel
from planner.accuracy.lengths import typical_tokens
from planner.accuracy.lora_targets import lora_targets
from planner.accuracy.names import loaded_model, machine_named, model_named
from planner.accuracy.prediction import NotCovered
from planner.accuracy.rl_recipe import rl_recipe
from planner.accuracy.rows import Layout, Row
from planner.accuracy.sft_recipe import recipe_of
from planner.accuracy.sft_rows import canonical, predict_sft
from planner.accuracy.stages import part
from planner.accuracy.variants import litgpt_model
from planner.accuracy.vllm_engine import run_of
from planner.accuracy.vllm_rows import predict_vllm
from planner.run.recipe import Checkpointing, Loss, Method, Optimizer, Sharding, Task
from planner.units import GiB, MiB

SFT = {
    "id": "t",
    "source_family": "fms-acceleration",
    "model": "mistralai/Mistral-7B-v0.1",
    "method": "lora",
    "lora_rank": "16.0",
    "lora_targets": "q_proj k_proj v_proj o_proj",
    "weights_dtype": "bfloat16",
    "mixed_precision": "bf16-autocast",
    "optimizer": "adamw (HF Trainer default, states in param dtype)",
    "grad_ckpt": "full",
    "attn": "flash_attention_2",
    "seq_len": "4096",
    "micro_batch": "4",
    "grad_accum": "1",
    "packing": "True",
    "n_gpus": "1",
    "gpu": "A100-80GB",
    "parallelism": "single",
    "kernels": "foak-fast-kernels",
    "framework": "fms-hf-tuning + fms-acceleration (HF SFTTrainer)",
    "quantity": "peak_allocated",
    "per_gpu_or_total": "per GPU",
    "path": "scripts/benchmarks/refs/a100_80gb_liger.csv",
}


def sft(**changes: str) -> Row:
    return Row(Layout.SFT, SFT | changes)


def test_a_fine_tuning_row_becomes_its_recipe():
    recipe = recipe_of(sft(), model_named("Mistral-7B-v0.1"))
    assert recipe.method is Method.LORA
    assert recipe.lora.rank == 16
    assert recipe.lora.targets == ("k_proj", "o_proj", "q_proj", "v_proj")
    assert (recipe.dtype, recipe.mixed_precision) == ("bf16", "bf16")
    assert (recipe.micro_batch_size, recipe.context) == (4, 4096)
    assert recipe.checkpointing is Checkpointing.FULL
    assert recipe.optimizer is Optimizer.ADAMW
    assert recipe.sharding is Sharding.NONE
    assert recipe.packing is True


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"base_quant": "gptq-4bit", "method": "qlora-gptq"}, "quantization", "gptq-4bit"),
        ({"base_quant": "bnb-nf4", "method": "qlora"}, "quantization", "nf4"),
        ({"base_quant": "int8 (gptq)", "method": "qlora"}, "quantization", "gptq-8bit"),
        ({"kernels": "foak-fast-kernels-liger"}, "loss", Loss.CHUNKED),
        ({"parallelism": "FSDP FULL_SHARD", "n_gpus": "4"}, "sharding", Sharding.FSDP),
        ({"parallelism": "DeepSpeed ZeRO-3", "n_gpus": "4"}, "sharding", Sharding.ZERO3),
        ({"parallelism": "", "n_gpus": "2"}, "sharding", Sharding.DDP),
        ({"grad_ckpt": "unsloth (offloaded)"}, "checkpointing", Checkpointing.OFFLOAD),
        ({"grad_ckpt": "none"}, "checkpointing", Checkpointing.NONE),
        ({"optimizer": "paged_adamw_8bit"}, "optimizer", Optimizer.PAGED_ADAMW_8BIT),
        ({"mixed_precision": "none (bf16-true)"}, "mixed_precision", "none"),
        ({"mixed_precision": "fp16-amp"}, "mixed_precision", "fp16"),
        ({"method": "full (pretrain)"}, "method", Method.FULL),
        ({"method": "ia3", "lora_targets": "['k_proj', 'v_proj']"}, "method", Method.LORA),
    ],
)
def test_one_cell_moves_one_field(changes, field, value):
    assert getattr(recipe_of(sft(**changes), model_named("Mistral-7B-v0.1")), field) == value


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"method": "classification"}, "not a fine-tuning method"),
        ({"parallelism": "PP 8", "n_gpus": "8"}, "pipeline"),
        ({"framework": "nobody's trainer"}, "not known"),
        ({"quantity": "tokens_per_second"}, "not one that the planner states"),
        ({"per_gpu_or_total": "total"}, "sum over GPUs"),
        ({"method": "qlora", "base_quant": "bnb-nf4", "seq_len": ""}, "sequence length"),
        ({"seq_len": "", "method": "full"}, "does not state the sequence length"),
        ({"gpu": "24GB GPU"}, "the card '24GB GPU' is not known"),
        ({"gpu": "A100X"}, "the card 'A100X' is not known"),
        ({"gpu": ""}, "names no card"),
        ({"method": "osf"}, "not a fine-tuning method"),
    ],
)
def test_what_cannot_be_expressed_says_why(changes, reason):
    with pytest.raises(NotCovered, match=reason):
        predict_sft(sft(**changes))


def test_longer_samples_need_more():
    short, long = (predict_sft(sft(seq_len=length)).value for length in ("2048", "4096"))
    assert long > 1.15 * short


def test_mistral_lora_matches_the_published_run():
    assert predict_sft(sft()).value == pytest.approx(21.914 * GiB, rel=0.02)


@pytest.mark.parametrize(
    ("text", "model", "expected"),
    [
        ("query;value", "falcon-7b", ("query_key_value",)),
        ("DEFAULT (c_attn / qkv)", "qwen-7b", ("k_proj", "q_proj", "v_proj")),
        ("", "llama-3-8b", ("q_proj", "v_proj")),
        ("all-linear", "llama-3-8b", 7),
        ("q,k,v,o,gate,up,down", "llama-3-8b", 7),
        ("['up_proj', 'gate_proj', 'down_proj']", "llama-3-8b", 3),
    ],
)
def test_lora_targets_in_any_words(text, model, expected):
    found = lora_targets(text, model_named(model))
    assert (len(found) if isinstance(expected, int) else found) == expected


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("TechxGenus/Meta-Llama-3-8B-GPTQ", "llama-3-8b"),
        ("Llama 2 13 B", "llama-2-13b"),
        ("unsloth/Qwen3-8B-FP8", "qwen3-8b"),
        ("qwen-1_8b-chat", "qwen-1.8b"),
        ("StableLM Alpha 3 B", "stablelm-base-alpha-3b"),
        ("Llama-3.2-3B-Instruct-Q8_0.gguf", "llama-3.2-3b"),
        ("lingshu-medical-mllm/Lingshu-32B (Qwen2.5-VL-32B)", "qwen2.5-vl-32b"),
        ("(Qwen2.5-0.5B class)", "qwen2.5-0.5b"),
        ("facebook/opt-13b", "opt-13b"),
        ("facebook/opt-1.3b", "opt-1.3b"),
    ],
)
def test_printed_names_find_their_model(text, name):
    assert model_named(text).name == name


@pytest.mark.parametrize("text", ["bert-base-cased", "", "7B", "(not named)"])
def test_names_that_mean_no_decoder_are_refused(text):
    with pytest.raises(NotCovered):
        model_named(text)


def test_an_encoder_is_only_loaded():
    assert loaded_model("bert-base-cased").parameters == 108_310_272


def test_cards_are_found_by_name_or_by_printed_total():
    assert machine_named("Tesla T4").gpu.id == "t4"
    assert machine_named("2x RTX 4090", 2).num_gpus == 2
    assert machine_named("some card", 1, 23.98).vram_bytes == int(23.98 * GiB)
    assert machine_named("80GB (79.22 GiB)").vram_bytes == int(79.22 * GiB)
    assert machine_named("RTX 4090 24GB").gpu.id == "rtx-4090"


@pytest.mark.parametrize(
    ("quantity", "name"),
    [
        ("peak_allocated", "peak_allocated"),
        ("peak_allocated (triton testing harness)", "peak_allocated"),
        ("peak_allocated_forward", "phase_allocated_forward"),
        ("peak_allocated_backward", "phase_allocated_backward"),
        ("peak_allocated_step", "phase_allocated_step"),
    ],
)
def test_a_phases_peak_is_not_the_runs_peak(quantity, name):
    assert canonical(quantity) == name
    if quantity != name:
        return
    assert predict_sft(sft(quantity="peak_allocated_forward")).value < predict_sft(sft()).value


def test_nested_constants_follow_the_framework_unless_the_row_says():
    model = model_named("Mistral-7B-v0.1")
    quantised = {"method": "qlora", "base_quant": "bnb-nf4", "framework": "peft"}
    assert recipe_of(sft(**quantised), model).double_quant is None
    assert recipe_of(sft(**quantised | {"base_quant": "bnb-nf4-dq"}), model).double_quant is True


def test_parts_of_a_model_add_up():
    model = model_named("qwen-72b")
    parts = [part(model, index, 2) for index in range(2)]
    assert sum(piece.parameters for piece in parts) == model.parameters
    assert parts[0].head is None
    assert parts[1].embeddings == ()


def test_litgpt_unties_the_head():
    model = model_named("gemma-2b")
    assert litgpt_model(model).parameters == model.parameters + model.vocab * model.hidden


def test_typical_length_is_the_median_of_what_the_cap_keeps():
    row = Row(Layout.SFT, {"notes": "3234+-2547 tokens (min 91)"})
    assert typical_tokens(row, 1, 10**6) == 2540  # mean / sqrt(1 + (deviation / mean)^2)
    # of 1,000 log-normal lengths in equal steps of probability, those up to 2,048 tokens
    steps = [NormalDist().inv_cdf((step + 0.5) / 1000) for step in range(1000)]
    kept = [length for z in steps if (length := 2540.6 * exp(0.6948 * z)) <= 2048]
    assert typical_tokens(row, 1, 2048) == pytest.approx(median(kept), rel=0.005)
    longest = sorted(kept)[int(len(kept) * 0.5 ** (1 / 8))]  # half of all eights are below it
    assert typical_tokens(row, 8, 2048) == pytest.approx(longest, rel=0.01)
    assert typical_tokens(Row(Layout.SFT, {"notes": "no lengths"}), 1, 2048) is None


@pytest.mark.parametrize(
    ("fields", "mib"),
    [
        ({"model": "kernel cross_entropy", "kernels": "huggingface",
          "notes": 'V=65536; config {"B": 8, "T": 2048}'}, 20480.125),
        ({"model": "kernel rope", "kernels": "liger", "notes":
          'H=8192; config {"dtype": "torch.bfloat16", "seq_len": 2048, "num_q_heads": 32, '
          '"num_kv_heads": 8}'}, 90.14111),
        ({"model": "kernel swiglu", "kernels": "liger", "method": "kernel micro-benchmark: full",
          "notes": 'T=4096; config {"B": 4, "hidden_size": 4096, "dtype": "torch.bfloat16", '
          '"intermediate_size": 11008, "hidden_act": "silu"}'}, 2546.25),
        ({"model": "kernel fused_linear_cross_entropy", "kernels": "huggingface", "notes":
          'BT=32768; config {"H": 4096, "V": 128256, "mode": "forward", '
          '"dtype": "torch.bfloat16"}'}, 27582.5),
    ],
)  # fmt: skip
def test_kernel_laws_are_exact(fields, mib):
    row = Row(Layout.SFT, {"gpu": "NVIDIA A100-SXM4-80GB"} | fields)
    assert predict_kernel(row).value == pytest.approx(mib * MiB, rel=2e-4)


def test_a_kernel_without_its_sizes_is_refused():
    with pytest.raises(NotCovered, match="without the size"):
        predict_kernel(Row(Layout.SFT, {"model": "kernel rms_norm", "notes": "M=4"}))


GRPO = {
    "id": "g", "model": "Qwen3-8B", "method": "qlora", "lora_rank": "8", "algo": "grpo",
    "lora_targets": "q,k,v,o,gate,up,down", "framework": "trl", "batch_per_device": "8",
    "num_generations": "8", "completion_len": "160", "grad_ckpt": "full",
    "loss_impl": "full_logits", "ref_model": "none", "vllm": "none",
    "notes": "bf16 autocast, NF4 double quant, GA 4; about 12 tokens; trl 1.9.2",
}  # fmt: skip


def test_a_grpo_row_becomes_its_recipe():
    recipe = rl_recipe(Row(Layout.RL, GRPO), model_named("Qwen3-8B"))
    assert recipe.task is Task.GRPO
    assert (recipe.prompt_length, recipe.completion_length) == (12, 160)
    assert recipe.gradient_accumulation == 4
    assert recipe.double_quant is True
    assert recipe.lora.dtype == "bf16"
    assert recipe.framework == "trl-1.9"


def test_a_loop_that_never_steps_adds_its_gradients_up():
    row = Row(Layout.RL, GRPO | {"optimizer": "none", "notes": ""})
    recipe = rl_recipe(row, model_named("Qwen3-8B"))
    assert recipe.gradient_accumulation == 2  # the second micro-batch meets the first's gradients


@pytest.mark.parametrize(("unit", "size"), [("GB", GiB), ("GiB", GiB)])
def test_gb_of_the_rl_sources_is_gib(unit, size):
    assert Row(Layout.RL, {"value": "2", "unit": unit}).truth() == 2 * size


def test_openrlhf_prints_decimal_megabytes():
    row = Row(Layout.RL, {"value": "2", "unit": "GB", "source_title": "OpenRLHF #718"})
    assert row.truth() == 2e9


LOG = {
    "id": "v", "record_id": "V", "model": "meta-llama/Llama-3.1-8B-Instruct", "tp": "1",
    "engine": "V1", "vllm_version": "0.10.2", "max_model_len": "32768", "gpu": "RTX 3090",
    "total_gpu_memory_gib": "23.58", "gpu_memory_utilization": "0.9",
}  # fmt: skip


def vllm(quantity: str, peers: dict[str, float] | None = None, **changes: str) -> float:
    row = Row(Layout.VLLM, LOG | changes | {"quantity": quantity}, peers or {})
    return predict_vllm(row).value


def test_vllm_weights_hold_the_rotary_cache():
    # 8,030,261,248 parameters and 131,072 positions x 128, 2 bytes each
    assert vllm("model_weights") == 2 * 8_030_261_248 + 2 * 131072 * 128


def test_vllm_tokens_follow_the_logged_pool():
    tokens = vllm("kv_cache_tokens_printed", {"kv_cache_memory": 19.92 * GiB})
    assert tokens == pytest.approx(163168, rel=1e-3)


def test_vllm_splits_heads_over_ranks_until_there_is_one_each():
    pool = {"kv_cache_memory": 8.0 * GiB}
    one, two, sixteen = (
        vllm("kv_cache_tokens_printed", pool, tp=ranks) for ranks in ("1", "2", "16")
    )
    assert two == pytest.approx(2 * one, rel=1e-3)
    assert sixteen == pytest.approx(8 * one, rel=1e-3)


def test_vllm_budget_is_utilisation_times_total():
    assert vllm("usable_budget") == pytest.approx(0.9 * 23.58 * GiB)


def test_a_log_without_a_card_has_no_budget():
    with pytest.raises(NotCovered, match="neither a card"):
        vllm("usable_budget", gpu="", total_gpu_memory_gib="")


def test_quantised_words_choose_the_scheme():
    row = Row(Layout.VLLM, LOG | {"quantization": "fp8", "model": "Qwen3-8B-FP8"})
    assert run_of(row).recipe.quantization == "fp8"
    assert run_of(Row(Layout.VLLM, LOG)).recipe.quantization == "none"
