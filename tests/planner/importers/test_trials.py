"""Kinds that trials on public configs found: shell, overrides by their keys, inherited files, quiet sections."""

import json
from pathlib import Path

import pytest

from planner.errors import UnsupportedError, UsageError
from planner.importers import import_config, import_subject, resolve_model
from planner.importers.settings import Imported
from planner.importers.shapes import Shape, model_of
from planner.importers.shell import flags, parse_shell
from planner.run.recipe import Checkpointing, Sharding, Task


def unread(found: Imported) -> set[str]:
    """Return the keys that the report names as not understood."""
    return {row.key for row in found.report.not_understood}


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "P=${P:-${D:-${HOME}/v}/m/Qwen3-8B}\nrun --model $P\n",
            ["run", "--model", "$HOME/v/m/Qwen3-8B"],
        ),
        ('A="\n  --x 1 \\\n  --y 2"\nrun $A\n', ["run", "--x", "1", "--y", "2"]),
        ("A=(\n --x 1 # one (of 2)\n --y 2\n)\nrun ${A[@]}\n", ["run", "--x", "1", "--y", "2"]),
        ("A=(\n --freq '([1]*48)'\n)\nrun ${A[@]}\n", ["run", "--freq", "([1]*48)"]),
        ('A=(--x 1)\nA=(\n "${A[@]}"\n --y 2\n)\nrun ${A[@]}\n', ["run", "--x", "1", "--y", "2"]),
        ("echo it's\nrun --x 1\n", ["run", "--x", "1"]),
    ],
)
def test_shell(script: str, words: list[str]) -> None:
    assert parse_shell(script).commands[-1] == words


def test_a_flag_and_its_value_in_one_pair_of_quotes() -> None:
    assert flags(["--fp8-format hybrid", "--x", "1"]) == {"fp8-format": "hybrid", "x": "1"}


def test_a_path_with_variables_is_planned_by_its_last_part(tmp_path: Path) -> None:
    path = tmp_path / "r.sh"
    line = "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=$ROOT/{} algorithm.adv_estimator=grpo\n"
    path.write_text(line.format("Qwen3-8B"))
    found = import_subject(str(path))
    assert found is not None
    assert found.run.model == "Qwen3-8B"
    assert "planned as Qwen3-8B" in " ".join(found.report.effects)
    path.write_text(line.format("my-own-model"))
    with pytest.raises(UsageError, match="variable ROOT is not set"):
        import_subject(str(path))


def test_a_folder_of_the_hubs_cache_names_its_model(tmp_path: Path) -> None:
    path = tmp_path / "a.yml"
    place = "$P/hub/models--meta-llama--Meta-Llama-3.1-8B/snapshots/abc"
    path.write_text(f"base_model: {place}\nsequence_len: 512\nmicro_batch_size: 1\n")
    found = import_subject(str(path))
    assert found is not None
    assert found.run.model == "meta-llama/Meta-Llama-3.1-8B"


def test_overrides_are_told_by_their_keys() -> None:
    verl = "python3 my_trainer.py actor_rollout_ref.model.path=Qwen/Qwen3-8B algorithm.adv_estimator=grpo\n"
    assert import_config(verl).tool == "verl"
    skyrl = "uv run -m examples.mine.main trainer.policy.model.path=Qwen/Qwen3-4B trainer.micro_train_batch_size_per_gpu=2\n"
    assert import_config(skyrl).tool == "skyrl"


def test_skyrls_sft() -> None:
    text = (
        "python -m skyrl.train.main_sft strategy=fsdp model.path=Qwen/Qwen3-4B max_length=512 "
        "micro_train_batch_size_per_gpu=3 placement.num_gpus_per_node=2 model.lora.rank=8\n"
    )
    run = import_config(text).run
    recipe = run.recipe
    assert (recipe.task, recipe.sharding, run.machine.gpus) == (Task.SFT, Sharding.FSDP2, 2)
    assert (recipe.context, recipe.micro_batch_size, recipe.lora.rank) == (512, 3, 8)
    packed = import_config(
        text.replace("strategy=fsdp", "strategy=megatron max_tokens_per_microbatch=2048")
    )
    assert packed.run.recipe.micro_batch_size == 4


def test_a_script_that_starts_nothing_known_is_no_python(tmp_path: Path) -> None:
    path = tmp_path / "r.sh"
    path.write_text("import_data=1\npython prepare.py --x=1\nfrom x\n")
    with pytest.raises(UsageError, match="not recognised as any tool's config"):
        import_config(path)


def test_a_list_of_data_sets_is_no_file_name() -> None:
    line = "swift sft --model Qwen/Qwen3-8B --dataset a.json b.json --deepspeed zero2 --tuner_type lora\n"
    assert import_config(line).run.model == "Qwen/Qwen3-8B"


BASE = """\
grpo: {num_generations_per_prompt: 12}
policy:
  model_name: Qwen/Qwen3-8B
  train_micro_batch_size: 3
  max_total_sequence_length: 1024
  precision: bfloat16
  dtensor_cfg: {enabled: true, tensor_parallel_size: 1, activation_checkpointing: true}
  megatron_cfg: {enabled: false, moe_buffer_gb: 3}
  generation: {vllm_cfg: {gpu_memory_utilization: 0.5, precision: "${policy.precision}"}}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""


def test_nemo_rl_goes_on_from_another_file(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "recipes").mkdir()
    path = tmp_path / "recipes" / "mine.yaml"
    path.write_text("defaults: ../base.yaml\npolicy:\n  train_micro_batch_size: 1\n")
    found = import_subject(str(path))
    assert found is not None
    recipe = found.run.recipe
    assert (found.tool, found.run.model) == ("nemo-rl", "Qwen/Qwen3-8B")
    assert (recipe.micro_batch_size, recipe.num_generations) == (1, 12)
    assert recipe.checkpointing is Checkpointing.FULL
    assert not unread(found)
    path.write_text("defaults: ../gone.yaml\npolicy:\n  train_micro_batch_size: 1\n")
    with pytest.raises(UsageError, match=r"gone\.yaml, which this line names, is not here"):
        import_subject(str(path))
    alone = import_subject(str(path), model="Qwen/Qwen3-4B")
    assert alone is not None
    assert any("gone.yaml is not here" in note for note in alone.report.effects)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("trainer.policy.new_kv_cache_gb", True),
        ("trainer.algorithm.some_weight", False),
        ("trainer.train_batch_size", False),
        ("trainer.eval_batch_size", False),
    ],
)
def test_a_quiet_section_hides_no_word_of_memory(key: str, said: bool) -> None:
    text = f"python -m skyrl.train.entrypoints.main_base trainer.policy.model.path=Qwen/Qwen3-4B {key}=7\n"
    found = import_config(text)
    assert (key in unread(found)) is said
    assert (key in found.report.ignored_keys) is not said


def test_what_a_reference_has_of_its_own_is_said() -> None:
    text = (
        "python -m skyrl.train.entrypoints.main_base trainer.policy.model.path=Qwen/Qwen3-4B "
        "trainer.ref.fsdp_config.cpu_offload=true trainer.micro_forward_batch_size_per_gpu=16\n"
    )
    notes = " ".join(import_config(text).report.effects)
    assert "trainer.ref.fsdp_config.cpu_offload" in notes
    assert "only score have 16 rows" in notes


LLAMA = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --swiglu --seq-length 8192 --micro-batch-size 1 --global-batch-size 128 --bf16 "
)


def test_megatrons_own_command_line() -> None:
    line = f"torchrun --nproc_per_node 8 pretrain_gpt.py {LLAMA} --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --vocab-size 128256\n"
    found = import_config(line)
    recipe = found.run.recipe
    assert (found.tool, found.run.model) == ("megatron", "meta-llama/Meta-Llama-3-8B")
    assert (recipe.sharding, recipe.checkpointing) == (Sharding.MEGATRON, Checkpointing.FULL)
    assert recipe.parallel is not None
    assert (recipe.parallel.tensor, recipe.parallel.sequence) == (2, True)
    assert (recipe.gradient_accumulation, recipe.context) == (32, 8192)
    assert not unread(found)


def test_megatrons_widths_that_no_model_has() -> None:
    gpt = "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --fp16\n"
    found = import_config(gpt)
    assert found.run.model == ""
    assert any("96 layers of 12,288" in note for note in found.report.effects)
    with pytest.raises(UsageError, match="not recognised"):
        import_config(gpt.replace("pretrain_gpt", "pretrain_bert"))


def test_a_models_widths() -> None:
    llama = Shape(32, 4096, 32, 8, 14336, None, 128256)
    assert model_of(llama) == "meta-llama/Meta-Llama-3-8B"
    assert model_of(llama._replace(vocab=32000)) != "meta-llama/Meta-Llama-3-8B"
    assert model_of(llama._replace(gated=False)) is None
    assert model_of(Shape(32, 4096, 32, 8, 14336, 8, 32000)) == "mistralai/Mixtral-8x7B-v0.1"


@pytest.mark.parametrize(
    "text",
    [
        "from nemo.collections import llm\nr = llm.llama3_8b.finetune_recipe(name='x', num_nodes=1)\n",
        "nemo llm finetune --factory llama3_8b trainer.num_nodes=1\n",
    ],
)
def test_nemo_2_is_refused_by_name(text: str) -> None:
    with pytest.raises(UnsupportedError, match="NeMo 2 recipe"):
        import_config(text)


def test_llamafactorys_critic_is_said_to_be_an_upper_bound() -> None:
    text = "stage: ppo\nmodel_name_or_path: Qwen/Qwen3-8B\nfinetuning_type: lora\nreward_model: x\ncutoff_len: 512\n"
    notes = " ".join(import_config(text).report.effects)
    assert "value head on the policy itself" in notes


def test_arithmetic_needs_no_dollar() -> None:
    text = "G=128\nB=4\nN=8\nX=$((G / (B * N)))\nC=$(ls | wc -l)\nrun --x $X --c $C\n"
    assert parse_shell(text).commands[-1][:3] == ["run", "--x", "4"]


def test_a_trainers_model_by_other_names(tmp_path: Path) -> None:
    (tmp_path / "my_fsdp.json").write_text('{"activation_checkpointing": true}')
    path = tmp_path / "sft.sh"
    path.write_text(
        "torchrun --nproc-per-node 4 train/sft.py --model_name=Qwen/Qwen3-8B --per_device_train_batch_size=1 "
        '--learning_rate=1e-5 --block_size=4096 --bf16=True --fsdp="full_shard auto_wrap" '
        "--fsdp_config=train/my_fsdp.json\n"
    )
    found = import_config(path)
    recipe = found.run.recipe
    assert (found.tool, found.run.model, found.run.machine.gpus) == (
        "hf-trainer",
        "Qwen/Qwen3-8B",
        4,
    )
    assert (recipe.sharding, recipe.checkpointing) == (Sharding.FSDP, Checkpointing.FULL)
    assert "fsdp_config" not in unread(found)
    path.write_text(path.read_text().replace("my_fsdp", "gone"))
    assert any(
        "gone.json: the file is not here" in note for note in import_config(path).report.effects
    )


def test_a_script_that_submits_another() -> None:
    text = (
        "python mason.py --cluster x --gpus 8 -- source setup.sh \\&\\& python open_instruct/grpo_fast.py "
        "--model_name_or_path Qwen/Qwen3-0.6B --response_length 1024 --max_prompt_token_length 512 "
        "--num_samples_per_prompt_rollout 4 --deepspeed_stage 2 --beta 0.01\n"
    )
    found = import_config(text)
    recipe = found.run.recipe
    assert (recipe.task, recipe.num_generations, recipe.completion_length) == (Task.GRPO, 4, 1024)
    assert recipe.sharding is Sharding.ZERO2
    assert "cluster" not in unread(found)


def test_a_notebooks_shell_line_may_be_all_of_a_block(tmp_path: Path) -> None:
    cells = [
        '%%capture\nimport os\nif "COLAB_" not in os.environ:\n    # why\n    !pip install unsloth \\\n        vllm\nelse:\n    pass\n',
        'from unsloth import FastLanguageModel\nmodel, tokenizer = FastLanguageModel.from_pretrained(model_name="unsloth/Qwen3-8B", max_seq_length=2048, load_in_4bit=True)\n',
        'template = """{{ if .System }}{{ .Prompt }}{{ end }}"""\n',
    ]
    path = tmp_path / "n.ipynb"
    path.write_text(
        json.dumps({"cells": [{"cell_type": "code", "source": text} for text in cells]})
    )
    found = import_config(path)
    assert (found.tool, found.run.model) == ("unsloth", "unsloth/Qwen3-8B")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen2-57B-A14B", 57_408_658_944),
        ("Qwen/Qwen-7B", 7_721_324_544),
        ("Qwen/Qwen-7B-Chat", 7_721_324_544),
    ],
)
def test_older_models_by_name(name: str, parameters: int) -> None:
    """Counted by hand from the reports' widths."""
    found = resolve_model(name)
    assert found is not None
    assert found.parameters == parameters


def test_ms_swifts_megatron_grpo() -> None:
    text = (
        "NPROC_PER_NODE=8 megatron rlhf --rlhf_type grpo --model Qwen/Qwen3-8B --tensor_model_parallel_size 2 "
        "--micro_batch_size 2 --num_generations 4 --max_length 1024 --max_completion_length 2048 --use_vllm true "
        "--vllm_mode colocate --vllm_gpu_memory_utilization 0.4 --sleep_level 1 --beta 0 --offload_model true "
        "--recompute_granularity full --tuner_type lora --lora_rank 16\n"
    )
    found = import_config(text)
    recipe = found.run.recipe
    assert (recipe.task, recipe.num_generations, recipe.reference) == (Task.GRPO, 4, "none")
    assert (recipe.prompt_length, recipe.completion_length) == (1024, 2048)
    assert (recipe.engine.gpu_memory_utilization, recipe.engine.sleep_level) == (0.4, 1)
    assert (recipe.lora.rank, recipe.checkpointing) == (16, Checkpointing.FULL)
    assert not unread(found)
