"""What decides memory and must not be dropped: sections inline or by file, second models, limits, names."""

import json
from pathlib import Path

import pytest

from planner.importers import import_config, launch_document
from planner.importers.fsdp_config import from_fsdp_config
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.plan import plan
from planner.report import text as plan_text
from planner.run.recipe import Checkpointing, EngineKind, Recipe, Sharding, Task

LF = "model_name_or_path: Qwen/Qwen3-4B\nfinetuning_type: {0}\nstage: {1}\ncutoff_len: 512\n"
AX = "base_model: Qwen/Qwen3-4B\nmicro_batch_size: 1\n"
ZERO3 = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    }
}


@pytest.mark.parametrize(
    "config",
    [
        AX + f"deepspeed: {json.dumps(ZERO3)}\n",
        LF.format("full", "sft") + f"deepspeed: {json.dumps(ZERO3)}\n",
        f"model_name_or_path: Qwen/Qwen3-4B\ndo_sample: 1\nmax_length: 64\ndeepspeed: {json.dumps(ZERO3)}\n",
        f"swift sft --model Qwen/Qwen3-4B --tuner_type full --deepspeed '{json.dumps(ZERO3)}'\n",
    ],
)
def test_a_deepspeed_mapping_inline(config: str) -> None:
    recipe = import_config(config).run.recipe
    assert (recipe.sharding, recipe.optimizer_offload, recipe.offload.parameters) == (
        Sharding.ZERO3,
        True,
        True,
    )


@pytest.mark.parametrize(
    ("section", "sharding", "offload", "full"),
    [
        ({"activation_checkpointing": True, "reshard_after_forward": True}, Sharding.FSDP, False, True),
        ({"fsdp_version": 2, "fsdp_activation_checkpointing": True}, Sharding.FSDP2, False, True),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, Sharding.FSDP2, False, False),
        ({"sharding_strategy": "NO_SHARD"}, Sharding.DDP, False, False),
        ({"version": 2, "reshard_after_forward": False}, Sharding.FSDP2, False, False),
        ({"fsdp_offload_params": True, "fsdp_version": 2}, Sharding.FSDP, True, False),
    ],
)  # fmt: skip
def test_fsdp_options(
    section: dict[str, object], sharding: Sharding, offload: bool, full: bool
) -> None:
    found = from_fsdp_config(section)
    assert (found.sharding, found.parameter_offload, found.checkpointing) == (
        sharding,
        offload,
        full,
    )


def test_axolotls_fsdp_section_is_read_whole() -> None:
    recipe = import_config(
        AX
        + "fsdp_version: 2\nfsdp_config:\n  activation_checkpointing: true\n  offload_params: true\ndp_shard_size: 2\n"
    ).run.recipe
    assert (recipe.checkpointing, recipe.offload.parameters) == (Checkpointing.FULL, True)


@pytest.mark.parametrize("words", ["full_shard auto_wrap offload", "[full_shard, offload]"])
def test_training_arguments_fsdp_words(words: str) -> None:
    recipe = import_config(
        f"model_name_or_path: Qwen/Qwen3-4B\nmax_length: 64\nfsdp: {words}\n"
    ).run.recipe
    assert (recipe.sharding, recipe.offload.parameters) == (Sharding.FSDP, True)


def test_an_accelerate_file_keeps_its_checkpointing(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "distributed_type: FSDP\nnum_processes: 4\nfsdp_config:\n  fsdp_activation_checkpointing: true\n",
        encoding="utf-8",
    )
    document = launch_document(path)
    assert (document["recipe"]["checkpointing"], document["machine"]["gpus"]) == ("full", 4)


def test_an_accelerate_file_that_names_a_deepspeed_one(tmp_path: Path) -> None:
    (tmp_path / "z.json").write_text(json.dumps(ZERO3), encoding="utf-8")
    accelerate = tmp_path / "a.yaml"
    accelerate.write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: conf/z.json\n",
        encoding="utf-8",
    )
    script = tmp_path / "go.sh"
    script.write_text(
        "accelerate launch --config_file a.yaml t.py --model_name_or_path Qwen/Qwen3-4B --use_peft\n",
        encoding="utf-8",
    )
    run = import_config(script).run
    assert (run.recipe.sharding, run.recipe.optimizer_offload, run.machine.gpus) == (
        Sharding.ZERO3,
        True,
        2,
    )


@pytest.mark.parametrize(
    ("config", "task", "reference"),
    [
        (LF.format("full", "rm"), Task.REWARD, None),
        (LF.format("full", "kto"), Task.KTO, "separate"),
        (LF.format("lora", "dpo") + "pref_loss: orpo\n", Task.ORPO, None),
        (LF.format("lora", "dpo") + "pref_loss: simpo\n", Task.SIMPO, None),
        (LF.format("lora", "ppo") + "reward_model: some/adapter\n", Task.PPO, "adapter-off"),
        (AX + "rl: kto\n", Task.KTO, "separate"),
        (AX + "rl: orpo\nadapter: lora\nlora_target_linear: true\n", Task.ORPO, "none"),
        (AX + "rl: simpo\n", Task.SIMPO, "none"),
        (AX + "reward_model: true\n", Task.REWARD, None),
        ("swift rlhf --rlhf_type kto --model Qwen/Qwen3-4B --tuner_type full\n", Task.KTO, "separate"),
        ("swift rlhf --rlhf_type cpo --model Qwen/Qwen3-4B\n", Task.ORPO, "none"),
        ("swift rlhf --rlhf_type rm --model Qwen/Qwen3-4B\n", Task.REWARD, "none"),
        ("swift rlhf --rlhf_type gkd --model Qwen/Qwen3-4B --teacher_model Qwen/Qwen3-32B\n", Task.DISTILL, "none"),
        ("swift sft --task_type embedding --model Qwen/Qwen3-Embedding-0.6B\n", Task.EMBED, None),
    ],
)  # fmt: skip
def test_tasks_of_their_own(config: str, task: Task, reference: str | None) -> None:
    recipe = import_config(config).run.recipe
    assert (recipe.task, recipe.algorithm) == (task, None)
    assert recipe.reference == reference
    if task is Task.DISTILL:
        assert recipe.teacher == "Qwen/Qwen3-32B"


def test_a_reward_model_with_a_value_head_returns_its_logits() -> None:
    model, machine = catalogue_model("qwen3-0.6b"), make_machine("h100-sxm")
    recipe = import_config(
        LF.format("full", "rm") + "bf16: true\nper_device_train_batch_size: 1\n"
    ).run.recipe
    terms = {term.name: term.bytes for term in plan(model, recipe, machine).phase("loss").terms}
    plain = plan(model, recipe.model_copy(update={"framework": "hf-trainer"}), machine)
    other = {term.name: term.bytes for term in plain.phase("loss").terms}
    assert terms["logits"] - other["logits"] >= 2 * 512 * model.vocab * 6 * 0.99


VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-4B actor_rollout_ref.rollout.tensor_model_parallel_size=1 {0}\n"


def test_verl_counts_the_critic() -> None:
    critic = import_config(
        VERL.format("critic.model.path=Qwen/Qwen3-8B critic.ppo_micro_batch_size_per_gpu=1")
    ).run.recipe
    assert (critic.task, critic.value_model, critic.reward_model) == (
        Task.PPO,
        "Qwen/Qwen3-8B",
        "none",
    )
    grpo = import_config(VERL.format("algorithm.adv_estimator=grpo")).run.recipe
    assert grpo.task is Task.GRPO
    judged = VERL.format("reward_model.enable=True reward_model.model.path=Qwen/Qwen3-8B")
    assert import_config(judged).run.recipe.reward_model == "Qwen/Qwen3-8B"


def test_verl_shares_a_sequence_by_ulysses_and_groups_by_fsdp_size() -> None:
    run = import_config(
        VERL.format("algorithm.adv_estimator=grpo data.max_prompt_length=1000 data.max_response_length=3000 actor_rollout_ref.actor.ulysses_sequence_parallel_size=4")
    ).run.recipe  # fmt: skip
    assert (run.prompt_length, run.completion_length) == (250, 750)
    grouped = import_config(
        VERL.format("actor_rollout_ref.actor.fsdp_config.fsdp_size=4 trainer.n_gpus_per_node=8")
    ).run.recipe
    assert (grouped.parallel.data_shard, grouped.parallel.data_replicate) == (4, 2)


def test_verls_sft_follows_its_launcher() -> None:
    text = "torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=Qwen/Qwen3-4B data.max_length=4096 data.micro_batch_size_per_gpu=2 {0}\n"
    run = import_config(text.format("")).run
    assert (run.machine.gpus, run.recipe.sharding, run.recipe.context) == (8, Sharding.FSDP, 4096)
    shared = import_config(text.format("ulysses_sequence_parallel_size=2")).run
    assert (shared.machine.gpus, shared.recipe.context) == (8, 2048)


def test_verl_with_megatron_holds_a_model_together() -> None:
    found = import_config(
        VERL.format("algorithm.adv_estimator=grpo actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2")
    )  # fmt: skip
    recipe = found.run.recipe
    assert (recipe.sharding, recipe.parallel.data_shard, recipe.parallel.data_replicate) == (
        Sharding.FSDP,
        4,
        2,
    )
    assert any("upper bound" in said for said in found.report.effects)
    assert recipe.dtype == "bf16"
    assert recipe.master_weights


def test_axolotls_context_parallelism_shares_tokens() -> None:
    found = import_config(
        AX
        + "sequence_len: 4096\ncontext_parallel_size: 4\nfsdp_config:\n  reshard_after_forward: true\n"
    )
    assert (found.run.recipe.context, found.run.machine.gpus) == (1024, 4)
    assert not found.report.not_understood


def test_vllm_mode_where_nothing_is_said() -> None:
    axolotl = import_config(
        AX + "rl: grpo\ntrl:\n  use_vllm: true\n  num_generations: 2\n"
    ).run.recipe
    assert axolotl.engine.kind is EngineKind.VLLM_SERVER
    swift = import_config("swift rlhf --rlhf_type grpo --model Qwen/Qwen3-4B --use_vllm true\n")
    assert any("no default" in said for said in swift.report.effects)


@pytest.mark.parametrize(
    "optimizer", ["galore_adamw_8bit", "apollo_adamw", "q_galore_adamw8bit", "lomo"]
)
def test_low_rank_states_are_named(optimizer: str) -> None:
    found = import_config(
        AX + f"optimizer: {optimizer}\noptim_args:\n  rank: 8\noptim_target_modules: [mlp]\n"
    )
    assert any("not modelled" in said for said in found.report.effects)
    assert "optim_args.rank" not in [row.key for row in found.report.not_understood]


@pytest.mark.parametrize("kernels", ["bnb", "hqq"])
def test_who_quantizes_llamafactorys_base(kernels: str) -> None:
    found = import_config(
        LF.format("lora", "sft") + f"quantization_bit: 4\nquantization_method: {kernels}\n"
    )
    assert found.run.recipe.quantization == "nf4"
    assert not found.report.not_understood
    said = [note for note in found.report.effects if "quantization_method" in note]
    assert bool(said) is (kernels == "hqq")


def test_embeddings_states_stay_in_32_bit() -> None:
    model, machine = catalogue_model("qwen3-0.6b"), make_machine("h100-sxm")
    for framework in ("trl", "axolotl", "llamafactory", "hf-trainer"):
        recipe = Recipe(method="full", framework=framework, optimizer="adamw-8bit", dtype="bf16")
        optimizer = next(
            t.bytes
            for t in plan(model, recipe, machine).phase("forward").terms
            if t.name == "optimizer"
        )
        assert optimizer > 2 * model.parameters + 5 * model.vocab * model.hidden


def test_images_are_planned_at_the_limit_that_is_stated() -> None:
    config = (
        LF.format("lora", "sft").replace("Qwen3-4B", "Qwen2.5-VL-3B-Instruct")
        + "freeze_vision_tower: false\n"
    )
    limited = import_config(config + "image_max_pixels: 65536\n")
    assert (limited.run.recipe.images, limited.run.recipe.image_size) == (1, "252x252")
    large = import_config(config + "image_max_pixels: 16777216\n")
    assert any("lower bound" in said for said in large.report.effects)
    none = import_config(config)
    assert none.run.recipe.images == 0
    # the text is trained by default: saying so adds nothing, freezing it is said
    for frozen in (False, True):
        named = import_config(config + f"freeze_language_model: {frozen}\n")
        assert any("freeze_language" in said for said in named.report.effects) is frozen
    model, machine = catalogue_model("qwen2.5-vl-3b"), make_machine("h100-sxm")
    assert "without images" in plan_text(plan(model, none.run.recipe, machine)).split("\n", 1)[0]
    assert (
        "with 1 image of 252 x 252"
        in plan_text(plan(model, limited.run.recipe, machine)).split("\n", 1)[0]
    )


@pytest.mark.parametrize("tail", ["", "/"])
def test_a_name_announces_its_quantization(tail: str) -> None:
    found = import_config(
        f"vllm serve /models/Qwen2.5-14B-Instruct-AWQ{tail} --max-model-len 512\n"
    )
    assert found.run.recipe.quantization == "awq-4bit"


def test_vllms_offloaded_weights_leave_the_card() -> None:
    model, machine = catalogue_model("qwen3-8b"), make_machine("rtx-4090")
    line = "vllm serve Qwen/Qwen3-8B --max-model-len 512 {0}\n"
    whole, part = (
        plan(model, import_config(line.format(flag)).run.recipe, machine)
        for flag in ("", "--cpu-offload-gb 4")
    )
    moved = whole.phase("load").total_bytes - part.phase("load").total_bytes
    assert moved == 4 * 2**30 == part.host_peak_bytes


def test_an_engines_defaults_for_the_card_are_in_the_document() -> None:
    recipe = import_config("vllm serve Qwen/Qwen3-8B --max-model-len 512\n").run.recipe
    model = catalogue_model("qwen3-8b")
    for gpu, sequences in (("rtx-4090", 256), ("a100-sxm4-80gb", 256), ("h100-sxm", 1024)):
        document = plan(model, recipe, make_machine(gpu)).to_dict()
        assert document["resolved"]["engine"]["max_num_seqs"] == sequences


def test_a_server_that_refuses_says_what_makes_it_start() -> None:
    from planner.answers.serving_changes import rescues

    model, machine = catalogue_model("qwen3-8b"), make_machine("rtx-4090")
    line = "vllm serve Qwen/Qwen3-8B --max-model-len 40960 --gpu-memory-utilization 0.9\n"
    recipe = import_config(line).run.recipe
    refused = plan(model, recipe, machine)
    assert refused.problem
    assert "does not hold one sequence" in plan_text(refused)
    changes = rescues(model, recipe, machine, refused)
    longest = next(each.max_model_len for each in changes if "--max-model-len" in each.words)
    shorter = plan(model, recipe.model_copy(update={"context": longest}), machine)
    longer = plan(model, recipe.model_copy(update={"context": longest + 1}), machine)
    assert shorter.fits
    assert not longer.fits
