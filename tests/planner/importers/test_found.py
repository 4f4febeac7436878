"""Public launch lines of other people's repositories, shortened: each was read wrongly or not at all once."""

from pathlib import Path

import pytest

from planner.errors import VramwiseError
from planner.importers import import_config, import_subject
from planner.run.recipe import Method, Reference, Sharding, Task

RAY = "ray job submit --address=http://h:1 -- python3 -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen3-4B --actor_num_gpus_per_node 2 --vllm_num_engines 2 --prompt_max_len 64 --generate_max_len 64 --zero_stage 3"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("accelerate launch --num_processes=4 train_raw.py recipes/lora_sft.yaml --a b\n", "recipes/lora_sft.yaml"),
        ("accelerate launch --config_file ds.json train/mine.py configs/mine.yaml\n", "configs/mine.yaml"),
        ("torchrun --nproc_per_node=8 -m RL2.trainer.ppo actor.model_name=Qwen/Qwen3-1.7B\n", "RL2.trainer.ppo"),
        ("cd ..\nbash train_mine_ray.sh --rollout_n 8\n", "train_mine_ray.sh"),
        ("python -m verl.trainer.main worker.actor.model.model_path=Qwen/Qwen3-4B\n", "EasyR1"),
    ],
)  # fmt: skip
def test_what_a_launcher_starts_is_named_where_it_cannot_be_read(line: str, named: str) -> None:
    with pytest.raises(VramwiseError, match="config") as caught:
        import_config(line)
    assert named in caught.value.message


def test_a_script_that_starts_another_is_followed(tmp_path: Path) -> None:
    outer, inner = tmp_path / "run.sh", tmp_path / "inner.sh"
    outer.write_text("bash inner.sh --seed 3\n", encoding="utf-8")
    inner.write_text(
        "trl sft --model_name_or_path Qwen/Qwen3-4B --max_length 64\n", encoding="utf-8"
    )
    found = import_config(outer)
    assert (found.tool, found.run.recipe.context) == ("trl", 64)
    assert "inner.sh is given --seed 3: not applied to it" in found.report.effects
    inner.write_text("bash inner.sh\n", encoding="utf-8")
    with pytest.raises(VramwiseError, match="not recognised"):
        import_config(outer)


def test_ms_swifts_command_line_file_behind_a_launcher() -> None:
    line = "N=2\ndeepspeed --num_gpus ${N} /w/ms-swift/swift/cli/rlhf.py --rlhf_type grpo --model Qwen/Qwen3-4B --train_type lora --use_vllm true --vllm_mode colocate --vllm_tensor_parallel_size 2\n"
    found = import_config(line)
    assert (found.tool, found.run.recipe.task) == ("ms-swift", Task.GRPO)
    assert (found.run.machine.gpus, found.run.recipe.engine.tensor_parallel) == (2, 2)


def test_an_absent_accelerate_file_named_fsdp2_is_fsdp2() -> None:
    line = "accelerate launch --config_file cfg/fsdp2.yaml sft.py --model_name_or_path Qwen/Qwen3-4B --max_length 64\n"
    assert import_config(line, gpus=2).run.recipe.sharding is Sharding.FSDP2


def test_a_server_beside_an_unknown_program_is_still_read() -> None:
    text = (
        "torchrun --nproc_per_node=8 mine.py a.yaml\nvllm serve Qwen/Qwen3-4B --max-model-len 64\n"
    )
    assert import_config(text).tool == "vllm"


@pytest.mark.parametrize(
    ("flags", "method", "context"),
    [
        ("--bf16 true --fp16 false --output_dir o --model_max_length 3000 --learning_rate 1e-5", Method.FULL, 3000),
        ("--output_dir o --lora_r 16 --qlora True --num_train_epochs 3 --model_max_length 1600", Method.QLORA, 1600),
    ],
)  # fmt: skip
def test_a_trainers_flags_without_a_model_are_a_trainers(
    flags: str, method: Method, context: int, tmp_path: Path
) -> None:
    script = tmp_path / "train.sh"
    script.write_text(f"python tune.py --per_device_train_batch_size 2 {flags}\n", encoding="utf-8")
    with pytest.raises(VramwiseError, match="the model is not in this hf-trainer config"):
        import_subject(str(script))
    found = import_subject(str(script), model="Qwen/Qwen3-4B")
    assert found is not None
    recipe = found.run.recipe
    assert (recipe.method, recipe.context, recipe.micro_batch_size) == (method, context, 2)


def test_llamafactorys_flags_without_a_model(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        "python src/train_sft.py --do_train --finetuning_type lora --output_dir o --fp16 --quantization_bit 4 "
        "--per_device_train_batch_size 10 --gradient_accumulation_steps 4\n",
        encoding="utf-8",
    )
    found = import_subject(str(script), model="Qwen/Qwen1.5-7B")
    assert found is not None
    recipe = found.run.recipe
    assert (found.tool, recipe.method, recipe.quantization) == ("llamafactory", Method.QLORA, "nf4")
    assert (recipe.micro_batch_size, recipe.gradient_accumulation) == (10, 4)


def test_ms_swifts_first_scripts() -> None:
    found = import_config(
        "CUDA_VISIBLE_DEVICES=0 \\\npython llm_sft.py \\\n --model_type qwen1half-14b-chat --model_id_or_path qwen1half-14b-chat "
        "--sft_type lora --quantization_bit 4 --bnb_4bit_comp_dtype bf16 --lora_rank 8 --lora_dropout_p 0. "
        "--lora_target_modules ALL --batch_size 1 --max_length 2048 --gradient_accumulation_steps 16\n"
    )
    recipe = found.run.recipe
    assert (found.tool, recipe.method, recipe.quantization) == ("ms-swift", Method.QLORA, "nf4")
    assert (recipe.context, recipe.gradient_accumulation, recipe.lora.dropout) == (2048, 16, 0.0)
    assert recipe.lora.targets == "all-linear"


@pytest.mark.parametrize(
    ("flags", "reference", "said"),
    [
        ("--advantage_estimator group_norm", Reference.NONE, "the reference has GPUs of its own"),
        ("--advantage_estimator group_norm --colocate_actor_ref", Reference.SEPARATE, ""),
        ("--advantage_estimator group_norm --colocate_all_models", Reference.SEPARATE, ""),
        ("", Reference.SEPARATE, "an upper bound"),
    ],
)
def test_openrlhfs_reference_lies_where_its_flags_put_it(
    flags: str, reference: Reference, said: str
) -> None:
    found = import_config(f"{RAY} {flags}\n")
    assert found.run.recipe.task is (Task.GRPO if "group_norm" in flags else Task.PPO)
    assert found.run.recipe.reference is reference
    assert not found.report.not_understood
    whole = " ".join(found.report.effects)
    assert said in whole if said else "reference has GPUs" not in whole


def test_a_release_of_known_shapes_is_that_model() -> None:
    line = "python -m sglang.launch_server --model-path /data/DeepSeek-V3.1-Terminus --tp-size 8 --attention-backend aiter --num-continuous-decode-steps 4 --cpu-offload-gb 2\n"
    found = import_config(line)
    assert found.run.recipe.engine.cpu_offload_gib == 2
    assert not found.report.not_understood
    subject = import_subject(line, text=True)
    assert subject is not None
    assert subject.run.model == "/data/DeepSeek-V3.1-Terminus"
