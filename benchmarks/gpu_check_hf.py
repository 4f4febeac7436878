"""The cases of gpu_check that run transformers' Trainer and TRL, watched by the callback."""

import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks.gpu_check_jobs import Case, Outcome
from benchmarks.gpu_check_run import empty_caches
from benchmarks.gpu_check_vramwise import must_fit, traced_phases
from profiler.explain import as_measured
from profiler.transformers_callback import VramwiseCallback

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# trl/trainer/utils.py, _fused_forward: `compact = _use_triton(device)`
TRL_ON_A_CPU = {"loss": "on a CPU TRL scores every position in torch ops, on a GPU in Triton"}


class StepClock(TrainerCallback):
    """Seconds of every step, the device's work included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began_s = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._began_s = _now_s()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop it."""
        self.seconds.append(_now_s() - self._began_s)


class Guard(TrainerCallback):
    """Leaves a case out before its first step when its plan is larger than what is free."""

    def __init__(self, planner: VramwiseCallback, free_bytes: int | None) -> None:
        self._planner = planner
        self._free_bytes = free_bytes

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare."""
        if self._planner.plan is not None:
            must_fit(self._planner.plan, self._free_bytes)


def run_hf(
    case: Case, config: dict[str, Any], folder: Path, *, cpu: bool, free_bytes: int | None
) -> Outcome:
    """Train `case` under transformers or TRL."""
    callback, clock = VramwiseCallback(quiet=True), StepClock()
    callbacks = [callback, Guard(callback, free_bytes), clock]
    model = make_model(case, config, folder, cpu=cpu)
    settings: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "max_steps": case.steps,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": cpu,
        "bf16": False,
        "per_device_train_batch_size": case.batch,
        "gradient_checkpointing": case.checkpointing != "none",
        "optim": "adamw_torch_fused",
        "logging_steps": 1000,
    }
    trainer: Any
    if case.kind == "trl-grpo":
        trainer = grpo_trainer(case, model, settings, callbacks)
    else:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(**settings),
            train_dataset=Rows(case),
            callbacks=callbacks,
        )
    trainer.train()
    assert callback.plan is not None, "no plan could be made"
    assert callback.recording is not None
    assert callback.recipe is not None
    return Outcome(
        plan=as_measured(callback.plan, callback.recording),
        recording=callback.recording,
        traced_phases=traced_phases(callback.plan, callback.recipe, config, cpu=cpu),
        step_seconds=clock.seconds,
        not_compared=TRL_ON_A_CPU if cpu and case.kind == "trl-grpo" else {},
    )


def _now_s() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


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
        empty_caches()
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
    if case.checkpointing != "none":
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
    case: Case, model: Any, settings: dict[str, Any], callbacks: list[TrainerCallback]
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
        callbacks=callbacks,
        reward_funcs=lambda completions, **_: [float(len(text) % 7) for text in completions],
        processing_class=tokenizer,
    )
