"""Launch lines: what starts a script, on how many GPUs, and whose flags it has."""

from pathlib import Path

import pytest

from planner.errors import UsageError, VramwiseError
from planner.importers import import_config, import_subject
from planner.importers.launchers import Started, slurm_gpus, started
from planner.importers.shell import parse_shell
from planner.run.recipe import Method, Sharding, Task


def first(text: str) -> Started:
    script = parse_shell(text)
    found = started(script.commands[0], script.prefixes[0])
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("line", "program", "gpus"),
    [
        ("torchrun --nproc_per_node=8 --nnodes 2 a.py --x 1", "a.py", 16),
        ('torchrun --nproc-per-node "4" a.py', "a.py", 4),
        ("torchrun -n 3 a.py", "a.py", 3),
        ("python -m torch.distributed.launch --nproc_per_node 2 --use_env a.py --x 1", "a.py", 2),
        ("python3 -m torch.distributed.run --standalone --nproc-per-node 4 -m pkg.mod --x", "pkg.mod", 4),
        ("deepspeed --num_gpus 8 --master_port=9901 src/a.py --x 1", "src/a.py", 8),
        ("deepspeed --include localhost:0,1,3 a.py", "a.py", 3),
        ("deepspeed --num_nodes 2 --num_gpus 4 --module pkg.cli --x", "pkg.cli", 8),
        ("accelerate launch --num_processes 6 --multi_gpu main/a.py --x", "main/a.py", 6),
        ("CUDA_VISIBLE_DEVICES=4,7 accelerate launch a.py", "a.py", 2),
        ("srun -N 2 --exclusive bash -c 'torchrun --nproc_per_node 4 a.py --x 1'", "a.py", 8),
        ("ray job submit --address=http://h:1 --runtime-env-json='{}' -- python3 -m pkg.cli --x", "pkg.cli", None),
        ("nohup env A=1 uv run --extra fsdp -m pkg.main a=b > log 2>&1 &", "pkg.main", None),
        ("conda run -n env python -u a.py --x", "a.py", None),
        ("docker run --gpus all -p 1:1 some/image:1 python3 -m pkg.server --x", "pkg.server", None),
        ("CUDA_VISIBLE_DEVICES=0,1 python a.py", "a.py", None),
    ],
)  # fmt: skip
def test_what_a_line_starts(line: str, program: str, gpus: int | None) -> None:
    found = first(line)
    assert (found.program, found.gpus) == (program, gpus)


def test_redirections_are_no_arguments() -> None:
    assert first("python a.py --x 1 2>&1 | tee log").arguments == ["--x", "1"]
    assert first("python a.py --x 1 >> log.txt 2> err &").arguments == ["--x", "1"]


@pytest.mark.parametrize(
    ("lines", "gpus"),
    [
        ("#SBATCH --nodes=2\n#SBATCH --gres=gpu:a100:4", 8),
        ("#SBATCH --gpus-per-node=8", 8),
        ("#SBATCH -N 3\n#SBATCH --gpus=12", 12),
        ("#SBATCH --time=1:00", None),
    ],
)
def test_slurm_says_the_gpus(lines: str, gpus: int | None) -> None:
    assert slurm_gpus(f"#!/bin/bash\n{lines}\nsrun python a.py\n") == gpus


TRL = "--model_name_or_path Qwen/Qwen3-4B --dtype bfloat16"


@pytest.mark.parametrize(
    ("script", "flags", "task"),
    [
        ("my/own_train.py", "--use_peft --lora_r 32 --max_length 512", Task.SFT),
        ("x.py", "--num_generations 4 --max_completion_length 128", Task.GRPO),
        ("run_dpo_mine.py", "--beta 0.2 --max_length 512", Task.DPO),
        ("-m trl.scripts.kto", "--max_length 512", Task.KTO),
        ("train_orpo.py", "--max_length 512 --use_peft", Task.ORPO),
    ],
)
def test_trls_flags_on_any_script(script: str, flags: str, task: Task) -> None:
    found = import_config(f"torchrun --nproc_per_node 2 {script} {TRL} {flags}\n")
    assert (found.tool, found.run.recipe.task, found.run.machine.gpus) == ("trl", task, 2)
    assert found.run.recipe.sharding is Sharding.DDP


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("NNODES=2 NPROC_PER_NODE=8 llamafactory-cli train", 16),
        ("CUDA_VISIBLE_DEVICES=0,1 llamafactory-cli train", 2),
        (
            "#SBATCH --nodes=2\n#SBATCH --gpus-per-node=4\nsrun torchrun --nproc_per_node 4 --nnodes $N src/train.py",
            8,
        ),
    ],
)
def test_nodes_of_the_environment_and_the_job(text: str, gpus: int) -> None:
    flags = "--stage sft --finetuning_type lora --model_name_or_path Qwen/Qwen3-4B --bf16"
    assert import_config(f"{text} {flags}\n").run.machine.gpus == gpus


def test_accelerates_own_flags_say_the_sharding() -> None:
    fsdp = "--use_fsdp --fsdp_offload_params true --fsdp_version 1 --num_processes 4"
    found = import_config(f"accelerate launch {fsdp} t.py {TRL} --use_peft\n").run
    assert (found.recipe.sharding, found.recipe.offload.parameters, found.machine.gpus) == (
        Sharding.FSDP,
        True,
        4,
    )
    zero = import_config(
        f"accelerate launch --use_deepspeed --zero_stage 2 t.py {TRL} --use_peft\n"
    ).run
    assert zero.recipe.sharding is Sharding.ZERO2


@pytest.mark.parametrize(
    ("line", "context", "method"),
    [
        ("python run_clm.py --model_name_or_path Qwen/Qwen3-4B --do_train --output_dir o", 1024, Method.FULL),
        ("torchrun --nproc_per_node 2 fastchat/train/train.py --model_name_or_path Qwen/Qwen3-4B --output_dir o --model_max_length 2048 --lazy_preprocess True --fsdp 'full_shard auto_wrap'", 2048, Method.FULL),
        ("python qlora.py --model_name_or_path huggyllama/llama-7b --output_dir o --bits 4 --lora_r 64 --source_max_len 16 --target_max_len 512", 528, Method.QLORA),
        ("python finetune.py --base_model Qwen/Qwen3-4B --output_dir o --batch_size 128 --micro_batch_size 4 --lora_r 8", 1024, Method.LORA),
        ("python ft.py --model_name_or_path Qwen/Qwen3-4B --output_dir o --use_lora --lora_rank 8 --max_seq_length 99", 99, Method.LORA),
    ],
)  # fmt: skip
def test_plain_hugging_face_scripts(line: str, context: int, method: Method) -> None:
    found = import_config(line + "\n")
    assert (found.tool, found.run.recipe.context, found.run.recipe.method) == (
        "hf-trainer",
        context,
        method,
    )
    assert found.run.recipe.loss == "full"
    if "fsdp" in line:
        assert found.run.recipe.sharding is Sharding.FSDP
    if "batch_size 128" in line:
        assert (found.run.recipe.micro_batch_size, found.run.recipe.gradient_accumulation) == (
            4,
            32,
        )


@pytest.mark.parametrize(
    "name", ["conf/deepspeed_config_s2.json", "ds_z2_config.json", "z2_offload.json", "zero2.json"]
)
def test_a_stage_in_a_files_name(name: str) -> None:
    found = import_config(f"torchrun --nproc_per_node 2 t.py {TRL} --use_peft --deepspeed {name}\n")
    assert found.run.recipe.sharding is Sharding.ZERO2


def test_llamafactory_behind_any_launcher() -> None:
    flags = "--stage sft --finetuning_type full --model_name_or_path Qwen/Qwen3-4B --cutoff_len 256 --deepspeed ds_z3_offload.json --bf16"
    for line in (
        "deepspeed --num_gpus 2 src/train_bash.py",
        "torchrun --nproc_per_node 2 /app/src/train.py",
    ):
        found = import_config(f"{line} {flags}\n")
        assert (found.tool, found.run.machine.gpus, found.run.recipe.sharding) == (
            "llamafactory",
            2,
            Sharding.ZERO3,
        )
        assert found.run.recipe.optimizer_offload


def test_a_comment_ends_a_continued_command() -> None:
    text = f"trl sft {TRL} \\\n  --max_length 512 \\\n  # --use_peft \\\n  --per_device_train_batch_size 2 \\\n  --bf16\necho done\n"
    found = import_config(text)
    assert found.run.recipe.micro_batch_size == 8
    assert any("--per_device_train_batch_size, --bf16" in said for said in found.report.effects)
    array = "A=(\n  --max_length 64\n  # --use_peft\n  --bf16\n)\ntrl sft " + TRL + ' "${A[@]}"\n'
    assert import_config(array).run.recipe.context == 64


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("llamafactory-cli train mine/a.yaml", "mine/a.yaml"),
        ("axolotl train conf/b.yml --deepspeed z.json", "conf/b.yml"),
        ("tune run full_finetune_single_device --config llama3_1/8B_full", "llama3_1/8B_full"),
        ("trl sft --config gone.yaml", "gone.yaml"),
        ("uv run rl @ configs/x.toml", "configs/x.toml"),
        ("composer -n 8 train.py yamls/y.yaml", "yamls/y.yaml"),
        ("xtuner train my_config.py --deepspeed deepspeed_zero2", "my_config.py"),
    ],
)
def test_a_file_that_is_not_here_is_asked_for(line: str, name: str, tmp_path: Path) -> None:
    script = tmp_path / "go.sh"
    script.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(UsageError, match=f"{name}, which this line names, is not here"):
        import_config(script)


def test_files_that_a_script_writes_are_read() -> None:
    text = "cat > /srv/c.yaml <<'EOF'\nmodel_name_or_path: Qwen/Qwen3-4B\nstage: sft\nfinetuning_type: lora\ncutoff_len: 333\nEOF\nllamafactory-cli train /srv/c.yaml\n"
    assert import_config(text).run.recipe.context == 333


def test_two_runs_in_one_script_are_said() -> None:
    found = import_config(f"trl sft {TRL} --max_length 64\ntrl sft {TRL} --max_length 128\n")
    assert found.run.recipe.context == 64
    assert any("2 runs" in said for said in found.report.effects)


def test_the_model_may_be_said_beside_the_file(tmp_path: Path) -> None:
    config = tmp_path / "lf.yaml"
    config.write_text(
        "model_name_or_path: ${dir}/m\nstage: sft\nfinetuning_type: lora\n", encoding="utf-8"
    )
    with pytest.raises(UsageError, match="variable dir is not set") as caught:
        import_subject(str(config))
    assert "--model" in (caught.value.hint or "")
    found = import_subject(str(config), model="Qwen/Qwen3-4B", gpus=2)
    assert found is not None
    assert found.run.model == "Qwen/Qwen3-4B"


def test_a_model_in_a_folder_of_another_machine_is_asked_for(tmp_path: Path) -> None:
    script = tmp_path / "serve.sh"
    script.write_text("vllm serve /mnt/models --max-model-len 64\n", encoding="utf-8")
    with pytest.raises(UsageError, match="'/mnt/models', which is not here") as caught:
        import_subject(str(script))
    assert "--model" in (caught.value.hint or "")


def test_given_gpus_silence_the_note_about_them() -> None:
    text = "model_name_or_path: Qwen/Qwen3-4B\nstage: sft\nfinetuning_type: lora\ndeepspeed: ds_z3_config.json\n"
    assert any("say --gpus" in said for said in import_config(text).report.effects)
    assert not any("--gpus" in said for said in import_config(text, gpus=8).report.effects)


def test_nothing_known_is_one_line() -> None:
    with pytest.raises(VramwiseError, match="not recognised") as caught:
        import_config("echo hello\nls -l\n")
    assert "--tool" not in (caught.value.hint or "")
