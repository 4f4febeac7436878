"""`vramwise train trl.yaml`: a config of TRL's command line trains here, and says what differs."""

import json

import pytest

from planner.errors import UnsupportedError, UsageError

SFT = """\
model_name_or_path: {model}
dataset_name: sums
output_dir: out
max_steps: 4
learning_rate: 5e-3
per_device_train_batch_size: 4
use_peft: true
lora_r: 4
lora_target_modules: [q_proj, v_proj]
lora_dropout: 0.0
warmup_steps: 0.5
lr_scheduler_type: cosine
eval_strategy: steps
eval_steps: 2
bf16: false
max_length: 64
dataset_num_proc: 4
neftune_noise_alpha: 5
"""
GRPO = """\
model_name_or_path: {model}
dataset_name: sums
output_dir: out
max_steps: 4
learning_rate: 5e-3
per_device_train_batch_size: 8
steps_per_generation: 2
num_generations: 4
max_completion_length: 6
use_peft: true
lora_r: 4
lora_dropout: 0.0
beta: 0.01
bf16: false
reward_funcs: [think_format_reward, own.brevity]
reward_weights: [1.0, 0.5]
vllm_gpu_memory_utilization: 0.4
"""


@pytest.fixture
def trl(small_model, tmp_path, monkeypatch):
    """Return a function that trains a config in a folder with data and rewards, and what it said."""
    from trainer.run import train_run

    rows = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(5) for b in range(5)]
    (tmp_path / "sums").mkdir()
    for split, part in (("train", rows[:20]), ("test", rows[20:])):
        text = "\n".join(json.dumps(row) for row in part)
        (tmp_path / "sums" / f"{split}.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "own.py").write_text(
        "def brevity(completion_ids, **columns):\n    return [1 / len(ids) for ids in completion_ids]\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)

    def run(text, *more):
        path = tmp_path / "trl.yaml"
        path.write_text("\n".join([text.format(model=small_model), *more]), encoding="utf-8")
        said: list[str] = []
        return train_run(path, say=said.append), said

    return run


def test_sft_trains_with_evaluation_and_says_every_field(trl):
    result, said = trl(SFT)
    assert result.steps == 4
    assert [round(step["lr"] / 5e-3, 3) for step in result.metrics] == [0.5, 1.0, 1.0, 0.5]
    assert [row["step"] for row in result.evaluations] == [2, 4]
    assert result.output.name == "out"
    for line in (
        "warmup_steps 0.5 -> train.warmup_ratio 0.5; a step ahead: the first step of transformers has a rate of 0; below 1 it is a share of the steps",
        "dataset_num_proc 4: not read, one process tokenises",
        "neftune_noise_alpha 5 -> train.neftune_alpha 5; noise is scaled by each sample's own length, not by the padded one",
    ):  # fmt: skip
        assert line in said
    fields = [line.split(":")[0] for line in SFT.splitlines()]
    assert all(any(line.startswith(f"{name} ") for line in said) for name in fields)


def test_grpo_trains_with_its_rewards_and_says_every_field(trl):
    result, said = trl(GRPO)
    assert result.steps == 2, "four optimizer steps, two on a rollout"
    assert {"rewards/format/mean", "rewards/brevity/mean", "kl"} <= set(result.metrics[0])
    assert result.metrics[0]["updates"] == 2
    assert (
        "vllm_gpu_memory_utilization 0.4: not read, the KV cache is as large as the plan says"
        in said
    )
    assert "prompts never cut -> recipe.prompt_length 4, the longest of the data" in said
    fields = [line.split(":")[0] for line in GRPO.splitlines()]
    assert all(any(line.startswith(f"{name} ") for line in said) for name in fields)


def test_a_dialogue_is_learned_whole_unless_the_file_says_assistant_only(trl, tmp_path):
    """TRL's default; ours alone would be the assistant's turns."""
    talk = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": talk}) + "\n", encoding="utf-8")
    data = "datasets: [{path: json, data_files: talk.jsonl}]"
    base = SFT.replace("dataset_name: sums\n", "").replace("eval_strategy: steps\n", "")
    base = base.replace("per_device_train_batch_size: 4", "per_device_train_batch_size: 1")
    whole, said = trl(base, data)
    assert any(line.startswith("assistant_only_loss False -> train.loss_on all") for line in said)
    answers, _ = trl(base.replace("output_dir: out", "output_dir: other"), data, "assistant_only_loss: true")  # fmt: skip
    assert whole.metrics[0]["tokens"] > 2 * answers.metrics[0]["tokens"]


def test_epochs_and_shares_of_them_are_counted_in_the_data(trl):
    text = SFT.replace("max_steps: 4", "num_train_epochs: 2").replace(
        "steps\neval_steps: 2", "epoch"
    )
    result, said = trl(text.replace("warmup_steps: 0.5", "warmup_steps: 0.2"))
    assert result.steps == 10, "2 x 20 samples, 4 a step"
    assert [row["step"] for row in result.evaluations] == [5, 10]
    assert "share of 10 steps 0.5 -> train.eval_every 5" in said
    assert [round(step["lr"] / 5e-3, 3) for step in result.metrics[:3]] == [0.5, 1.0, 1.0]


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        (SFT, "label_smoothing_factor: 0.1", "label_smoothing_factor: 0.1 cannot be trained here"),
        (SFT, "loss_type: dft", "loss_type: dft cannot be trained here"),
        (GRPO, "loss_type: sapo", "loss_type: sapo cannot be trained here"),
        (GRPO, "entropy_coef: 0.01", "entropy_coef: 0.01 cannot be trained here"),
        (GRPO, "num_processes: 4", "num_processes: 4 cannot be trained here"),
        (GRPO, "generation_batch_size: 10", "exclude each other"),
        (GRPO.replace("steps_per_generation: 2", "generation_batch_size: 12"), "", "12 completions are not whole"),
        (GRPO, "max_grad_nor: 1", "max_grad_nor: TRL 1.16.0 has no such field"),
        (GRPO.replace("own.brevity", "accuracy_rewards"), "", "reward_funcs: accuracy_rewards cannot be trained"),
    ],
)  # fmt: skip
def test_what_would_change_the_result_in_silence_is_refused(trl, text, more, said):
    with pytest.raises(UsageError, match=said) as caught:
        trl(text, more)
    assert "\n" not in caught.value.message


def test_dpo_and_other_tools_are_planned_not_trained(trl, tmp_path):
    from trainer.foreign import read_given

    with pytest.raises(UnsupportedError, match="TRL's dpo is planned, not trained"):
        trl(SFT.replace("neftune_noise_alpha: 5", "precompute_ref_log_probs: true"))
    other = tmp_path / "axolotl.yaml"
    other.write_text("base_model: Qwen/Qwen3-0.6B\nadapter: lora\n", encoding="utf-8")
    with pytest.raises(UnsupportedError, match="axolotl is planned, not trained"):
        read_given(other)


def test_a_command_line_and_a_script_are_read_as_their_yaml_is(small_model, trl, tmp_path):
    from trainer.foreign import read_given

    flags = f"--model_name_or_path {small_model} --dataset_name sums --learning_rate 1e-4 --max_steps 3 --bf16 false"
    (tmp_path / "run.sh").write_text(f"#!/bin/sh\ntrl sft {flags}\n", encoding="utf-8")
    (tmp_path / "train.py").write_text(
        "from datasets import load_dataset\nfrom trl import SFTConfig, SFTTrainer\n"
        f"SFTTrainer(model={str(small_model)!r}, args=SFTConfig(max_steps=3, learning_rate=1e-4, bf16=False),\n"
        "  train_dataset=load_dataset('sums', split='train'))\n",
        encoding="utf-8",
    )
    for name in ("run.sh", "train.py"):
        given = read_given(tmp_path / name)
        assert (given.train.lr, given.train.steps, given.train.dataset.name) == (1e-4, 3, "sums")
        assert given.run.recipe.dtype == "fp32"
    (tmp_path / "grpo.py").write_text(
        "from trl import GRPOConfig, GRPOTrainer\n"
        "def mine(completions, **k): return [0.0]\n"
        "GRPOTrainer(model='m', args=GRPOConfig(num_generations=4), reward_funcs=mine)\n",
        encoding="utf-8",
    )
    with pytest.raises(UnsupportedError, match="reward_funcs: only running the script"):
        read_given(tmp_path / "grpo.py")
