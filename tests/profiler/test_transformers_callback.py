"""The callback on real trainers: the HF Trainer, TRL's SFT with LoRA, and GRPO, on tiny models."""

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from planner.machines.machine import make_machine
from planner.units import MiB
from profiler.live_recipe import Shapes, longest_in_data, model_spec, recipe_of
from profiler.transformers_callback import VramwiseCallback

VOCAB, HIDDEN, LAYERS = 512, 64, 2


def tiny(vocab: int = VOCAB) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        # not grouped: grouped fp32 keys are planned as CUDA's math kernel, which a CPU does not take
        num_key_value_heads=4,
        max_position_embeddings=256,
        pad_token_id=500,
        eos_token_id=501,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


class Rows(torch.utils.data.Dataset):
    """Eight sequences of 48 tokens, one of 64."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(64 if index == 7 else 48) % VOCAB
        return {"input_ids": ids, "labels": ids.clone()}


def arguments(folder: Path, **extra: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "out"),
        "max_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "optim": "adamw_torch_fused",
        **extra,
    }


def test_the_hf_trainer_is_planned_and_measured_within_two_percent(tmp_path: Path, capsys) -> None:
    callback = VramwiseCallback(tmp_path / "report")
    args = TrainingArguments(**arguments(tmp_path, per_device_train_batch_size=1))
    Trainer(model=tiny(), args=args, train_dataset=Rows(), callbacks=[callback]).train()
    assert callback.recipe is not None
    assert callback.recipe.method == "full"
    assert callback.recipe.framework == f"hf-trainer=={version('transformers')}"
    assert callback.recipe.optimizer == "adamw-fused"
    recording, comparison = callback.recording, callback.comparison
    assert recording is not None
    assert comparison is not None
    assert not recording.partial
    measured = {phase.name: phase for phase in recording.phases}
    assert {"forward", "loss", "backward", "step"} <= set(measured)
    weights = sum(p.numel() * 4 for p in tiny().parameters())
    assert measured["forward"].terms_bytes["weights"] == pytest.approx(weights, rel=0.01)
    assert measured["step"].terms_bytes["gradients"] == pytest.approx(weights, rel=0.01)
    assert comparison.cell("loss", "logits").error == pytest.approx(0, abs=0.05)
    assert comparison.peak.error == pytest.approx(0, abs=0.02)
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000
    saved = json.loads((tmp_path / "report" / "recording.json").read_text())
    assert saved["peak_bytes"] == recording.peak_bytes
    printed = capsys.readouterr()
    assert printed.out.count("vramwise |") == 0
    assert "planned" in printed.err
    assert "measured" in printed.err
    assert "suggestion: " in printed.err


def test_the_longest_row_of_the_data_is_planned_for(tmp_path: Path) -> None:
    args = TrainingArguments(**arguments(tmp_path))
    loader = torch.utils.data.DataLoader(Rows())
    assert longest_in_data(args, loader, None) == Shapes(context=64)


def test_what_cannot_be_planned_is_said_and_still_measured(tmp_path: Path, capsys) -> None:
    class Alien(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(VOCAB, 8)

        def get_input_embeddings(self) -> torch.nn.Module:
            return self.embed

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
            return {"loss": self.embed(input_ids).square().mean()}

    callback = VramwiseCallback()
    args = TrainingArguments(**arguments(tmp_path, per_device_train_batch_size=1))
    Trainer(model=Alien(), args=args, train_dataset=Rows(), callbacks=[callback]).train()
    assert callback.plan is None
    assert callback.recording is not None
    assert callback.recording.environment["steps"] == 2
    assert "no plan: Alien has no transformers config" in capsys.readouterr().err


def test_a_leak_is_told_while_the_run_goes_on(tmp_path: Path, capsys) -> None:
    kept = []

    class Leak(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kept.append(torch.empty(8 * MiB, dtype=torch.uint8))
            control.should_training_stop = state.global_step == 12

    machine = replace(make_machine(vram="24GiB"), vram_bytes=160 * MiB, context_bytes=0)
    callback = VramwiseCallback(machine=machine)
    args = TrainingArguments(
        **arguments(tmp_path, per_device_train_batch_size=1) | {"max_steps": 200}
    )
    Trainer(model=tiny(), args=args, train_dataset=Rows(), callbacks=[Leak(), callback]).train()
    forecast = callback.forecast
    assert forecast is not None
    assert forecast.done == 12
    assert callback.plan is not None
    assert forecast.capacity_bytes == callback.plan.capacity_bytes
    told = forecast.runs_out
    assert told is not None
    assert told.growth.kind == "leak"
    assert told.growth.per_step_bytes == pytest.approx(8 * MiB, rel=0.02)
    # what the first step leaves is there from the second on
    assert told.step == pytest.approx(callback.plan.capacity_bytes / (8 * MiB) + 1, abs=1)
    said = capsys.readouterr().err
    assert said.count("forecast: will run out of") == 1
    assert "because of growth of" in said
    assert "left" in said


@pytest.fixture
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{index}": index for index in range(500)}
    vocabulary |= {"<pad>": 500, "<eos>": 501, "<unk>": 502}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def test_grpo_has_a_rollout_and_the_shapes_that_ran(tmp_path: Path, tokenizer: Any) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(completion) % 5) for completion in completions]

    prompts = [{"prompt": " ".join(f"w{(i + j) % 500}" for j in range(10))} for i in range(8)]
    settings = arguments(tmp_path, per_device_train_batch_size=4, bf16=False)
    args = GRPOConfig(
        **settings, num_generations=4, max_completion_length=12, gradient_checkpointing=False
    )
    callback = VramwiseCallback(quiet=True, machine=make_machine(vram="24GiB"))
    trainer = GRPOTrainer(
        model=tiny(),
        args=args,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
        callbacks=[callback],
    )
    trainer.train()
    recipe, recording, comparison = callback.recipe, callback.recording, callback.comparison
    assert recipe is not None
    assert recording is not None
    assert comparison is not None
    assert (recipe.task, recipe.num_generations) == ("grpo", 4)
    assert recipe.framework == f"trl=={version('trl')}"
    assert recipe.prompt_length == 10
    assert recipe.engine.kind == "transformers"
    phases = {phase.name: phase for phase in recording.phases}
    assert {"rollout", "forward", "loss", "backward", "step"} <= set(phases)
    # keys and values, 2 layers, 2 heads of 16, fp32, 4 rows: of 10 to 22 tokens
    token = 2 * 2 * 2 * 16 * 4 * 4
    assert 10 * token <= phases["rollout"].terms_bytes["kv_cache"] <= 1.2 * 22 * token
    assert comparison.cell("forward", "activations").error == pytest.approx(0, abs=0.05)
    assert comparison.cell("step", "optimizer").error == pytest.approx(0, abs=0.05)


def test_a_lora_run_is_derived_from_the_live_adapters(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        tiny().to(torch.bfloat16), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    )
    args = TrainingArguments(**arguments(tmp_path, bf16=False, gradient_checkpointing=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    recipe = recipe_of(model, args, optimizer, Shapes(context=100, rows=3, seen=True))
    assert (recipe.method, recipe.dtype) == ("lora", "bf16")
    assert recipe.lora.rank == 4
    assert set(recipe.lora.targets) == {"q_proj", "v_proj"}
    assert recipe.optimizer == "sgd-momentum"
    assert (recipe.context, recipe.micro_batch_size) == (100, 3)
    spec = model_spec(model)
    base = sum(p.numel() for name, p in model.named_parameters() if "lora_" not in name)
    assert spec.parameters == base


def test_a_peft_sft_run_tells_adapters_from_weights(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny(), LoraConfig(r=4, target_modules="all-linear"))
    callback = VramwiseCallback()
    args = TrainingArguments(**arguments(tmp_path, per_device_train_batch_size=1))
    Trainer(model=model, args=args, train_dataset=Rows(), callbacks=[callback]).train()
    assert callback.recording is not None
    step = next(phase for phase in callback.recording.phases if phase.name == "step")
    lora = [p.numel() * 4 for name, p in model.named_parameters() if "lora_" in name]
    assert step.terms_bytes["adapters"] == pytest.approx(sum(lora), rel=0.02)
    assert step.terms_bytes["gradients"] == pytest.approx(sum(lora), rel=0.02)
    assert callback.comparison is not None
    assert callback.comparison.cell("step", "adapters").error == pytest.approx(0, abs=0.02)
