"""Bad input, hostile input, and what must never run."""

import json
from pathlib import Path

import pytest

from planner.errors import UsageError, VramwiseError
from planner.importers import import_config, import_subject
from planner.importers.launch import from_accelerate, from_deepspeed
from planner.importers.shell import flags, parse_shell
from planner.run.recipe import Sharding


def test_yaml_alias_bomb_is_refused() -> None:
    lines = ["base_model: x", "a0: &a0 [z, z, z, z, z, z, z, z, z]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    with pytest.raises(UsageError, match="aliases"):
        import_config("\n".join(lines))


def test_deep_nesting_and_endless_recursion_are_refused() -> None:
    with pytest.raises(UsageError, match="nested"):
        import_config("base_model: x\nb: " + "[" * 200 + "]" * 200)
    with pytest.raises(UsageError, match="json"):
        import_config('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}\n")


def test_yaml_tags_build_no_objects() -> None:
    with pytest.raises(UsageError):
        import_config(
            "base_model: !!python/object/apply:os.system ['touch /tmp/never']\nadapter: lora\n"
        )


def test_yaml_mistake_names_its_line() -> None:
    with pytest.raises(UsageError, match="line 4"):
        import_config("base_model: x\nadapter: lora\nlora_r: [1, 2\nsequence_len: 4\n")


def test_a_notebook_that_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "train.ipynb"
    path.write_text("cells: none of it", encoding="utf-8")
    with pytest.raises(UsageError, match="not a notebook"):
        import_config(path)


def test_python_is_parsed_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    source = f"import os\nos.system('touch {marker}')\nopen({str(marker)!r}, 'w').write('x')\nfrom trl import SFTConfig\nc = SFTConfig(max_length=__import__('os').getpid(), per_device_train_batch_size=3)\nt = SFTTrainer(model='Qwen/Qwen3-8B', args=c)\n"
    found = import_config(source)
    assert not marker.exists()
    assert found.run.recipe.micro_batch_size == 3
    assert [row.key for row in found.report.not_understood] == ["max_length"]


def test_shell_is_parsed_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    text = f"#!/bin/bash\ntouch {marker}\nB=$(touch {marker}; echo 9)\nN=$((2 ** 3))\nCUDA_VISIBLE_DEVICES=0 swift sft --model Qwen/Qwen3-8B --per_device_train_batch_size $B --lora_rank ${{RANK:-16}} --gradient_accumulation_steps $(expr 16 / 4)\n"
    found = import_config(text)
    assert not marker.exists()
    assert found.run.recipe.lora.rank == 16
    assert found.run.recipe.gradient_accumulation == 4
    assert "per_device_train_batch_size" in [row.key for row in found.report.not_understood]


def test_huge_powers_are_not_computed() -> None:
    script = parse_shell("N=$((9**9**9**9))\nswift sft --model x --lora_rank $N\n")
    assert script.commands[0][-1] == "$((9**9**9**9))"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("   \n", "empty"),
        ("hello: world\n", "not recognised"),
        ('{"architectures": ["X"], "hidden_size": 1}\n', "model's config.json"),
        ("base_model: x\nadapter: lora\nlora_r: 99999999\n", "lora_r"),
        ("base_model: x\nproject_name: p\nparams:\n  lr: 1\n", "AutoTrain"),
        ("nohup llamafactory-cli train mine/of/it.yaml &\n", "mine/of/it.yaml, which this line"),
    ],
)
def test_one_line_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(VramwiseError, match=message) as caught:
        import_config(text)
    assert "\n" not in caught.value.message


def test_missing_file_and_too_large(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no file"):
        import_config(tmp_path / "gone.yml")
    large = tmp_path / "large.yml"
    large.write_bytes(b"#" * (17 * 1024 * 1024))
    with pytest.raises(UsageError, match="larger"):
        import_config(large)


def test_values_that_cannot_be_read_are_reported_not_guessed() -> None:
    found = import_config("base_model: x/y\nmicro_batch_size: ${MICRO}\nsequence_len: 8k\n")
    assert found.run.recipe.micro_batch_size == 1
    assert found.run.recipe.context == 8000
    assert [row.key for row in found.report.not_understood] == ["micro_batch_size"]


def test_run_yaml_of_ours_and_model_folders_are_not_foreign(tmp_path: Path) -> None:
    ours = tmp_path / "run.yaml"
    ours.write_text(
        "model: llama-3.1-8b\nrecipe:\n  task: sft\nmachine:\n  gpu: h100\n", encoding="utf-8"
    )
    config = tmp_path / "config.json"
    config.write_text('{"architectures": ["LlamaForCausalLM"], "hidden_size": 8}', encoding="utf-8")
    for subject in (ours, config, tmp_path, tmp_path / "gone.yaml", "Qwen/Qwen3-8B", "x" * 5000):
        assert import_subject(str(subject)) is None


def test_deepspeed_and_accelerate_files(tmp_path: Path) -> None:
    zero = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": "auto"},
    }
    launch = from_deepspeed(zero)
    assert (launch.sharding, launch.optimizer_offload, launch.mixed_precision) == (
        Sharding.ZERO3,
        True,
        None,
    )
    fsdp = from_accelerate(
        {
            "distributed_type": "FSDP",
            "num_processes": 4,
            "mixed_precision": "bf16",
            "fsdp_config": {
                "fsdp_version": 2,
                "fsdp_reshard_after_forward": True,
                "fsdp_offload_params": True,
            },
        }
    )
    assert (fsdp.sharding, fsdp.gpus, fsdp.parameter_offload) == (Sharding.FSDP, 4, True)
    kept = from_accelerate(
        {
            "distributed_type": "FSDP",
            "fsdp_config": {
                "fsdp_sharding_strategy": "SHARD_GRAD_OP",
                "fsdp_cpu_ram_efficient_loading": True,
            },
        }
    )
    # whole between forward and backward, which is no ZeRO-2 of DeepSpeed's
    assert (kept.sharding, kept.reshard, kept.loads) == (Sharding.FSDP2, False, "rank0")
    late = {"zero_stage": 3, "zero3_init_flag": False}
    assert (
        from_accelerate({"distributed_type": "DEEPSPEED", "deepspeed_config": late}).loads == "full"
    )
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "z.json").write_text(json.dumps(zero), encoding="utf-8")
    axolotl = tmp_path / "run.yml"
    axolotl.write_text("base_model: Qwen/Qwen3-8B\ndeepspeed: configs/z.json\n", encoding="utf-8")
    found = import_config(axolotl)
    assert (found.run.recipe.sharding, found.run.recipe.optimizer_offload) == (Sharding.ZERO3, True)


def test_launch_file_beside_a_config(tmp_path: Path) -> None:
    launch = tmp_path / "zero2.yaml"
    launch.write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n  zero_stage: 2\n",
        encoding="utf-8",
    )
    found = import_config("model_name_or_path: Qwen/Qwen3-8B\nmax_length: 2048\n", launch=launch)
    assert (found.run.recipe.sharding, found.run.machine.gpus) == (Sharding.ZERO2, 8)


def test_trl_command_line_wins_over_its_config(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(
        "model_name_or_path: Qwen/Qwen3-8B\nmax_length: 2048\n", encoding="utf-8"
    )
    script = tmp_path / "go.sh"
    script.write_text(
        "trl sft --config sft.yaml --max_length 512 --num_processes 2\n", encoding="utf-8"
    )
    found = import_config(script)
    assert (found.run.model, found.run.recipe.context, found.run.machine.gpus) == (
        "Qwen/Qwen3-8B",
        512,
        2,
    )


def test_flags() -> None:
    words = ["--a", "1", "--b=2", "--c", "--no_d", "--e", "x", "y", "-tp", "4"]
    assert flags(words) == {"a": "1", "b": "2", "c": True, "d": False, "e": ["x", "y"], "tp": "4"}


def test_launch_flags_stop_at_the_script() -> None:
    text = "accelerate launch --config_file configs/deepspeed_zero3.yaml --num_processes 4 trl/scripts/sft.py --model_name_or_path Qwen/Qwen2-0.5B --max_length 256 --use_peft --lora_r 4\n"
    found = import_config(text)
    assert (found.run.model, found.run.recipe.context, found.run.recipe.lora.rank) == (
        "Qwen/Qwen2-0.5B",
        256,
        4,
    )
    assert (found.run.recipe.sharding, found.run.machine.gpus) == (Sharding.ZERO3, 4)


@pytest.mark.parametrize(
    ("command", "config", "length", "gpus"),
    [
        (
            "FORCE_TORCHRUN=1 NPROC_PER_NODE=2 llamafactory-cli train c.yaml cutoff_len=512",
            "model_name_or_path: Qwen/Qwen3-4B\nstage: sft\nfinetuning_type: lora\ndeepspeed: ds_z3_config.json\n",
            512,
            2,
        ),
        (
            "axolotl train c.yaml --sequence_len 512",
            "base_model: Qwen/Qwen3-4B\nsequence_len: 2048\n",
            512,
            1,
        ),
        (
            "tune run --nproc_per_node 2 full_finetune_distributed --config c.yaml tokenizer.max_seq_len=512",
            "model:\n  _component_: torchtune.models.qwen3.qwen3_4b\nbatch_size: 1\n",
            512,
            2,
        ),
    ],
)
def test_launchers_of_a_yaml_with_overrides(
    command: str, config: str, length: int, gpus: int, tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(config, encoding="utf-8")
    script = tmp_path / "go.sh"
    script.write_text(f"#!/bin/bash\n{command}\n", encoding="utf-8")
    found = import_config(script)
    assert (found.run.model, found.run.recipe.context, found.run.machine.gpus) == (
        "Qwen/Qwen3-4B",
        length,
        gpus,
    )


def test_llamafactory_flags_without_a_file() -> None:
    found = import_config(
        "llamafactory-cli train --stage sft --model_name_or_path Qwen/Qwen3-4B --finetuning_type lora --cutoff_len 1024 --per_device_train_batch_size 2 --bf16\n"
    )
    assert (found.tool, found.run.recipe.context, found.run.recipe.mixed_precision) == (
        "llamafactory",
        1024,
        "bf16",
    )
