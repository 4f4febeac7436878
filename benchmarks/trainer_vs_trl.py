"""One GRPO step of this trainer against TRL's GRPOTrainer on a CPU: peak bytes alive and time.

`python benchmarks/trainer_vs_trl.py [--json]`. Same model, adapters, prompts, completions (fixed, ragged,
given to both instead of sampling: generation is in neither), rewards, learning rate, micro-batch of so
many sequences; both checkpoint every layer and are otherwise as they come. Peak = most bytes alive by
storage from the first step on, weights included; "outside the head" leaves out the moments inside the
log-prob head, where TRL's torch path on a CPU makes more temporaries than its Triton kernel on a GPU.
Time = CPU seconds of this process from one rollout to the next. `peak_ratio` and `step_time_ratio` are
ours / TRL's; losses and gradient norms of the first step must agree (checked).
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
    completion_ids,
    head_phase,
    prompts,
    reward,
    scratch,
    show,
    small_llama,
)
from trainer.config import parse_run
from trainer.engines.protocol import Completion, SamplingSettings
from trainer.grpo import train_grpo
from trainer.logprob_head import _FrozenHead
from trainer.run import quiet

REWARD_FILE = "reward.py"
REWARD_CODE = (
    "from benchmarks.side_by_side import reward\n"
    "def fixed(prompts, completions, completion_ids, **columns):\n"
    "    return [reward(ids) for ids in completion_ids]\n"
)


class FixedEngine:
    """Gives the benchmark's completions instead of sampling; see trainer.engines.protocol.Engine."""

    name = "transformers"  # the policy's own samples: no correction

    def __init__(self, policy: Any, meter: Meter, options: argparse.Namespace) -> None:
        self._policy, self._meter, self._options = policy, meter, options

    def generate(
        self, prompts: Sequence[Sequence[int]], settings: SamplingSettings
    ) -> list[Completion]:
        """Return the fixed completions; a step begins here."""
        self._meter.step(self._policy.model)
        found = []
        for index, ids in enumerate(prompts):
            text = self._policy.tokenizer.decode(list(ids))
            for number in range(settings.num_generations):
                tokens = tuple(completion_ids(text, number, self._options))
                found.append(
                    Completion(prompt_index=index, token_ids=tokens, logprobs=None, finished=True)
                )
        return found

    def update_weights(self) -> None:
        """Do nothing."""

    release = resume = close = update_weights

    def memory(self) -> dict[str, int]:
        """Return nothing."""
        return {}


class Pair:
    """The two runs of one benchmark over the files in `folder`."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.model = small_llama(options, folder)
        self.num_steps = options.steps + 2
        self.texts = prompts(self.num_steps * options.prompts_per_step, options)
        self.adapters: dict[str, torch.Tensor] = {}
        lines = [json.dumps({"prompt": text}) for text in self.texts]
        (folder / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")
        (folder / REWARD_FILE).write_text(REWARD_CODE, encoding="utf-8")

    def ours(self, meter: Meter) -> None:
        """Run this trainer, whole: `trainer.grpo.train_grpo`."""
        options = self.options
        document = {
            "model": str(self.model),
            "recipe": {
                "task": "grpo",
                "method": "lora",
                "dtype": options.dtype,
                "lora": {"rank": options.rank},
                "num_generations": options.generations,
                "micro_batch_size": options.micro_batch,
                "prompt_length": options.prompt_tokens,
                "completion_length": options.completion_tokens,
            },
            "train": {
                "output": "out",
                "overwrite": True,
                "dataset": {"name": "data.jsonl", "shuffle": False},
                "rewards": [f"{REWARD_FILE}:fixed"],
                "steps": self.num_steps,
                "prompts_per_step": options.prompts_per_step,
                "lr": LR,
                "preflight": False,
                "print_completions": 0,
                "save_every": 0,
            },
        }

        def engine(policy: Any, **_: Any) -> FixedEngine:
            self.adapters = {
                name: tensor.detach().clone() for name, tensor in policy.trainable()
            }  # both start from these
            return FixedEngine(policy, meter, options)

        run, train = parse_run(document, root=self.folder)
        with mock.patch("trainer.preflight.make_engine", engine), head_phase(meter, _FrozenHead):
            result = train_grpo(run, train, root=self.folder)
        first = result.metrics[0]
        meter.facts = {"loss": first["loss"], "grad_norm": first["grad_norm"]}

    def trl(self, meter: Meter) -> None:
        """Run TRL's trainer, whole."""
        from datasets import Dataset
        from peft import LoraConfig
        from trl import GRPOTrainer
        from trl.kernels import ChunkedLogProbFunction

        options = self.options
        trainer = GRPOTrainer(
            model=str(self.model),
            args=self._trl_arguments(),
            train_dataset=Dataset.from_dict({"prompt": self.texts}),
            reward_funcs=_trl_reward,
            rollout_func=self._rollout(meter),
            peft_config=LoraConfig(
                task_type="CAUSAL_LM",
                r=options.rank,
                lora_alpha=2 * options.rank,
                target_modules="all-linear",
            ),
        )
        trainer.model.load_state_dict(self.adapters, strict=False)
        with (
            head_phase(meter, ChunkedLogProbFunction),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            trainer.train()
        first = trainer.state.log_history[0]
        meter.facts = {"loss": first["loss"], "grad_norm": first["grad_norm"]}

    def _trl_arguments(self) -> Any:
        from trl import GRPOConfig

        options = self.options
        rows = options.prompts_per_step * options.generations
        return GRPOConfig(
            output_dir=str(self.folder / "trl"),
            per_device_train_batch_size=options.micro_batch,
            gradient_accumulation_steps=rows // options.micro_batch,
            num_generations=options.generations,
            max_completion_length=options.completion_tokens,
            max_steps=self.num_steps,
            learning_rate=LR,
            lr_scheduler_type="constant",
            adam_beta2=0.99,
            bf16=False,
            model_init_kwargs={"dtype": "float32" if options.dtype == "fp32" else "bfloat16"},
            shuffle_dataset=False,
            use_cpu=True,
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
        )

    def _rollout(self, meter: Meter) -> Any:
        def rollout(texts: list[str], trainer: Any) -> dict[str, Any]:
            meter.step(trainer.model)
            numbers = [index % self.options.generations for index in range(len(texts))]
            ids = [
                completion_ids(text, number, self.options)
                for text, number in zip(texts, numbers, strict=True)
            ]
            tokenizer = trainer.processing_class
            return {
                "prompt_ids": tokenizer(text=texts)["input_ids"],
                "completion_ids": ids,
                "logprobs": None,
            }

        return rollout


def _trl_reward(completion_ids: Sequence[Sequence[int]], **_columns: Any) -> list[float]:
    return [reward(ids) for ids in completion_ids]


def report(options: argparse.Namespace) -> dict[str, Any]:
    """Return the whole document."""
    import trl

    quiet()
    with scratch() as folder:
        pair = Pair(options, folder)
        found = compare(pair.ours, pair.trl, rounds=options.rounds, name="trl")
    if options.dtype == "fp32":
        check(found["rows"])
    settings = {key: value for key, value in vars(options).items() if key != "json"}
    versions = {"torch": torch.__version__, "trl": trl.__version__}
    threads = torch.get_num_threads()
    return {"schema_version": SCHEMA_VERSION, **found, **settings, **versions, "threads": threads}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompts-per-step", type=int, default=1)
    options = parser.parse_args(arguments)
    rows = options.prompts_per_step * options.generations
    if rows % options.micro_batch:
        parser.error(f"--micro-batch {options.micro_batch} does not divide {rows} completions")
    what = (
        f"GRPO, LoRA r{options.rank}, {rows} completions a step of at most "
        f"{options.prompt_tokens} + {options.completion_tokens} tokens, V={options.vocab}"
    )
    show(report(options), options, what=what)


if __name__ == "__main__":
    main()
