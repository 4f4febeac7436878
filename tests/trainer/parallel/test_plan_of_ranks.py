"""The plan of a run on two ranks, beside what their rehearsals measured: live bytes of every storage."""

from dataclasses import replace

import pytest

from planner.errors import UsageError, VramwiseError
from tests.trainer.parallel.gloo import on_ranks
from tests.trainer.parallel.work import every, step_zero
from trainer.parallel.ranks import Ranks
from trainer.small_model import make_small_model

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    """One head: on a CPU grouped fp32 keys take a kernel with full scores, and the plan is a GPU's."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    return make_small_model(folder, hidden=64, heads=1, intermediate=1024, layers=3, vocab=4096)


def test_step_zero_is_as_planned_on_two_ranks(sft_document, wide_model, tmp_path):
    settings = (
        {"sharding": "fsdp2"},
        {"sharding": "fsdp2", "method": "full"},
        {"sharding": "ddp"},
        {"sharding": "fsdp2", "checkpointing": "none"},
    )
    cases = []
    for each in settings:
        made = sft_document(
            context=256,
            micro_batch_size=4,
            train={"preflight": True},
            **{"checkpointing": "full"} | each,
        )
        cases.append((made | {"model": str(wide_model)}, str(tmp_path)))
    for each, first, second in zip(settings, *on_ranks(2, every, step_zero, cases), strict=True):
        planned, measured, said = first
        assert second[:2] == first[:2], "one plan, and the fullest rank's measure"
        assert max(measured.values()) == pytest.approx(max(planned.values()), rel=0.03), each
        for phase in ("load", "forward", "backward"):
            assert measured[phase] == pytest.approx(planned[phase], rel=0.03), (each, phase)
        assert "rank 0 of 2 (all alike)" in said


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
        "recipe.engine.kind: vllm-shared": grpo_document(engine={"kind": "vllm-shared"}),
        "parallel.data_shard: 2": sft_document(parallel={"data_shard": 2}),
    }
    for message, made in cases.items():
        run, train = parse_run(made, root=tmp_path)
        with pytest.raises(VramwiseError, match=message):
            prepare(run, train, ranks=two)
    with pytest.raises(UsageError, match=r"parallel\.tensor: 2"):
        parse_run(sft_document(parallel={"tensor": 2}), root=tmp_path)
    run, train = parse_run(sft_document(reduce_dtype="fp32"), root=tmp_path)
    with pytest.raises(
        VramwiseError, match=r"recipe\.reduce_dtype: fp32 has no effect on one rank"
    ):
        prepare(run, train)
