"""The cases of gpu_check that run transformers' Trainer and TRL, watched by the callback."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from benchmarks.gpu_check import Case
from planner.errors import VramwiseError
from planner.plan import Plan
from profiler.explain import as_measured
from profiler.recording import Recording
from profiler.trace import trace
from profiler.transformers_callback import VramwiseCallback

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def run_hf(
    case: Case, config: dict[str, Any], folder: Path, *, cpu: bool
) -> tuple[Plan, Recording, int | None]:
    """Train `case` and return its plan, its recording and the traced peak."""
    callback = VramwiseCallback(quiet=True)
    model = make_model(case, config, folder, cpu=cpu)
    settings = {
        "output_dir": str(folder / "out"),
        "max_steps": case.steps,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": cpu,
        "bf16": False,
        "per_device_train_batch_size": case.batch,
        "gradient_checkpointing": case.checkpointing,
        "optim": "adamw_torch_fused",
        "logging_steps": 1000,
    }
    trainer: Any
    if case.kind == "trl-grpo":
        trainer = grpo_trainer(case, model, settings, callback, folder)
    else:
        arguments = TrainingArguments(**settings)
        trainer = Trainer(
            model=model, args=arguments, train_dataset=Rows(case), callbacks=[callback]
        )
    trainer.train()
    assert callback.plan is not None, "no plan could be made"
    assert callback.recording is not None
    return (
        as_measured(callback.plan, callback.recording),
        callback.recording,
        traced(callback, config),
    )


def make_model(case: Case, config: dict[str, Any], folder: Path, *, cpu: bool) -> Any:
    """Return the model with random weights, adapted or quantised as the case says."""
    fields = {key: value for key, value in config.items() if key != "model_type"}
    settings = AutoConfig.for_model(config["model_type"], **fields)
    dtype = torch.float32 if cpu else torch.bfloat16
    torch.manual_seed(0)
    with torch.device("cpu" if cpu else "cuda"):
        model: Any = AutoModelForCausalLM.from_config(settings, dtype=dtype)
    if case.method == "full":
        return model
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if case.method == "qlora":
        from transformers import BitsAndBytesConfig

        model.save_pretrained(folder / "base")
        del model
        bits = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        place = {"": "cpu" if cpu else 0}
        model = AutoModelForCausalLM.from_pretrained(
            folder / "base", quantization_config=bits, device_map=place, dtype=dtype
        )
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if case.checkpointing:
        model.enable_input_require_grads()
    return get_peft_model(model, LoraConfig(r=16, target_modules=TARGETS, task_type="CAUSAL_LM"))


class Rows(torch.utils.data.Dataset):
    """Sequences of exactly the case's length."""

    def __init__(self, case: Case) -> None:
        self.length = case.length

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(self.length) + index) % 500
        return {"input_ids": ids, "labels": ids.clone()}


def grpo_trainer(
    case: Case, model: Any, settings: dict[str, Any], callback: VramwiseCallback, folder: Path
) -> Any:
    """Return TRL's GRPOTrainer on prompts of one token a word."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    vocabulary = {f"w{index}": index for index in range(500)}
    vocabulary |= {"<pad>": 500, "<eos>": 501, "<unk>": 502}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )
    words = case.length - case.completion
    rows = [{"prompt": " ".join(f"w{(row + i) % 500}" for i in range(words))} for row in range(32)]
    arguments = GRPOConfig(
        **settings,
        num_generations=case.batch,
        max_completion_length=case.completion,
        # a random model never ends: every completion has the full length
        generation_kwargs={"suppress_tokens": [501]},
    )
    return GRPOTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        callbacks=[callback],
        reward_funcs=lambda completions, **_: [float(len(text) % 7) for text in completions],
        processing_class=tokenizer,
    )


def traced(callback: VramwiseCallback, config: dict[str, Any]) -> int | None:
    """Return the peak of the same step on fake tensors; None if no step expresses it."""
    # traced steps of the frameworks live above the profiler: this script may import both
    from trainer.dry_run import subject_for

    assert callback.plan is not None
    assert callback.recipe is not None
    try:
        plain = json.loads(json.dumps(config))
        return trace(subject_for(callback.plan.resolved, callback.recipe, plain)).peak_bytes
    except VramwiseError:
        return None
