"""Kinds of input that people bring, each with the reading it must have."""

from pathlib import Path

import pytest

from planner.errors import UsageError
from planner.importers import import_config
from planner.importers.names import quantization_in_name, resolve_model

ALPACA = """import torch, transformers
from transformers import AutoModelForCausalLM
CUTOFF_LEN = 256
model = AutoModelForCausalLM.from_pretrained("huggyllama/llama-7b", load_in_8bit=True, torch_dtype=torch.float16)
model = {prepared}
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
transformers.Trainer(model=model, args=transformers.TrainingArguments(output_dir="o", per_device_train_batch_size=4,
    fp16=not torch.cuda.is_bf16_supported(), bf16=torch.cuda.is_bf16_supported())).train()
"""


@pytest.mark.parametrize(
    ("prepared", "checkpointing"),
    [
        ("prepare_model_for_kbit_training(model)", "full"),
        ("prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)", "none"),
        ("model", "none"),
    ],
)
def test_a_script_switches_checkpointing_on_by_a_call(prepared: str, checkpointing: str) -> None:
    found = import_config(ALPACA.format(prepared=prepared))
    recipe = found.run.recipe
    assert recipe.checkpointing == checkpointing
    assert (recipe.context, recipe.mixed_precision) == (256, "bf16")
    assert not found.report.not_understood


def test_json_in_a_command_line_makes_no_yaml_of_it(tmp_path: Path) -> None:
    line = "vllm serve Qwen/Qwen2.5-VL-7B-Instruct --max-model-len 8192 --limit-mm-per-prompt '{\"image\": 4}'\n"
    (tmp_path / "serve.sh").write_text(line)
    for given in (tmp_path / "serve.sh", line):
        found = import_config(given)
        assert (found.tool, found.run.recipe.context) == ("vllm", 8192)


KSERVE = """apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata: {name: llama}
spec:
  predictor:
    model:
      modelFormat: {name: huggingface}
      args: ["--model_name=llama3", "--model_id=meta-llama/Meta-Llama-3-8B-Instruct", "--max-model-len=4096"]
      resources: {limits: {nvidia.com/gpu: "1"}}
"""


def test_kserve_starts_vllm() -> None:
    found = import_config(KSERVE)
    assert (found.tool, found.run.model) == ("vllm", "meta-llama/Meta-Llama-3-8B-Instruct")
    assert found.run.recipe.context == 4096
    hub = KSERVE.replace('"--model_id=meta-llama/Meta-Llama-3-8B-Instruct", ', "").replace(
        "args:", "storageUri: hf://Qwen/Qwen3-8B\n      args:"
    )
    assert import_config(hub).run.model == "Qwen/Qwen3-8B"


def test_the_machines_count_is_asked_for() -> None:
    text = "from vllm import LLM\nllm = LLM('Qwen/Qwen3-8B', tensor_parallel_size=torch.cuda.device_count())\n"
    alone, given = import_config(text), import_config(text, gpus=4)
    assert any("say --gpus" in sentence for sentence in alone.report.effects)
    assert given.run.recipe.engine.tensor_parallel == 4
    assert not given.report.not_understood


def test_qlora_has_its_own_defaults() -> None:
    line = "python qlora.py --model_name_or_path huggyllama/llama-7b --output_dir o --bf16 --max_memory_MB 24000\n"
    recipe = import_config(line).run.recipe
    assert (recipe.method, recipe.quantization, recipe.lora.rank) == ("qlora", "nf4", 64)
    assert (recipe.context, recipe.micro_batch_size, recipe.checkpointing) == (1280, 1, "full")
    assert recipe.optimizer == "paged-adamw"


@pytest.mark.parametrize(
    ("name", "quantization", "model"),
    [
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8/", "gptq-8bit", "Qwen/Qwen2.5-7B"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "gptq-4bit", "Qwen/Qwen2.5-7B"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "int8", "meta-llama/Llama-3.1-8B"),
        (
            "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16",
            "gptq-4bit",
            "meta-llama/Llama-3.1-8B",
        ),
    ],
)
def test_eight_bit_names(name: str, quantization: str, model: str) -> None:
    assert quantization_in_name(name) == quantization
    found, wanted = resolve_model(name), resolve_model(model)
    assert found is not None
    assert wanted is not None
    assert found.parameters == wanted.parameters


SLIME = (
    "ray job submit -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate "
    "--hf-checkpoint /models/Qwen3-4B --rollout-batch-size 32 --n-samples-per-prompt 8 --max-tokens-per-gpu 9216 "
    "--rollout-max-response-len 8192 --advantage-estimator grpo --tensor-model-parallel-size 2"
)


def test_a_colocated_policy_waits_in_host_memory() -> None:
    moved, kept = import_config(SLIME), import_config(f"{SLIME} --no-offload-train")
    assert moved.run.recipe.offload.parameters
    assert moved.run.recipe.optimizer_offload
    assert not kept.run.recipe.offload.parameters
    assert not kept.run.recipe.optimizer_offload


def test_megatron_offload_of_verl_is_planned() -> None:
    line = (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen3-8B "
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 "
        "actor_rollout_ref.actor.megatron.param_offload=True actor_rollout_ref.actor.megatron.optimizer_offload=True"
    )
    recipe = import_config(line).run.recipe
    assert recipe.optimizer_offload
    assert recipe.offload.parameters


def test_xtuners_packaged_config_is_asked_for_by_name() -> None:
    with pytest.raises(UsageError, match=r"internlm2_chat_7b_qlora_oasst1_e3.*copy-cfg"):
        import_config(
            "NPROC_PER_NODE=4 xtuner train internlm2_chat_7b_qlora_oasst1_e3 --deepspeed deepspeed_zero2"
        )


def test_a_models_special_token_is_no_secret() -> None:
    text = "model_name_or_path: Qwen/Qwen3-8B\nmax_length: 2048\nlearning_rate: 1e-5\neos_token: <|im_end|>\nhub_token: abcd1234\n"
    found = import_config(text, tool="trl")
    assert not found.report.not_understood
    assert "abcd1234" not in str(found.to_dict())


@pytest.mark.parametrize(
    "line",
    [
        'srun -N1 bash -c "cd /w && torchrun --nproc_per_node 4 {run} && echo done"',
        "docker run --gpus all --entrypoint bash some/image -c 'pip install x; torchrun --nproc_per_node 4 {run}'",
        "N=${{2:-4}}\ntorchrun --nproc_per_node $N {run}",
    ],
)
def test_a_command_in_a_shells_quotes(line: str) -> None:
    run = "src/train.py --stage sft --finetuning_type full --model_name_or_path Qwen/Qwen3-8B --cutoff_len 2048"
    found = import_config(line.format(run=run))
    assert (found.tool, found.run.machine.gpus) == ("llamafactory", 4)
    assert found.run.recipe.context == 2048


def test_a_server_in_a_shells_quotes() -> None:
    line = "docker run --entrypoint bash vllm/vllm-openai:v0.10.0 -c 'pip install x; vllm serve Qwen/Qwen3-8B -tp 2'"
    found = import_config(line)
    assert (found.run.model, found.version) == ("Qwen/Qwen3-8B", "0.10.0")
    assert found.run.recipe.engine.tensor_parallel == 2


def test_verl_adapters_and_recomputation_by_their_newer_keys() -> None:
    line = (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen3-8B "
        "actor_rollout_ref.model.lora.rank=32 actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 "
        "actor_rollout_ref.model.enable_gradient_checkpointing=False "
        "+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full"
    )
    recipe = import_config(line).run.recipe
    assert (recipe.method, recipe.lora.rank, recipe.checkpointing) == ("lora", 32, "full")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("huggyllama/llama-65b", 65_285_660_672),
        ("baichuan-inc/Baichuan2-13B-Chat", 13_896_668_160),
        ("LiquidAI/LFM2-350M", 354_483_968),
        ("mistralai/Mistral-Large-Instruct-2407", 122_610_069_504),
        ("Qwen/Qwen1.5-MoE-A2.7B-Chat", 14_315_784_192),
    ],
)
def test_models_that_the_catalogue_lacks(name: str, parameters: int) -> None:
    found = resolve_model(name)
    assert found is not None
    assert found.parameters == parameters


def test_a_model_that_is_no_name() -> None:
    rows = "\n".join(
        f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in ("ab", "bc", "cd")
    )
    text = f'a: &a ["x", "x"]\n{rows}\nstage: sft\nfinetuning_type: lora\nmodel_name_or_path: *d\n'
    with pytest.raises(UsageError, match="is not a name") as caught:
        import_config(text)
    assert len(caught.value.message) < 200


def test_sglangs_largest_graph_is_read() -> None:
    found = import_config(
        "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --chunked-prefill-size 4096 --cuda-graph-max-bs 64"
    )
    assert found.run.recipe.engine.max_num_batched_tokens == 4096
    assert not found.report.not_understood
    assert any("up to 64 sequences" in sentence for sentence in found.report.effects)
