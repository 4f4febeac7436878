"""Defaults when a key is absent, by tool and version; traps that the report must name."""

import pytest

from planner.importers import import_config
from planner.importers.versions import stated
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.plan import plan
from planner.run.recipe import (
    Checkpointing,
    EngineKind,
    Loss,
    Method,
    Optimizer,
    Reference,
    Sharding,
    Task,
)

RECIPE_2025 = """
model_name_or_path: Qwen/Qwen2.5-7B
torch_dtype: bfloat16
max_seq_length: 4096
use_peft: true
reward_funcs: [accuracy]
num_generations: 8
max_prompt_length: 1024
"""


@pytest.mark.parametrize(
    ("version", "dtype", "checkpointing", "beta", "completion", "prompt", "loss"),
    [
        ("0.18.0", "bf16", Checkpointing.NONE, 0.04, 256, 1024, Loss.FULL),
        ("0.19.1", "bf16", Checkpointing.NONE, 0.0, 256, 1024, Loss.FULL),
        ("0.24.0", "bf16", Checkpointing.FULL, 0.0, 256, 1024, Loss.FULL),
        ("1.0.0", "fp32", Checkpointing.FULL, 0.0, 256, None, Loss.FULL),
        ("1.9.2", "fp32", Checkpointing.FULL, 0.0, 256, None, Loss.FULL),
        ("1.10.0", "fp32", Checkpointing.FULL, 0.0, 512, None, Loss.FULL),
        ("1.16.0", "fp32", Checkpointing.FULL, 0.0, 512, None, Loss.CHUNKED),
    ],
)
def test_trl_drift(
    version: str,
    dtype: str,
    checkpointing: Checkpointing,
    beta: float,
    completion: int,
    prompt: int | None,
    loss: Loss,
) -> None:
    found = import_config(RECIPE_2025, version=version, tool="trl")
    recipe = found.run.recipe
    assert (recipe.dtype, recipe.checkpointing, recipe.beta) == (dtype, checkpointing, beta)
    assert (recipe.completion_length, recipe.prompt_length, recipe.loss) == (
        completion,
        prompt,
        loss,
    )
    assert recipe.lora.targets == ("q_proj", "v_proj")
    assert not found.report.version_assumed
    silent = {row.key for row in found.report.not_understood}
    assert ("torch_dtype" in silent) == (version >= "1")
    assert recipe.framework == f"trl=={version}"


PROBE = """
model_name_or_path: Qwen/Qwen2.5-1.5B
dtype: bfloat16
use_peft: true
reward_funcs: [accuracy]
per_device_train_batch_size: 8
max_completion_length: 4096
"""


def test_a_trl_1_9_config_is_planned_as_1_9() -> None:
    imported = import_config(f"# pip install trl==1.9.2\n{PROBE}")
    assert (imported.version, imported.report.version_assumed) == ("1.9.2", False)
    old, new = (
        plan(catalogue_model("qwen2.5-1.5b"), found.run.recipe, make_machine("h100-sxm"))
        for found in (imported, import_config(PROBE))
    )
    assert old.resolved.framework.name == "trl-1.9"
    assert new.resolved.framework.name == "trl"
    head = next(term.bytes for term in old.phase("loss").terms if term.name == "logits")
    assert head >= 16 * 8 * 4096 * 151_936  # 16 B a logit
    assert old.peak_bytes > 2 * new.peak_bytes


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("trl==1.9.2\ntorch\n", "1.9.2"),
        ("!pip install -q trl[vllm]==0.22.2 unsloth", "0.22.2"),
        ("trl ~= 1.9.0", "1.9.0"),
        ("trl @ git+https://github.com/huggingface/trl@v1.9.0", "1.9.0"),
        ("pip install git+https://github.com/huggingface/trl.git@v1.8.0", "1.8.0"),
        ("trl_version: 1.9", "1.9"),
        ('"trl_version": "0.18.2",', "0.18.2"),
        ("# written for TRL 1.9\nmodel: x", "1.9"),
        ("# TRL 1.16.0, our cluster", "1.16.0"),
        ('assert trl.__version__ == "1.4.0"', "1.4.0"),
        ("trl>=0.14", None),
        ("# needs TRL 1.0 or newer", None),
        ("# needs TRL 1.10+", None),
        ("not-trl==1.9", None),
        ("# trl 3 trainers", None),
    ],
)
def test_a_version_that_a_file_states(text: str, version: str | None) -> None:
    assert stated(text, "trl") == version


def test_unsloth_banners_and_pins_say_the_version() -> None:
    assert stated('"==((====))==  Unsloth 2025.3.19: Fast Qwen2 patching', "unsloth") == "2025.3.19"
    source = "# !pip install unsloth==2025.3.19\nfrom unsloth import FastLanguageModel\nm, t = FastLanguageModel.from_pretrained('unsloth/Qwen3-4B')\na = SFTConfig()\n"
    found = import_config(source)
    assert found.version == "2025.3.19"
    assert found.run.recipe.framework == "unsloth==2025.3.19"
    later = import_config(source.replace("2025.3.19", "2031.1"))
    assert later.run.recipe.framework == "unsloth~2031.1"
    assert any("no law covers unsloth 2031.1" in sentence for sentence in later.report.effects)


@pytest.mark.parametrize(
    ("key", "version", "framework"),
    [
        ("tuner_type", "4.6.0", "ms-swift"),
        ("train_type", "3.12", "ms-swift==3.12"),
        ("sft_type", "2.6", "ms-swift~2.6"),
    ],
)
def test_keys_decide_the_release_of_ms_swift(key: str, version: str, framework: str) -> None:
    found = import_config(f"swift sft --model Qwen/Qwen2.5-7B --{key} lora\n")
    assert (found.version, found.report.version_assumed) == (version, True)
    assert found.run.recipe.framework == framework
    assert any("no law covers" in sentence for sentence in found.report.effects) == (
        "~" in framework
    )


@pytest.mark.parametrize(
    ("argument", "version"),
    [("max_length=512", "1.16.0"), ("max_seq_length=512", "0.19.1")],
)
def test_a_script_is_no_newer_than_its_keywords(argument: str, version: str) -> None:
    source = f"import trl\nargs = SFTConfig({argument})\ntrainer = SFTTrainer(model='Qwen/Qwen3-0.6B', args=args)\n"
    assert import_config(source).version == version


@pytest.mark.parametrize(
    ("kind", "version", "loss"),
    [
        ("", "1.6.0", Loss.FULL),
        ("", "1.7.0", Loss.CHUNKED),
        ("nll", "1.9.0", Loss.FULL),
        ("chunked_nll", "1.6.0", Loss.CHUNKED),
        ("nll", "1.16.0", Loss.CHUNKED),
    ],
)
def test_the_loss_of_sft_by_release(kind: str, version: str, loss: Loss) -> None:
    line = f"loss_type: {kind}\n" if kind else ""
    text = f"model_name_or_path: Qwen/Qwen3-0.6B\nmax_length: 512\n{line}"
    recipe = import_config(text, version=version, tool="trl").run.recipe
    assert (recipe.task, recipe.loss) == (Task.SFT, loss)


def test_open_r1_is_read_with_the_trl_it_pins() -> None:
    found = import_config(
        "# open-r1 recipe\nmodel_name_or_path: Qwen/Qwen2.5-1.5B\nreward_funcs: [accuracy]\nuse_vllm: true\ntorch_dtype: bfloat16\n"
    )
    assert (found.tool, found.version, found.report.version_assumed) == ("open-r1", "0.18.0", True)
    assert found.run.recipe.engine.kind is EngineKind.VLLM_SERVER
    assert found.run.recipe.reference is Reference.SEPARATE  # beta 0.04, full


def test_axolotl_defaults() -> None:
    recipe = import_config("base_model: Qwen/Qwen3-8B\n").run.recipe
    assert (recipe.method, recipe.context, recipe.micro_batch_size) == (Method.FULL, 512, 1)
    assert (recipe.checkpointing, recipe.loss, recipe.optimizer) == (
        Checkpointing.NONE,
        Loss.FULL,
        Optimizer.ADAMW_FUSED,
    )


def test_axolotl_plugin_alone_fuses_the_loss_and_liger_needs_its_switch() -> None:
    base = "base_model: Qwen/Qwen3-8B\nplugins:\n  - axolotl.integrations.{}\n"
    cce = import_config(base.format("cut_cross_entropy.CutCrossEntropyPlugin"))
    liger = import_config(base.format("liger.LigerPlugin"))
    both = import_config(
        base.format("liger.LigerPlugin") + "liger_fused_linear_cross_entropy: true\n"
    )
    assert [found.run.recipe.loss for found in (cce, liger, both)] == [
        Loss.CHUNKED,
        Loss.FULL,
        Loss.CHUNKED,
    ]


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        ("fsdp_version: 2\nfsdp_config:\n  offload_params: false\n", Sharding.FSDP2),
        ("fsdp_version: 2\nfsdp_config:\n  offload_params: true\n", Sharding.FSDP),
        ("fsdp_config:\n  reshard_after_forward: true\n", Sharding.FSDP),
    ],
)
def test_axolotl_fsdp_has_two_versions(lines: str, kind: Sharding) -> None:
    found = import_config(f"base_model: Qwen/Qwen3-8B\n{lines}dp_shard_size: 4\n")
    assert found.run.recipe.sharding is kind


def test_axolotl_fsdp_casts_full_fine_tuning_to_fp32() -> None:
    found = import_config(
        "base_model: Qwen/Qwen3-8B\nfsdp_version: 2\nfsdp_config:\n  reshard_after_forward: true\ndp_shard_size: 4\n"
    )
    recipe = found.run.recipe
    assert (recipe.sharding, recipe.dtype, found.run.machine.gpus) == (Sharding.FSDP2, "bf16", 4)
    assert any("16 B/parameter" in sentence for sentence in found.report.effects)
    planned = plan(catalogue_model("qwen3-8b"), recipe, make_machine("h100-sxm", gpus=4))
    assert planned.resolved.placement.fp32_shards


def test_axolotl_grpo_reads_nested_keys() -> None:
    recipe = import_config(
        "base_model: Qwen/Qwen3-8B\nrl: grpo\ntrl:\n  use_vllm: true\n  num_generations: 16\n  max_completion_length: 2048\nvllm:\n  gpu_memory_utilization: 0.7\n"
    ).run.recipe
    assert (recipe.task, recipe.num_generations, recipe.completion_length) == (Task.GRPO, 16, 2048)
    assert recipe.engine.gpu_memory_utilization == 0.7


def test_llamafactory_casts_trained_parameters_to_fp32() -> None:
    base = "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\nfinetuning_type: full\n"
    recipes = [
        import_config(base + extra).run.recipe
        for extra in (
            "bf16: true\n",
            "pure_bf16: true\n",
            "bf16: true\ndeepspeed: ds_z3_config.json\n",
        )
    ]
    assert [(recipe.dtype, recipe.master_weights) for recipe in recipes] == [
        ("fp32", None),
        ("bf16", None),
        ("bf16", True),
    ]
    assert recipes[0].checkpointing is Checkpointing.FULL
    assert (recipes[0].micro_batch_size, recipes[0].context) == (8, 2048)


def test_llamafactory_v1() -> None:
    recipe = import_config(
        "model: Qwen/Qwen3-4B\nmicro_batch_size: 2\nglobal_batch_size: 16\ncutoff_len: 4096\npeft_config:\n  name: lora\n  r: 16\n  target_modules: all\n"
    ).run.recipe
    assert (recipe.method, recipe.lora.rank, recipe.gradient_accumulation, recipe.context) == (
        Method.LORA,
        16,
        8,
        4096,
    )


def test_liger_does_not_fuse_dpo_in_llamafactory() -> None:
    base = "model_name_or_path: Qwen/Qwen3-8B\nfinetuning_type: lora\ncutoff_len: 2048\nenable_liger_kernel: true\nstage: {}\n"
    assert import_config(base.format("sft")).run.recipe.loss is Loss.CHUNKED
    assert import_config(base.format("dpo")).run.recipe.loss is Loss.FULL


def test_swift_defaults_and_traps() -> None:
    found = import_config(
        "CUDA_VISIBLE_DEVICES=0 swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B --tuner_type full --use_vllm true --vllm_mode colocate\n"
    )
    recipe = found.run.recipe
    assert (recipe.beta, recipe.reference, recipe.engine.gpu_memory_utilization) == (
        0.04,
        Reference.SEPARATE,
        0.9,
    )
    assert any(
        "keeps 0.9 of the card while training" in sentence for sentence in found.report.effects
    )
    sft = import_config(
        "CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 swift sft --model Qwen/Qwen2.5-7B\n"
    )
    assert (
        sft.run.recipe.lora.rank,
        sft.run.recipe.gradient_accumulation,
        sft.run.machine.gpus,
    ) == (8, 8, 2)
    assert any("max_length is not set" in sentence for sentence in sft.report.effects)


def test_torchtune_component_carries_method_and_model() -> None:
    text = "# tune run --nproc_per_node 8 lora_finetune_distributed --config x\nmodel:\n  _component_: torchtune.models.qwen2_5.lora_qwen2_5_7b_instruct\n  lora_attn_modules: [q_proj, output_proj]\n  lora_rank: 32\ntokenizer:\n  max_seq_len: null\nbatch_size: 4\n"
    found = import_config(text)
    assert found.run.model == "Qwen/Qwen2.5-7B"
    assert (found.run.recipe.lora.targets, found.run.recipe.lora.dtype) == (
        ("q_proj", "o_proj"),
        "bf16",
    )
    assert (found.run.recipe.sharding, found.run.machine.gpus) == (Sharding.FSDP, 8)
    assert any("nothing is truncated" in sentence for sentence in found.report.effects)


def test_unsloth_raises_the_batch_and_swaps_the_name() -> None:
    source = "from unsloth import FastLanguageModel\nr = 8\nm, t = FastLanguageModel.from_pretrained('unsloth/Qwen3-4B', max_seq_length=1024, fast_inference=True)\nm = FastLanguageModel.get_peft_model(m, r=r * 2)\na = GRPOConfig(per_device_train_batch_size=1, num_generations=6, loss_type='dr_grpo')\n"
    found = import_config(source)
    recipe = found.run.recipe
    assert (found.run.model, recipe.method, recipe.lora.rank) == (
        "unsloth/Qwen3-4B",
        Method.QLORA,
        16,
    )
    assert (recipe.micro_batch_size, recipe.beta, recipe.engine.kind) == (
        6,
        0.0,
        EngineKind.VLLM_SHARED,
    )
    assert recipe.checkpointing is Checkpointing.OFFLOAD


def test_verl_default_arm_and_reference() -> None:
    text = 'DEVICE=${DEVICE:-gpu}\ncase "$DEVICE" in\n  npu)\n    N=16\n    ;;\n  gpu)\n    N=8\n    ;;\nesac\npython3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.rollout.n=5 trainer.n_gpus_per_node=$N trainer.nnodes=2 +actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4\n'
    found = import_config(text)
    assert found.run.machine.gpus == 16
    assert found.run.recipe.reference is Reference.SEPARATE
    assert (found.run.recipe.num_generations, found.run.recipe.micro_batch_size) == (5, 4)


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve Qwen/Qwen3-8B --max-model-len 32k -tp 2 --max_num_seqs=64\n",
        "docker run --gpus all vllm/vllm-openai:latest --model Qwen/Qwen3-8B --max-model-len 32000 --tensor-parallel-size 2 --max-num-seqs 64\n",
        "model: Qwen/Qwen3-8B\nmax-model-len: 32000\ntensor_parallel_size: 2\nmax-num-seqs: 64\n",
        "from vllm import LLM\nllm = LLM('Qwen/Qwen3-8B', max_model_len=32 * 1000, tensor_parallel_size=2, max_num_seqs=64)\n",
        "model:\n  model_id: Qwen/Qwen3-8B\n  base_args: ['--max-model-len', '32000']\nvariants:\n  default:\n    extra_args: ['-tp', '2', '--max-num-seqs', '64']\n",
    ],
)
def test_vllm_in_every_form(text: str) -> None:
    found = import_config(text)
    recipe = found.run.recipe
    assert (recipe.task, found.run.model, recipe.context) == (Task.SERVE, "Qwen/Qwen3-8B", 32000)
    assert (recipe.engine.tensor_parallel, recipe.engine.max_num_seqs) == (2, 64)
    assert recipe.engine.gpu_memory_utilization == 0.92


def test_unset_defaults_are_named_with_their_version() -> None:
    report = import_config("base_model: Qwen/Qwen3-8B\n").report
    rows = {row.field: row for row in report.defaulted}
    assert rows["context"].value == "512"
    assert rows["context"].source == "axolotl 0.19.0"
    assert report.version_assumed


def test_unknown_keys_are_reported_and_harmless_ones_counted() -> None:
    report = import_config(
        "base_model: Qwen/Qwen3-8B\nlearning_rate: 2e-4\nsome_new_kernel: true\n"
    ).report
    assert [row.key for row in report.not_understood] == ["some_new_kernel"]
    assert report.ignored == 1


def test_nested_cases_and_arrays_of_a_real_launcher() -> None:
    """The shape of verl's launchers: device probes, nested case, arrays that grow in one arm."""
    text = """#!/usr/bin/env bash
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
MACHINE=${MACHINE:-}
N=${NGPUS_PER_NODE:-}
EXTRA=()
case "${DEVICE}" in
    gpu | npu) ;;
    *)
        exit 1
        ;;
esac
case "${DEVICE}" in
    gpu)
        case "${MACHINE}" in
            gb200)
                N=${N:-4}
                EXTRA+=(
                    actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16
                )
                ;;
            *)
                N=${N:-8}
                ;;
        esac
        ;;
    npu)
        N=16
        EXTRA+=(actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1)
        ;;
esac
ACTOR=(
    algorithm.adv_estimator=grpo   # no critic
    actor_rollout_ref.model.path="Qwen/Qwen3-8B"
    actor_rollout_ref.actor.ppo_micro_batch_size=128
    trainer.n_gpus_per_node=${N}
)
LAUNCH=(python3)
LAUNCH=(uv run --frozen python3)
"${LAUNCH[@]}" -m verl.trainer.main_ppo "${ACTOR[@]}" "${EXTRA[@]}" "$@"
"""
    found = import_config(text)
    assert (found.run.model, found.run.machine.gpus) == ("Qwen/Qwen3-8B", 8)
    assert found.run.recipe.dtype == "fp32"
    assert found.run.recipe.micro_batch_size == 16  # 128 over 8 GPUs
    assert found.report.not_understood == []


def test_notebooks_that_load_their_adapter_again_later() -> None:
    source = """
from unsloth import FastLanguageModel
length = 4096
model, tok = FastLanguageModel.from_pretrained(model_name="unsloth/Qwen3-4B", max_seq_length=length, load_in_4bit=False)
model = FastLanguageModel.get_peft_model(model, r=8)
trainer = SFTTrainer(model=model, packing=True, max_seq_length=1024, args=SFTConfig(per_device_train_batch_size=2))
if False:
    model, tok = FastLanguageModel.from_pretrained(model_name="lora_model", max_seq_length=9)
"""
    found = import_config(source)
    assert found.run.model == "unsloth/Qwen3-4B"
    assert (found.run.recipe.context, found.run.recipe.packing, found.run.recipe.method) == (
        1024,
        True,
        Method.LORA,
    )


def test_vllm_recipe_variant_and_hardware() -> None:
    text = """
model:
  model_id: Qwen/Qwen3.6-35B-A3B
  base_args: ["--trust-remote-code"]
variants:
  default: {vram_minimum_gb: 84}
  nvfp4:
    model_id: nvidia/Qwen3.6-35B-A3B-NVFP4
    tp: 1
    hardware_overrides:
      rtx_5090:
        extra_args: ["--kv-cache-dtype", "fp8", "--gpu-memory-utilization", "0.85", "--max-model-len", "65536"]
"""
    default, tuned = import_config(text), import_config(text, variant="nvfp4:rtx_5090")
    assert default.run.model == "Qwen/Qwen3.6-35B-A3B"
    assert any("not a measurement" in sentence for sentence in default.report.effects)
    recipe = tuned.run.recipe
    assert (tuned.run.model, recipe.quantization, recipe.context) == (
        "nvidia/Qwen3.6-35B-A3B-NVFP4",
        "nvfp4",
        65536,
    )
    assert (recipe.engine.kv_dtype, recipe.engine.gpu_memory_utilization) == ("fp8", 0.85)


def test_old_vllm_holds_a_whole_prompt_in_one_batch() -> None:
    line = "vllm serve meta-llama/Llama-3.1-8B --max-model-len 29000 --gpu-memory-utilization 0.9\n"
    found = {}
    for version in ("0.6.3", None):
        recipe = import_config(line, version=version).run.recipe
        r = plan(catalogue_model("llama-3.1-8b"), recipe, make_machine("h100")).resolved
        found[version] = (r.framework.name, r.max_num_batched_tokens, r.max_num_seqs)
    assert found == {"0.6.3": ("vllm-0.6", 29000, 256), None: ("vllm", 8192, 1024)}
