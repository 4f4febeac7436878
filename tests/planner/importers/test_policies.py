"""Tools that train policies, and the smaller trainers: their own words -> a run that can be planned."""

import pytest

from planner.errors import UsageError
from planner.importers import import_config
from planner.importers.settings import Imported
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.plan import plan
from planner.run.recipe import Checkpointing, EngineKind, Loss, Method, Sharding, Task


def planned(found: Imported) -> int:
    """Return the peak of an import on cards that hold it: the planner takes it as it is."""
    model, machine = catalogue_model("qwen3-4b"), make_machine("h200", gpus=found.run.machine.gpus)
    return plan(model, found.run.recipe, machine).peak_bytes


OPENRLHF = "--pretrain Qwen/Qwen3-4B --max_len 512 --micro_train_batch_size 2 --train_batch_size 32 --zero_stage 3 --gradient_checkpointing"


def test_openrlhf_flat_flags() -> None:
    found = import_config(
        f"deepspeed --num_gpus 4 --module openrlhf.cli.train_sft {OPENRLHF} --packing_samples\n"
    )
    run = found.run
    assert (found.tool, found.version) == (
        "openrlhf",
        "0.9.0",
    )
    assert "0.9" in found.report.version_why
    assert (run.recipe.context, run.recipe.micro_batch_size, run.recipe.gradient_accumulation) == (
        512,
        2,
        4,
    )
    assert (run.recipe.sharding, run.recipe.master_weights, run.machine.gpus) == (
        Sharding.ZERO3,
        True,
        4,
    )
    assert run.recipe.checkpointing is Checkpointing.FULL
    assert run.recipe.packing
    assert not found.report.not_understood
    assert planned(found)


@pytest.mark.parametrize(
    ("module", "flags", "task"),
    [
        ("train_rm", "", Task.REWARD),
        ("train_dpo", "--beta 0.2", Task.DPO),
        ("train_kto", "", Task.KTO),
    ],
)
def test_openrlhf_pairs(module: str, flags: str, task: Task) -> None:
    found = import_config(f"deepspeed --module openrlhf.cli.{module} {OPENRLHF} {flags}\n")
    assert found.run.recipe.task is task
    if task is Task.DPO:
        assert (found.run.recipe.beta, found.run.recipe.reference) == (0.2, "separate")


def test_openrlhf_dotted_flags_in_a_heredoc() -> None:
    text = "set -x\nread -r -d '' training_commands <<EOF\nopenrlhf.cli.train_sft \\\n   --data.max_len 333 \\\n   --model.model_name_or_path Qwen/Qwen3-4B \\\n   --ds.zero_stage 2 \\\n   --ds.adam_offload\nEOF\nif [[ ${1} != slurm ]]; then\n    deepspeed --module $training_commands\nfi\n"
    found = import_config(text)
    assert (found.version, found.run.recipe.context, found.run.recipe.sharding) == (
        "0.11.0",
        333,
        Sharding.ZERO2,
    )
    assert found.run.recipe.optimizer_offload


def test_openrlhf_ppo_by_ray() -> None:
    flags = "--pretrain Qwen/Qwen3-4B --reward_pretrain Qwen/Qwen3-8B --prompt_max_len 100 --generate_max_len 200 --micro_train_batch_size 2 --zero_stage 3 --colocate_all_models --vllm_num_engines 4 --vllm_tensor_parallel_size 2 --vllm_gpu_memory_utilization 0.6 --vllm_enable_sleep --actor_num_nodes 1 --actor_num_gpus_per_node 8"
    found = import_config(
        f"ray job submit --address=http://h:1 --runtime-env-json='{{}}' -- python3 -m openrlhf.cli.train_ppo_ray {flags}\n"
    )
    recipe = found.run.recipe
    assert (recipe.task, recipe.reward_model, found.run.machine.gpus) == (
        Task.PPO,
        "Qwen/Qwen3-8B",
        8,
    )
    assert (recipe.prompt_length, recipe.completion_length) == (100, 200)
    engine = recipe.engine
    assert (engine.kind, engine.gpu_memory_utilization, engine.sleep_level) == (
        EngineKind.VLLM_PUSH,
        0.6,
        2,
    )
    apart = import_config(
        f"python3 -m openrlhf.cli.train_ppo_ray {flags.replace('--colocate_all_models', '')} --advantage_estimator reinforce\n"
    )
    assert apart.run.recipe.engine.kind is EngineKind.VLLM_SERVER
    assert apart.run.recipe.task is Task.GRPO
    assert planned(apart)


def test_skyrl() -> None:
    text = ': "${N:=4}"\nuv run --isolated --extra fsdp -m skyrl.train.entrypoints.main_base trainer.policy.model.path="Qwen/Qwen3-4B" trainer.placement.policy_num_gpus_per_node=$N trainer.micro_train_batch_size_per_gpu=2 trainer.max_prompt_length=100 generator.sampling_params.max_generate_length=200 generator.n_samples_per_prompt=5 generator.inference_engine.gpu_memory_utilization=0.5 trainer.algorithm.use_kl_loss=false\n'
    found = import_config(text)
    recipe = found.run.recipe
    assert (found.tool, recipe.task, recipe.sharding, found.run.machine.gpus) == (
        "skyrl",
        Task.GRPO,
        Sharding.FSDP2,
        4,
    )
    assert (recipe.prompt_length, recipe.completion_length, recipe.num_generations) == (100, 200, 5)
    assert (recipe.reference, recipe.engine.gpu_memory_utilization) == ("none", 0.5)
    critic = import_config(
        text.replace(
            "trainer.algorithm.use_kl_loss=false",
            "trainer.algorithm.advantage_estimator=gae trainer.policy.model.lora.rank=8",
        )
    )
    assert (critic.run.recipe.task, critic.run.recipe.method) == (Task.PPO, Method.LORA)
    assert planned(found)
    assert planned(critic)


NEMO = "policy:\n  model_name: Qwen/Qwen3-4B\n  train_micro_batch_size: 2\n  max_total_sequence_length: 600\n  dtensor_cfg:\n    enabled: true\n    activation_checkpointing: true\n    lora_cfg: {enabled: LORA, dim: 16}\ncluster: {gpus_per_node: 2, num_nodes: 2}\n"


def test_nemo_rl() -> None:
    text = (
        NEMO.replace("LORA", "false")
        + "grpo:\n  num_generations_per_prompt: 6\nloss_fn:\n  reference_policy_kl_penalty: 0\n"
    )
    recipe = import_config(text).run.recipe
    assert (recipe.task, recipe.num_generations, recipe.reference, recipe.checkpointing) == (
        Task.GRPO,
        6,
        "none",
        "full",
    )
    assert recipe.prompt_length + recipe.completion_length == 600
    found = import_config(NEMO.replace("LORA", "true") + "sft: {max_num_steps: 3}\n")
    assert (found.run.recipe.task, found.run.recipe.lora.rank, found.run.machine.gpus) == (
        Task.SFT,
        16,
        4,
    )
    assert planned(found)


def test_areal() -> None:
    text = "gconfig: {n_samples: 4, max_new_tokens: 300}\nactor:\n  backend: fsdp:d2p1t2\n  path: Qwen/Qwen3-4B\n  dtype: bfloat16\n  kl_ctl: 0.0\n  mb_spec: {max_tokens_per_mb: 4000}\nrollout: {backend: 'sglang:d4'}\ntrain_dataset: {max_length: 100}\nsglang: {mem_fraction_static: 0.8, model_path: '${actor.path}'}\n"
    found = import_config(text)
    recipe = found.run.recipe
    assert (found.tool, found.run.machine.gpus, recipe.micro_batch_size) == ("areal", 4, 10)
    assert (recipe.num_generations, recipe.engine.kind) == (4, EngineKind.VLLM_SERVER)
    assert any(row.key == "tensor parallelism" for row in found.report.not_understood)
    mode = import_config(
        text.replace("backend: fsdp:d2p1t2", "init_from_scratch: false").replace(
            "gconfig", "allocation_mode: sglang:d4|fsdp:d4\ngconfig", 1
        )
    )
    assert (mode.run.machine.gpus, mode.run.recipe.engine.kind) == (4, EngineKind.VLLM_PUSH)


def test_roll() -> None:
    text = "pretrain: Qwen/Qwen3-4B\nprompt_length: 100\nresponse_length: 200\nnum_return_sequences_in_group: 8\nadv_estimator: reinforce\nactor_train:\n  training_args: {per_device_train_batch_size: 2}\n  strategy_args:\n    strategy_name: megatron_train\n    strategy_config: {tensor_model_parallel_size: 2, use_distributed_optimizer: true, recompute_granularity: full}\n  device_mapping: list(range(0,4))\nactor_infer:\n  strategy_args: {strategy_config: {gpu_memory_utilization: 0.7}}\n  device_mapping: list(range(0,4))\nreference: {infer_batch_size: 8}\n"
    recipe = import_config(text).run.recipe
    assert (recipe.num_generations, recipe.reference, recipe.engine.kind) == (
        8,
        "offloaded",
        EngineKind.VLLM_PUSH,
    )
    assert (recipe.sharding, recipe.parallel.data_shard, recipe.parallel.data_replicate) == (
        Sharding.FSDP,
        2,
        2,
    )
    apart = import_config(
        text.replace(
            "gpu_memory_utilization: 0.7}}\n  device_mapping: list(range(0,4))",
            "gpu_memory_utilization: 0.7}}\n  device_mapping: list(range(4,8))",
        )
    )
    assert apart.run.recipe.engine.kind is EngineKind.VLLM_SERVER


SLIME = "CKPT=(\n   --hf-checkpoint /models/Qwen3-4B\n   #--hf-checkpoint /models/Qwen3-8B\n)\nPERF=(\n   --tensor-model-parallel-size 2\n   --sequence-parallel\n   --recompute-granularity full\n   --use-dynamic-batch-size\n   --max-tokens-per-gpu 9216\n)\nray job submit --address=http://h:1 \\\n   --runtime-env-json='{}' \\\n   -- python3 train.py \\\n   --actor-num-nodes 1 \\\n   --actor-num-gpus-per-node 8 \\\n   --colocate \\\n   ${CKPT[@]} \\\n   ${PERF[@]} \\\n   --rm-type x --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 2048 --advantage-estimator grpo --sglang-mem-fraction-static 0.7\n"


def test_slime() -> None:
    found = import_config(SLIME)
    recipe = found.run.recipe
    assert (found.tool, found.run.model, found.run.machine.gpus) == ("slime", "/models/Qwen3-4B", 8)
    assert (recipe.completion_length, recipe.micro_batch_size, recipe.checkpointing) == (
        2048,
        3,
        "full",
    )
    assert (recipe.parallel.data_shard, recipe.engine.gpu_memory_utilization) == (2, 0.7)
    assert not found.report.not_understood
    assert planned(found)


def test_an_array_of_a_sourced_file_is_no_flags_value() -> None:
    # slime's own scripts source their MODEL_ARGS, and put them behind --colocate
    found = import_config(
        SLIME.replace("--colocate \\\n", "--colocate \\\n   ${MODEL_ARGS[@]} \\\n")
    )
    assert found.run.recipe.engine.kind is EngineKind.VLLM_PUSH
    assert found.run.recipe.engine.gpu_memory_utilization == 0.7
    assert [row.key for row in found.report.not_understood] == ["${MODEL_ARGS[@]}"]


def test_verl_sft_targets() -> None:
    # verl's examples/sft/gsm8k/run_qwen_05_peft.sh, and the list that it offers beside it
    line = "torchrun --nproc_per_node=4 -m verl.trainer.fsdp_sft_trainer data.micro_batch_size_per_gpu=4 model.partial_pretrain=Qwen/Qwen3-4B model.lora_rank=32 model.target_modules={}\n"
    for said, targets in (("all-linear", "all-linear"), ("[q_proj,v_proj]", ("q_proj", "v_proj"))):
        found = import_config(line.format(said))
        assert found.run.recipe.lora.targets == targets
        assert not found.report.not_understood


def test_megatron_sft_is_planned_as_megatron() -> None:
    line = "NPROC_PER_NODE=8 CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 megatron sft --model Qwen/Qwen3-4B --train_type full --tensor_model_parallel_size 2 --sequence_parallel true --pipeline_model_parallel_size 2 --micro_batch_size 2 --global_batch_size 16 --max_length 512 --recompute_granularity full --recompute_method uniform --recompute_num_layers 1\n"
    found = import_config(line)
    recipe, parallel = found.run.recipe, found.run.recipe.parallel
    assert (recipe.framework, recipe.sharding, found.run.machine.gpus) == (
        "megatron",
        Sharding.MEGATRON,
        8,
    )
    assert (parallel.tensor, parallel.sequence, parallel.pipeline) == (2, True, 2)
    assert (recipe.gradient_accumulation, recipe.checkpointing) == (4, Checkpointing.FULL)
    assert not found.report.not_understood
    assert planned(found)
    dpo = import_config(line.replace("megatron sft", "megatron rlhf --rlhf_type dpo"))
    assert dpo.run.recipe.task is Task.DPO


def test_prime_rl() -> None:
    text = 'max_steps = 9\nseq_len = 2048\n[model]\nname = "Qwen/Qwen3-4B"\n[deployment]\nnum_train_gpus = 2\n[trainer.model.lora]\nrank = 32\n[orchestrator]\nbatch_size = 128\n{0}\n[orchestrator.train.sampling]\nmax_completion_tokens = 768\n[inference]\n'
    for key in ("group_size = 16", "rollouts_per_example = 16"):
        found = import_config(text.format(key))
        recipe = found.run.recipe
        assert (found.tool, recipe.task, recipe.lora.rank, recipe.num_generations) == (
            "prime-rl",
            Task.GRPO,
            32,
            16,
        )
        assert (recipe.prompt_length, recipe.completion_length, found.run.machine.gpus) == (
            1280,
            768,
            2,
        )
        assert (recipe.loss, recipe.engine.kind) == (Loss.CHUNKED, EngineKind.VLLM_SERVER)
    sft = import_config(
        '[model]\nname = "Qwen/Qwen3-4B"\n[data]\nseq_len = 333\nmicro_batch_size = 2\n[optim]\nlr = 1e-5\n'
    )
    assert (sft.tool, sft.run.recipe.task, sft.run.recipe.context) == ("prime-rl", Task.SFT, 333)
    assert planned(sft)
    with pytest.raises(UsageError, match="prime-rl trainer without"):
        import_config('[model]\nname = "Qwen/Qwen3-4B"\nattn = "sdpa"\n[optim]\nlr = 3e-6\n')


def test_litgpt() -> None:
    text = "checkpoint_dir: checkpoints/Qwen/Qwen3-4B\nprecision: bf16-true\nquantize: bnb.nf4-dq\ndevices: 1\nlora_r: 32\nlora_query: true\nlora_key: false\nlora_value: true\nlora_mlp: true\ntrain: {micro_batch_size: 2, global_batch_size: 8, max_seq_length: 512}\n"
    found = import_config(text)
    recipe = found.run.recipe
    assert (found.tool, found.run.model, recipe.method, recipe.double_quant) == (
        "litgpt",
        "Qwen/Qwen3-4B",
        Method.QLORA,
        True,
    )
    assert recipe.lora.targets == ("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
    assert (recipe.gradient_accumulation, recipe.context) == (4, 512)
    assert planned(found)
    many = import_config(
        text.replace("devices: 1", "devices: 4")
        .replace("lora_r: 32\n", "")
        .replace("quantize: bnb.nf4-dq\n", "")
    )
    assert (many.run.recipe.sharding, many.run.recipe.method) == (Sharding.FSDP, Method.FULL)


def test_litgpts_command_line() -> None:
    found = import_config(
        "litgpt finetune_lora Qwen/Qwen3-4B --quantize bnb.nf4 --train.micro_batch_size 2 --train.max_seq_length 333\n"
    )
    recipe = found.run.recipe
    assert (found.run.model, recipe.method, recipe.lora.rank, recipe.context) == (
        "Qwen/Qwen3-4B",
        Method.QLORA,
        8,
        333,
    )
    full = import_config("litgpt finetune_full Qwen/Qwen3-4B --train.max_seq_length 333\n")
    assert full.run.recipe.method is Method.FULL


def test_llm_foundry() -> None:
    text = "variables: {max_seq_len: 333}\nmax_seq_len: ${variables.max_seq_len}\nmodel:\n  name: hf_causal_lm\n  pretrained_model_name_or_path: Qwen/Qwen3-4B\ntrain_loader: {name: finetuning}\noptimizer: {name: decoupled_lionw}\ndevice_train_microbatch_size: 4\nglobal_train_batch_size: 64\nprecision: amp_bf16\nfsdp_config: {sharding_strategy: FULL_SHARD, activation_checkpointing: true}\n"
    found = import_config(text)
    recipe = found.run.recipe
    assert (found.tool, recipe.context, recipe.micro_batch_size, recipe.dtype) == (
        "llm-foundry",
        333,
        4,
        "fp32",
    )
    assert (recipe.optimizer, recipe.sharding, recipe.checkpointing) == (
        "lion",
        Sharding.FSDP,
        Checkpointing.FULL,
    )
    assert not found.report.not_understood


def test_xtuner() -> None:
    text = "pretrained_model_name_or_path = 'Qwen/Qwen3-4B'\nmax_length = 333\nbatch_size = 2\naccumulative_counts = 3\nmodel = dict(type=SupervisedFinetune, llm=dict(type=AutoModelForCausalLM.from_pretrained, torch_dtype=torch.float16, quantization_config=dict(type=BitsAndBytesConfig, load_in_4bit=True, bnb_4bit_use_double_quant=True)), lora=dict(type=LoraConfig, r=64))\n"
    found = import_config("import torch\n" + text)
    recipe = found.run.recipe
    assert (found.tool, recipe.method, recipe.lora.rank, recipe.context) == (
        "xtuner",
        Method.QLORA,
        64,
        333,
    )
    assert (recipe.micro_batch_size, recipe.gradient_accumulation, recipe.dtype) == (2, 3, "fp16")
    assert planned(found)


@pytest.mark.parametrize(
    ("degrees", "field", "value"),
    [
        ("tensor_parallel_degree = 2", "tensor", 2),
        ("context_parallel_degree = 2", "context", 2),
        ("data_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 4", "data_replicate", 2),
    ],
)
def test_torchtitans_degrees(degrees: str, field: str, value: int) -> None:
    text = f'[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 64\n[parallelism]\n{degrees}\n'
    found = import_config(text)
    degree = getattr(found.run.recipe.parallel, field)
    assert degree == value or any("tokens" in said for said in found.report.effects)
    assert found.run.machine.gpus >= value
