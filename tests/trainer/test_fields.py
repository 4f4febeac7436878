"""Every field of a run file is honoured or refused by name: all of them are walked.

FIELDS has a case for each; a field without one fails. A case changes the field in a run that trains, and
either a refusal names it, or what was built or done is another: losses, the policy, the optimizer, the
batches, the engine, what is said, what is written. The recipe itself and the plan don't count.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import BaseModel

from planner.errors import VramwiseError
from planner.run.recipe import MachineSection, Recipe
from trainer.config import RewardSection, TrainSection

REWARD = {"name": "format", "options": {"pattern": "[0-9a-mA-M].*"}}
NOISY = ("seconds", "per_second", "bytes", "memory", "allocated", "reserved", "planned", "resident")


@dataclass(frozen=True)
class Case:
    """A field's other value, and the run it is changed in."""

    value: Any
    task: str = "sft"
    refused: bool = False
    base: dict[str, Any] = field(default_factory=dict)
    """More settings of both runs, by dotted name; ... takes one out."""
    without: tuple[str, ...] = ()
    """Fields that the changed run does not have."""


def no(value, task="sft", **base):
    return Case(
        value, task, refused=True, base={name.replace("__", "."): v for name, v in base.items()}
    )


OWN_REWARD = {"train.rewards": [{"name": "own.py:own"}]}
COSINE = {"train.steps": 2, "train.schedule": "cosine"}
WSD = {"train.steps": 3, "train.schedule": "wsd"}
HALVES = {"recipe.context": ..., "recipe.prompt_length": 7, "recipe.completion_length": 3}
HELD = {"train.validation": "held.jsonl", "train.steps": 3, "train.eval_every": 1}
SUMS = {"name": "arithmetic", "options": {"digits": 1, "size": 4, "seed": 1}}
SAMPLED = {"train.validation": SUMS}
FIELDS: dict[str, Case] = {
    "recipe.task": no("dpo"),
    "recipe.algorithm": no("orpo"),
    "recipe.method": Case("full"),
    "recipe.framework": Case("trl"),
    "recipe.lora.rank": Case(8),
    "recipe.lora.targets": Case("attention"),
    "recipe.lora.target_parameters": no(["mlp.experts.down_proj"]),
    "recipe.lora.dtype": Case("bf16"),
    "recipe.lora.dora": Case(True),
    "recipe.lora.from": no("./nowhere"),
    "recipe.lora.use_rslora": Case(True),
    "recipe.lora.init": Case("pissa"),
    "recipe.lora.bias": no("all"),
    "recipe.lora.modules_to_save": Case(["norm"]),
    "recipe.lora.dropout": Case(0.5, base={"train.lr": 0.05}),
    "recipe.engine.kind": no("vllm-push"),
    "recipe.engine.kv_dtype": no("fp8", "grpo"),
    "recipe.engine.kv_bytes": no(2**20, "grpo"),
    "recipe.engine.gpu_memory_utilization": no(0.5, "grpo"),
    "recipe.engine.max_num_seqs": Case(2, "grpo"),
    "recipe.engine.max_num_batched_tokens": Case(8, "grpo"),
    "recipe.engine.block_size": no(32, "grpo"),
    "recipe.engine.sleep_level": no(1, "grpo"),
    "recipe.engine.cuda_graphs": no(True, "grpo"),
    "recipe.engine.cpu_offload_gib": no(1.0, "grpo"),
    "recipe.engine.sync": no("model", "grpo"),
    "recipe.engine.data_parallel": no(2, "grpo"),
    "recipe.engine.tensor_parallel": no(2, "grpo"),
    "recipe.engine.pipeline_parallel": no(2, "grpo"),
    "recipe.engine.expert_parallel": no(True, "grpo"),
    "recipe.engine.offline": no(True, "grpo"),
    "recipe.engine.max_loras": no(2, "grpo"),
    "recipe.engine.max_lora_rank": no(64, "grpo"),
    "recipe.engine.prefix_caching": no(False, "grpo"),
    "recipe.engine.url": no("http://127.0.0.1:9", "grpo"),
    "recipe.engine.timeout_s": no(5, "grpo"),
    "recipe.engine.transfer": no("nccl", "grpo"),
    "recipe.experts_implementation": no("eager"),
    "recipe.expert_capacity_factor": no(1.25),
    "recipe.offload.parameters": no(True),
    "recipe.offload.device": no("nvme"),
    "recipe.offload.pinned": no(True),
    "recipe.dtype": Case("bf16"),
    "recipe.mixed_precision": no("bf16"),
    "recipe.quantization": no("int8"),
    "recipe.double_quant": Case(False, base={"recipe.method": "qlora"}),
    "recipe.master_weights": Case(False, base={"recipe.dtype": "bf16"}),
    "recipe.gradient_dtype": no("bf16"),
    "recipe.optimizer": Case("lion"),
    "recipe.optimizer_offload": Case(True),
    "recipe.optimizer_in_backward": no(True),
    "recipe.micro_batch_size": Case(2),
    "recipe.gradient_accumulation": Case(2),
    "recipe.prompt_length": Case(5, base=HALVES),
    "recipe.completion_length": Case(2, base=HALVES),
    "recipe.context": Case(9),
    "recipe.num_generations": Case(2, "grpo"),
    "recipe.packing": Case(True),
    "recipe.checkpointing": Case("none"),
    "recipe.checkpoint_every": Case(2, base={"recipe.checkpointing": "every-k"}),
    "recipe.offload_keep_layers": Case(2),
    "recipe.attention": Case("eager"),
    "recipe.loss": no("full"),
    "recipe.loss_chunk_rows": Case(7),
    "recipe.entropy": no(True),
    "recipe.tiled_mlp": Case(False),
    "recipe.neftune": no(True),
    "recipe.router_loss": no(True),
    "recipe.beta": Case(0.1, "grpo"),
    "recipe.reference": no("separate", "grpo", recipe__beta=0.1),
    "recipe.sharding": no("fsdp"),
    "recipe.bucket_views": no(True),
    "recipe.loads": no("rank0"),
    "recipe.buckets.reduce": no(10**8),
    "recipe.buckets.allgather": no(10**8),
    "recipe.buckets.prefetch": no(10**8),
    "recipe.buckets.live": no(10**8),
    "recipe.buckets.reuse": no(10**8),
    "recipe.buckets.persistence": no(10**5),
    "recipe.buckets.sub_group": no(10**8),
    "recipe.buckets.overlap": no(True),
    "recipe.buckets.contiguous": no(False),
    "recipe.buckets.dtype": no("fp32"),
    "recipe.parallel.data_shard": no(2),
    "recipe.parallel.data_replicate": no(2),
    "recipe.parallel.tensor": no(2),
    "recipe.parallel.sequence": no(True),
    "recipe.parallel.pipeline": no(2),
    "recipe.parallel.schedule": no("1f1b"),
    "recipe.parallel.virtual_stages": no(2),
    "recipe.parallel.context": no(2),
    "recipe.parallel.context_kind": no("ulysses"),
    "recipe.parallel.expert": no(2),
    "recipe.parallel.expert_tensor": no(2),
    "recipe.reshard_after_forward": no(True),
    "recipe.reduce_dtype": no("fp32"),
    "recipe.accumulate_sync": no(True),
    "recipe.compile": no(True),
    "recipe.compile_loss": no(True),
    "recipe.float8": no("tensorwise"),
    "recipe.float8_all_gather": no(True),
    "recipe.images": no(1),
    "recipe.evaluation.samples": no(8),
    "recipe.evaluation.batch_size": no(2),
    "recipe.evaluation.logits": no(True),
    "recipe.evaluation.accumulation_steps": no(2),
    "recipe.save": no("whole"),
    "recipe.resume": no(True),
    "recipe.teacher": no("llama-3.2-1b"),
    "recipe.teacher_placement": no("served"),
    "recipe.teacher_top_k": no(5),
    "recipe.value_model": no("llama-3.2-1b"),
    "recipe.reward_model": no("llama-3.2-1b"),
    "recipe.negatives": no(2),
    "recipe.mini_batch": no(2),
    "recipe.image_size": no("64x64"),
    "recipe.image_tokens": no(16),
    "recipe.videos": no(1),
    "recipe.video_frames": no(2),
    "recipe.audio": no(1),
    "recipe.audio_seconds": no(2.0),
    "machine.gpu": Case("rtx-4090"),
    "machine.gpus": no(4),
    "machine.nodes": no(2),
    "machine.vram": Case("24GiB"),
    "machine.host_ram": no("1KiB", recipe__optimizer_offload=True),
    "train.output": Case("other"),
    "train.overwrite": Case(True),
    "train.dataset.name": Case("other.jsonl"),
    "train.dataset.split": no("test"),
    "train.dataset.config": no("main"),
    "train.dataset.prompt_column": Case("other"),
    "train.dataset.completion_column": Case("other"),
    "train.dataset.messages_column": Case("talk"),
    "train.dataset.text_column": Case("other", base={"train.dataset.prompt_column": "absent"}),
    "train.dataset.tools_column": no("talk", train__dataset__chat=True),
    "train.dataset.chat_template_kwargs": no({"enable_thinking": False}),
    "train.dataset.chat": Case(True),
    "train.dataset.system_prompt": Case("be brief", base={"recipe.context": 64}),
    "train.dataset.limit": Case(3),
    "train.dataset.shuffle": Case(False),
    "train.dataset.options": no({"digits": 2}),
    "train.validation": Case("held.jsonl"),
    "train.eval_every": Case(2, base=HELD),
    "train.evaluation.generations": Case(2, "grpo", base=SAMPLED),
    "train.evaluation.k": Case([2], "grpo", base=SAMPLED | {"train.evaluation.generations": 2}),
    "train.evaluation.pass_reward": no("exakt", "grpo", train__validation=SUMS),
    "train.evaluation.pass_at": Case(-1.0, "grpo", base=SAMPLED),
    "train.evaluation.sampling": Case(
        {"top_k": 1}, "grpo", base=SAMPLED | {"train.evaluation.generations": 4}
    ),
    "train.evaluation.on_start": Case(True, base=HELD),
    "train.evaluation.metric": no("accuracy", train__validation="held.jsonl"),
    "train.evaluation.save_best": Case(True, base=HELD),
    "train.evaluation.patience": Case(1, base=HELD | {"train.evaluation.min_delta": 9.0}),
    "train.evaluation.min_delta": Case(9.0, base=HELD),
    "train.rewards": no([REWARD]),
    "train.rewards.name": Case("exact", "grpo"),
    "train.rewards.weight": Case(2.0, "grpo"),
    "train.rewards.options": Case({"pattern": "[a-z].*"}, "grpo"),
    "train.rewards.per_sample": Case(True, "grpo", base=OWN_REWARD),
    "train.rewards.timeout_s": Case(7.0, "grpo", base=OWN_REWARD),
    "train.steps": Case(2),
    "train.epochs": Case(2, without=("train.steps",)),
    "train.lr": Case(0.1),
    "train.lora_alpha": Case(1.0),
    "train.warmup_steps": Case(2, base={"train.steps": 3}),
    "train.warmup_ratio": Case(0.5, base={"train.steps": 3}),
    "train.schedule": Case("cosine", base={"train.steps": 2}),
    "train.min_lr": Case(1e-6, base=COSINE),
    "train.min_lr_ratio": Case(0.5, base=COSINE),
    "train.decay_steps": Case(2, base=WSD),
    "train.decay_ratio": Case(0.9, base=WSD),
    "train.decay_type": Case("1-sqrt", base=WSD | {"train.decay_steps": 2}),
    "train.weight_decay": Case(0.5),
    "train.adam_betas": Case([0.5, 0.6]),
    "train.adam_eps": Case(0.1),
    "train.max_grad_norm": Case(0.01, base={"recipe.optimizer": "sgd", "train.lr": 1.0}),
    "train.seed": Case(1),
    "train.prompts_per_step": Case(2),
    "train.updates_per_rollout": Case(2, "grpo"),
    "train.num_iterations": Case(2, "grpo"),
    "train.sampling.temperature": Case(0.5, "grpo"),
    "train.sampling.top_p": Case(0.5, "grpo"),
    "train.sampling.top_k": Case(3, "grpo"),
    "train.sampling.stop": Case(list("0123456789 aeiou"), "grpo"),
    "train.sampling.min_p": Case(0.5, "grpo"),
    "train.sampling.repetition_penalty": Case(2.0, "grpo"),
    "train.sampling.presence_penalty": Case(2.0, "grpo"),
    "train.sampling.frequency_penalty": Case(2.0, "grpo"),
    "train.sampling.guided_regex": no("[0-9]", "grpo"),
    "train.sampling.guided_json": no({"type": "object"}, "grpo"),
    "train.loss.type": Case("grpo", "grpo"),
    "train.loss.epsilon": Case(0.01, "grpo"),
    "train.loss.epsilon_high": Case(0.5, "grpo"),
    "train.loss.delta": Case(3.0, "grpo"),
    "train.loss.scale_rewards": Case("none", "grpo"),
    "train.loss.mask_truncated": Case(True, "grpo"),
    "train.loss.is_correction": no("sequence", "grpo"),
    "train.loss.is_mode": no("mask", "grpo"),
    "train.loss.is_cap": no(2.0, "grpo"),
    "train.loss.kl": Case("forward", "grpo", base={"recipe.beta": 0.5}),
    "train.loss.detach": Case(False, "grpo"),
    "train.loss_on": Case("all"),
    "train.padding_free": Case(True),
    "train.neftune_alpha": Case(5.0),
    "train.router_aux_loss_coef": no(0.1),
    "train.share_prefix": Case(False, "grpo"),
    "train.micro_batch_tokens": Case(64),
    "train.save_every": Case(1, base={"train.steps": 3}),
    "train.keep_checkpoints": Case(1, base={"train.steps": 3, "train.save_every": 1}),
    "train.max_bad_steps": Case(1, base={"train.lr": 1e30, "train.steps": 4}),
    "train.push_to_hub": Case("me/sums"),
    "train.callbacks": Case(["stop.py:Stop"], base={"train.steps": 3}),
    "train.report_to": Case("tensorboard"),
    "train.project": no("sums"),
    "train.run_name": no("first"),
    "train.tensorboard": Case(True),
    "train.print_completions": Case(1),
    "train.preflight": Case(True),
    "train.device_memory": no("1KiB"),
}


def leaves(section, prefix):
    """Yield the dotted name of every field of a section that is none itself; a list of sections too."""
    for name, info in section.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from leaves(inner, f"{prefix}.{name}")
        else:
            yield f"{prefix}.{info.alias or name}"


def every_field():
    return [
        *leaves(Recipe, "recipe"),
        *leaves(MachineSection, "machine"),
        *leaves(TrainSection, "train"),
        *leaves(RewardSection, "train.rewards"),
    ]


def test_every_field_has_a_case():
    """A new field needs one: what it does, or that it is refused."""
    assert set(every_field()) - set(FIELDS) == set(), "fields without a case"
    assert set(FIELDS) - set(every_field()) == set(), "cases without a field"


def put(made, name, value):
    *path, last = name.split(".")
    if name == "train.rewards":
        made["train"]["rewards"] = value
        return
    if path[:2] == ["train", "rewards"]:
        made["train"]["rewards"] = [made["train"]["rewards"][0] | {last: value}]
        if name.endswith("name"):
            made["train"]["rewards"][0].pop("options", None)
        return
    for part in path:
        made = made.setdefault(part, {})
    if value is ...:
        made.pop(last, None)
    else:
        made[last] = value


@pytest.fixture
def run_of(document, tmp_path):
    """Return a function that makes a case's run document, without and with its change."""

    def make(name, case, *, changed):
        recipe = {"task": case.task, "context": 24, "micro_batch_size": 4, "lora": {"rank": 4}}
        if case.task == "grpo":
            recipe |= {"context": 46, "completion_length": 6, "prompt_length": 40}
        made = document(recipe=recipe, train={"steps": 1, "save_every": 0})
        if case.task == "sft":
            for key in ("num_generations", "prompt_length", "completion_length"):
                del made["recipe"][key]
            made["train"]["dataset"] = {"name": "rows.jsonl"}
            made["train"]["rewards"] = []
        else:
            made["train"]["rewards"] = [REWARD]
        for key, value in case.base.items():
            put(made, key, value)
        if changed:
            put(made, name, case.value)
            for key in case.without:
                put(made, key, ...)
        return made

    row = {"none": "", "tools": None, "text": "5+5", "other": "7+7=14", "talk": None}
    rows = [row | {"prompt": f"{n}+{n}=", "completion": f"{2 * n:>4}"} for n in range(9)]
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    lines = [
        json.dumps({k: v for k, v in r.items() if v is not None} | {"talk": talk}) for r in rows
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "other.jsonl").write_text("\n".join(lines[3:]), encoding="utf-8")
    held = json.dumps({"prompt": "11+11=", "completion": "22"})
    (tmp_path / "held.jsonl").write_text(held, encoding="utf-8")
    (tmp_path / "own.py").write_text(
        "def own(completions, **columns):\n    return [float(len(completions))] * len(completions)\n",
        encoding="utf-8",
    )
    (tmp_path / "stop.py").write_text(
        "class Stop:\n    def on_step_end(self, run, step, metrics):\n        run.stop()\n",
        encoding="utf-8",
    )
    return make


def built(ready, said):
    """Return what a prepared run is made of."""
    from trainer.policy_update import loss_settings
    from trainer.stepping import learning_rate

    policy, optimizer = ready.policy, ready.stepper.optimizer
    adapters = getattr(policy.model, "peft_config", {})
    return {
        "policy": (policy.dtype, policy.base.config._attn_implementation, str(adapters)),
        "trained": [(name, p.dtype, p.shape) for name, p in policy.trainable()],
        "quantised": str(getattr(policy.base.config, "quantization_config", "")),
        "optimizer": (type(optimizer).__name__, str(getattr(optimizer, "settings", ""))),
        "tiles": ["forward" in layer.mlp.__dict__ for layer in policy.base.model.layers],
        "batches": (ready.layout, ready.shape, ready.prompts_per_step, ready.stepper.budget.tokens),
        "lengths": (ready.prompt_tokens, ready.completion_tokens, ready.num_generations),
        "engine": [getattr(ready.engine, name, None) for name in ("_wave", "_prefill_tokens")],
        "loss": loss_settings(ready.train, beta=ready.recipe.beta or 0.0, limit=8),
        "rates": [learning_rate(step, ready.train) for step in range(3)],
        "steps": (ready.train.steps, ready.sharing is None),
        "limits": (ready.train.max_bad_steps, ready.train.max_grad_norm),
        "said": [line for line in said if "planned" not in line or "machine" in line],
        "measured": ready.measured is not None,
    }


@pytest.fixture
def observe(monkeypatch, tmp_path):
    """Return a function that runs a document and returns everything that it did."""
    import trainer.grpo
    import trainer.preflight
    import trainer.scoring
    import trainer.sft
    from trainer.config import parse_run
    from trainer.run import train_parsed

    seen: dict[str, Any] = {}
    prepare, layers, head = (
        trainer.preflight.prepare, trainer.preflight.checkpoint_layers, trainer.scoring.logprob_head,
    )  # fmt: skip

    def noting_prepare(*args, **named):
        seen["ready"] = prepare(*args, **named)
        return seen["ready"]

    def noting_layers(*args, **named):
        made = layers(*args, **named)
        seen["layers"] = (len(made.layers), made._every, made.store is None, named["keep_last"])
        return made

    def noting_head(*args, **named):
        seen["chunks"] = named.get("chunk_rows")
        return head(*args, **named)

    for module in (trainer.sft, trainer.grpo):
        monkeypatch.setattr(module, "prepare", noting_prepare)
    monkeypatch.setattr(trainer.preflight, "checkpoint_layers", noting_layers)
    monkeypatch.setattr(trainer.scoring, "logprob_head", noting_head)
    load = trainer.grpo.load_rewards

    def noting_rewards(*args, **named):
        made = load(*args, **named)
        seen["rewards"] = [(reward.per_sample, reward.limit_s) for reward in made]
        return made

    monkeypatch.setattr(trainer.grpo, "load_rewards", noting_rewards)

    def run(made):
        seen.clear()
        said: list[str] = []
        run_file, train = parse_run(made, root=tmp_path)
        failed = ""
        try:
            result = train_parsed(run_file, train, root=tmp_path, say=said.append)
            metrics = [*result.metrics, *result.evaluations]
        except VramwiseError as error:
            if "ready" not in seen:
                raise
            failed, metrics = error.message, []
        files = sorted(
            str(path.relative_to(train.output)).split("events.out")[0]
            for path in __import__("pathlib").Path(train.output).rglob("*")
        )
        told = [
            {name: value for name, value in step.items() if not any(w in name for w in NOISY)}
            for step in metrics
        ]
        ready = seen.pop("ready")
        return built(ready, said) | seen | {
            "metrics": json.dumps(told), "files": files, "failed": failed, "where": train.output
        }  # fmt: skip

    return run


def named(message, name):
    """Whether a refusal names the field: by its last part at least, and the value or what is allowed."""
    last = name.rsplit(".", 1)[-1]
    return last in message or last.replace("_", " ") in message.lower()


@pytest.mark.parametrize("name", FIELDS)
def test_a_changed_field_has_an_effect_or_is_refused_by_name(name, run_of, observe, tmp_path):
    import shutil

    case = FIELDS[name]
    if case.refused:
        with pytest.raises(VramwiseError) as caught:
            observe(run_of(name, case, changed=True))
        text = f"{caught.value.message} ({caught.value.hint})"
        assert named(text, name), text
        assert caught.value.hint, "what is allowed"
        assert "nothing: " not in caught.value.hint, "a sentence that can be followed"
        return
    before = observe(run_of(name, case, changed=False))
    if name != "train.overwrite":
        shutil.rmtree(tmp_path / "out")
        after = observe(run_of(name, case, changed=True))
        for key in ("where",) if name != "train.output" else ():
            before.pop(key), after.pop(key)
        assert before != after, f"{name}: {case.value} changes nothing"
        return
    with pytest.raises(VramwiseError) as caught:
        observe(run_of(name, case, changed=False))
    assert "overwrite: true" in caught.value.hint
    observe(run_of(name, case, changed=True))
