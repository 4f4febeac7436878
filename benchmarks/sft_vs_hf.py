"""One SFT step of this trainer against the Hugging Face Trainer on a CPU: peak bytes alive and time.

`python benchmarks/sft_vs_hf.py [--json]`. Same model, LoRA adapters, ragged examples, learning rate and
sequences a step; the loss is on completions. The HF Trainer is as it comes: batches padded to their
longest, full logits, cross-entropy on them in fp32; both checkpoint every layer and run the same
sequences per micro-batch. Peak = most bytes alive by storage from the first step on, weights included;
"outside the head" leaves out the moments inside our head (the Trainer's logits have no such place).
Time = CPU seconds of this process from one step's beginning to the next. `peak_ratio` and
`step_time_ratio` are ours / HF's; losses and gradient norms of the first step must agree (checked).
"""

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.side_by_side import (
    LR,
    SCHEMA_VERSION,
    Meter,
    add_options,
    check,
    compare,
    completion_text,
    head_phase,
    prompts,
    scratch,
    show,
    small_llama,
)
from trainer import sft
from trainer.config import parse_run
from trainer.logprob_head import _FrozenHead
from trainer.run import quiet
from trainer.small_model import small_tokenizer

IGNORED = -100


class Pair:
    """The two runs of one benchmark over the files in `folder`."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.model = small_llama(options, folder)
        self.num_steps = options.steps + 2
        self.adapters: dict[str, torch.Tensor] = {}
        texts = prompts(self.num_steps * options.batch, options)
        # the longest completion once a batch, not at the longest prompt
        self.examples = [
            {
                "prompt": text,
                "completion": completion_text(text, (index + 1) % options.batch, options),
            }
            for index, text in enumerate(texts)
        ]
        lines = [json.dumps(example) for example in self.examples]
        (folder / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")

    def ours(self, meter: Meter) -> None:
        """Run this trainer, whole: `trainer.sft.train_sft`."""
        options = self.options
        document = {
            "model": str(self.model),
            "recipe": {
                "task": "sft",
                "method": "lora",
                "dtype": options.dtype,
                "lora": {"rank": options.rank},
                "micro_batch_size": options.micro_batch,
                "gradient_accumulation": options.batch // options.micro_batch,
                "context": options.prompt_tokens + options.completion_tokens,
            },
            "train": {
                "output": "out",
                "overwrite": True,
                "dataset": {"name": "data.jsonl", "shuffle": False},
                "steps": self.num_steps,
                "lr": LR,
                "preflight": False,
                "save_every": 0,
            },
        }
        run, train = parse_run(document, root=self.folder)
        next_batch = sft.next_batch

        def begin(*args: Any, ready: Any, **named: Any) -> Any:
            if not meter.starts:
                self.adapters = {
                    name: tensor.detach().clone() for name, tensor in ready.policy.trainable()
                }  # both start from these
            meter.step(ready.policy.model)
            return next_batch(*args, ready=ready, **named)

        with mock.patch.object(sft, "next_batch", begin), head_phase(meter, _FrozenHead):
            result = sft.train_sft(run, train, root=self.folder)
        first = result.metrics[0]
        meter.facts = {"loss": first["loss"], "grad_norm": first["grad_norm"]}

    def hf(self, meter: Meter) -> None:
        """Run the HF Trainer, whole."""
        from datasets import Dataset
        from transformers import DataCollatorForSeq2Seq, Trainer, TrainerCallback

        model = self._peft_model()
        tokenizer = small_tokenizer()

        class Steps(TrainerCallback):
            """Notes where steps begin."""

            def on_step_begin(self, *_args: Any, **_named: Any) -> None:
                meter.step(model)

        trainer = Trainer(
            model=model,
            args=self._hf_arguments(),
            train_dataset=Dataset.from_list(
                [_tokenized(example, tokenizer) for example in self.examples]
            ),
            data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED),
            callbacks=[Steps()],
        )
        in_order = torch.utils.data.SequentialSampler(trainer.train_dataset)
        with (
            mock.patch.object(Trainer, "_get_train_sampler", return_value=in_order),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            trainer.train()
        first = trainer.state.log_history[0]
        meter.facts = {"loss": first["loss"], "grad_norm": first["grad_norm"]}

    def _peft_model(self) -> Any:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        rank = self.options.rank
        dtype = torch.float32 if self.options.dtype == "fp32" else torch.bfloat16
        base = AutoModelForCausalLM.from_pretrained(self.model, dtype=dtype)
        base.config.use_cache = False
        config = LoraConfig(
            task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear"
        )
        model = get_peft_model(base, config)
        model.load_state_dict(self.adapters, strict=False)
        model.enable_input_require_grads()
        return model

    def _hf_arguments(self) -> Any:
        from transformers import TrainingArguments

        options = self.options
        return TrainingArguments(
            output_dir=str(self.folder / "hf"),
            per_device_train_batch_size=options.micro_batch,
            gradient_accumulation_steps=options.batch // options.micro_batch,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            max_steps=self.num_steps,
            learning_rate=LR,
            lr_scheduler_type="constant",
            adam_beta2=0.99,
            use_cpu=True,
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
        )


def _tokenized(example: dict[str, str], tokenizer: Any) -> dict[str, list[int]]:
    prompt = tokenizer(example["prompt"])["input_ids"]
    completion = [*tokenizer(example["completion"])["input_ids"], tokenizer.eos_token_id]
    return {
        "input_ids": prompt + completion,
        "attention_mask": [1] * (len(prompt) + len(completion)),
        "labels": [IGNORED] * len(prompt) + completion,
    }


def report(options: argparse.Namespace) -> dict[str, Any]:
    """Return the whole document."""
    import transformers

    quiet()
    with scratch() as folder:
        pair = Pair(options, folder)
        found = compare(pair.ours, pair.hf, rounds=options.rounds, name="hf")
    if options.dtype == "fp32":
        check(found["rows"])
    settings = {key: value for key, value in vars(options).items() if key != "json"}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    threads = torch.get_num_threads()
    return {"schema_version": SCHEMA_VERSION, **found, **settings, **versions, "threads": threads}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--batch", type=int, default=8, help="sequences of one step")
    options = parser.parse_args(arguments)
    if options.batch % options.micro_batch:
        parser.error(f"--micro-batch {options.micro_batch} does not divide --batch {options.batch}")
    what = (
        f"SFT, LoRA r{options.rank}, {options.batch} sequences a step of at most "
        f"{options.prompt_tokens} + {options.completion_tokens} tokens, V={options.vocab}"
    )
    show(report(options), options, what=what)


if __name__ == "__main__":
    main()
