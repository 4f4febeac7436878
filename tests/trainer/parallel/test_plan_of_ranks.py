"""The plan of a run on two ranks, beside what their rehearsals measured: live bytes of every storage."""

from dataclasses import replace

import pytest

from planner.errors import UsageError, VramwiseError
from tests.trainer.parallel.gloo import on_ranks
from tests.trainer.parallel.work import every, step_zero
from trainer.parallel.ranks import Ranks
from trainer.small_model import make_small_model

pytestmark = pytest.mark.xdist_group("ranks")


WORDS = {"sft": {"context": 256}, "grpo": {"prompt_length": 64, "completion_length": 192}}


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    """Grouped heads, a tied head with a vocabulary that shows, and layers that show as well."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    return make_small_model(folder, hidden=128, heads=4, intermediate=512, layers=3, vocab=2048)


@pytest.fixture
def step_zeros(sft_document, grpo_document, wide_model, tmp_path):
    """Return a function that rehearses runs on two ranks: planned, measured and said by rank 0 of each."""

    def rehearse(*settings):
        cases = []
        for each in settings:
            make = {"sft": sft_document, "grpo": grpo_document}[each["task"]]
            more = {"micro_batch_size": 4, "sharding": "fsdp2"} | WORDS[each["task"]] | each
            made = make(train={"preflight": True, "share_prefix": False}, **more)
            if each["task"] == "sft":
                del made["train"]["share_prefix"]
            cases.append((made | {"model": str(wide_model)}, str(tmp_path)))
        firsts, seconds = on_ranks(2, every, step_zero, cases)
        assert [one[:2] for one in firsts] == [one[:2] for one in seconds], "one plan and measure"
        return firsts

    return rehearse


def agree(setting, found):
    planned, measured, said = found
    assert max(measured.values()) == pytest.approx(max(planned.values()), rel=0.01), setting
    assert {"load", "forward", "loss", "backward", "step"} <= set(measured)
    assert ("rollout" in measured) == (setting["task"] == "grpo")
    # five tables of each 4-bit weight are followed in blocks of 512 B; of so small a model that shows
    blocks = 21 * 5 * 512 if setting.get("method") == "qlora" else 0
    for phase in measured.keys() & planned.keys():
        near = pytest.approx(planned[phase], rel=0.03, abs=blocks)
        assert measured[phase] == near, (setting, phase)
    assert "rank 0 of 2 (all alike)" in said
    assert "lora.dtype" not in said, "the trainer settles it: no field of the file"
    assert "router_loss" not in said


def test_step_zero_is_as_planned_on_two_ranks(step_zeros):
    settings = (
        {"task": "sft", "method": "full", "checkpointing": "none"},
        {"task": "sft", "sharding": "ddp", "checkpointing": "full"},
        {"task": "grpo", "method": "qlora", "checkpointing": "offload"},
    )
    for setting, found in zip(settings, step_zeros(*settings), strict=True):
        agree(setting, found)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("task", ["sft", "grpo"])
def test_step_zero_of_every_method(step_zeros, task, method):
    kinds = ("none", "full", "offload")
    settings = [{"task": task, "method": method, "checkpointing": kind} for kind in kinds]
    settings.append({"task": task, "method": method, "sharding": "ddp", "checkpointing": "none"})
    for setting, found in zip(settings, step_zeros(*settings), strict=True):
        agree(setting, found)


def test_memory_that_one_rank_lacks_is_lacking_to_all(sft_document, tmp_path):
    """Rank 1 has half the memory: both plan for it, and no rank starts on its own."""
    document = sft_document(sharding="fsdp2", micro_batch_size=None, train={"preflight": True})
    del document["recipe"]["micro_batch_size"]
    first, second = on_ranks(2, step_zero, document, str(tmp_path), ["64GiB", "2MiB"])
    assert first == second
    assert "does not fit" in first


def test_what_several_ranks_cannot_do_is_refused_by_name(sft_document, grpo_document, tmp_path):
    from trainer.config import parse_run
    from trainer.preflight import prepare

    two = replace(Ranks.alone(), size=2)
    cases = {
        "recipe.checkpointing: every-k": sft_document(checkpointing="every-k", sharding="fsdp2"),
        "recipe.optimizer: muon": sft_document(optimizer="muon", sharding="fsdp2"),
        "recipe.engine.kind: vllm-shared": grpo_document(
            sharding="fsdp2", engine={"kind": "vllm-shared"}
        ),
        "parallel.data_shard: 2": sft_document(parallel={"data_shard": 2}),
    }
    for message, made in cases.items():
        run, train = parse_run(made, root=tmp_path)
        with pytest.raises(VramwiseError, match=message):
            prepare(run, train, ranks=two)
    for kind in ("vllm-push", "vllm-shared"):  # as on one rank
        four_bit = grpo_document(method="qlora", sharding="ddp", engine={"kind": kind})
        with pytest.raises(UsageError, match=f"{kind} cannot generate with a 4-bit policy"):
            parse_run(four_bit, root=tmp_path)
    with pytest.raises(UsageError, match=r"parallel\.tensor: 2"):
        parse_run(sft_document(parallel={"tensor": 2}), root=tmp_path)
    run, train = parse_run(sft_document(reduce_dtype="fp32"), root=tmp_path)
    with pytest.raises(
        VramwiseError, match=r"recipe\.reduce_dtype: fp32 has no effect on one rank"
    ):
        prepare(run, train)
