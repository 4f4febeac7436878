"""As many sequences at once as the plan has room for, graphs where they fit: what is planned, and what vLLM gets."""

import json

import pytest

from planner.answers.width import widened
from planner.errors import VramwiseError
from planner.machines.machine import Machine, make_machine
from planner.models.hub import find_model
from planner.plan import plan
from planner.run.recipe import RunFile
from planner.run.runfile import make_recipe, save_run_file
from planner.units import GiB, MiB
from trainer.engines.vllm_graphs import with_graphs

LLAMA = find_model("llama-3.1-8b")
PROMPTS, GENERATIONS, LENGTH = 32, 8, 2048
STEP = PROMPTS * GENERATIONS
PAGE = 16 * 32 * 2 * 8 * 128 * 2
"""16 tokens of 32 layers' keys and values, 8 heads of 128, bf16."""
SEQUENCE = LENGTH // 16 * PAGE


def recipe(kind="vllm-shared", **engine):
    return make_recipe(
        task="grpo",
        method="lora",
        dtype="bf16",
        context=LENGTH,
        num_generations=GENERATIONS,
        micro_batch_size=1,
        sharding="none",
        engine={"kind": kind, "sleep_level": 1, **engine},
    )


def wide(machine, asked, prompts=PROMPTS, said=None):
    said = [] if said is None else said
    return widened(
        LLAMA, asked, plan(LLAMA, asked, machine), machine, prompts=prompts, say=said.append
    )


def cache_of(planned):
    return next(t.bytes for t in planned.phase("rollout").terms if t.name == "kv_cache")


@pytest.mark.parametrize("kind", ["vllm-shared", "vllm-push"])
def test_all_of_a_step_is_generated_at_once_where_it_has_room(kind):
    said = []
    made, planned = wide(Machine(vram_bytes=180 * GiB), recipe(kind), said=said)
    assert made.engine.max_num_seqs == STEP
    assert cache_of(planned) == STEP * SEQUENCE + PAGE  # vLLM's null block beside them
    assert planned.resolved.cuda_graphs
    assert planned.verdict == "fits"
    assert said == []


def test_no_more_than_has_room_and_it_is_said():
    machine, said = make_machine("rtx-4090"), []
    made, planned = wide(machine, recipe(), said=said)
    count = made.engine.max_num_seqs
    assert 1 <= count < STEP
    assert planned.verdict == "fits"
    assert cache_of(planned) == count * SEQUENCE + PAGE
    more = recipe(max_num_seqs=count + 1, kv_bytes=(count + 1) * SEQUENCE + PAGE)
    assert plan(LLAMA, more, machine).verdict != "fits"
    assert len(said) == 1
    assert f"generates {count} of a step's {STEP} sequences at once" in said[0]


def test_a_shared_engine_has_the_prompts_of_all_its_ranks():
    made, _ = wide(
        Machine(vram_bytes=180 * GiB, num_gpus=2), recipe("vllm-push", tensor_parallel=2)
    )
    assert made.engine.max_num_seqs == 2 * STEP


def test_what_is_stated_stays_and_says_the_rest():
    machine = Machine(vram_bytes=180 * GiB)
    made, planned = wide(machine, recipe(max_num_seqs=24))
    assert (made.engine.max_num_seqs, cache_of(planned)) == (24, 24 * SEQUENCE + PAGE)
    made, planned = wide(machine, recipe(max_num_seqs=1000))  # of which a step fills 256
    assert (made.engine.max_num_seqs, cache_of(planned)) == (1000, STEP * SEQUENCE + PAGE)
    pool = 5 * SEQUENCE + PAGE
    made, planned = wide(machine, recipe(kv_bytes=pool))
    assert (made.engine.max_num_seqs, cache_of(planned)) == (5, pool)
    both = recipe(kv_bytes=pool, max_num_seqs=3)
    assert wide(machine, both)[0] == both


def test_more_than_has_room_is_refused_by_name():
    with pytest.raises(
        VramwiseError, match="max_num_seqs: 256 sequences of 2,048 tokens"
    ) as caught:
        wide(make_machine("rtx-4090"), recipe(max_num_seqs=STEP))
    assert "does not fit" in caught.value.message
    assert "leave it out" in caught.value.hint


@pytest.mark.parametrize("kind", ["transformers", "vllm-server", None])
def test_other_engines_are_left_alone(kind):
    asked = recipe().model_copy(
        update={"engine": recipe().engine.model_copy(update={"kind": kind, "sleep_level": None})}
    )
    made, _ = wide(Machine(vram_bytes=180 * GiB), asked)
    assert made == asked


def solver(machine):
    def solve(each):
        planned = plan(LLAMA, each, machine)
        if not planned.may_run:
            raise VramwiseError("the run does not fit")
        return each, planned

    return solve


def test_graphs_go_where_they_alone_do_not_fit_and_it_is_said():
    def runs(vram, **engine):
        return plan(LLAMA, recipe(**engine), Machine(vram_bytes=vram)).may_run

    room = next(size for size in range(14 * GiB, 40 * GiB, 8 * MiB) if runs(size, cuda_graphs=False))  # fmt: skip
    assert not runs(room)
    said = []
    made, planned = with_graphs(recipe(), solver(Machine(vram_bytes=room)), say=said.append)
    assert (made.engine.cuda_graphs, planned.resolved.cuda_graphs) == (False, False)
    assert said == ["vLLM runs without CUDA graphs, slower: with them the run does not fit"]
    with pytest.raises(VramwiseError, match="does not fit"):
        with_graphs(recipe(cuda_graphs=True), solver(Machine(vram_bytes=room)))
    with pytest.raises(VramwiseError, match="does not fit"):
        with_graphs(recipe(), solver(Machine(vram_bytes=8 * GiB)))
    said.clear()
    made, planned = with_graphs(recipe(), solver(Machine(vram_bytes=80 * GiB)), say=said.append)
    assert made.engine.cuda_graphs is None
    assert planned.resolved.cuda_graphs
    assert said == []


@pytest.mark.vllm
@pytest.mark.xdist_group("vllm")
def test_a_step_is_one_batch_of_real_vllm(document, tmp_path):
    """What the plan decided is what vLLM was started with, and it schedules all of a step together."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from trainer.config import parse_run
    from trainer.engines.protocol import SamplingSettings
    from trainer.preflight import prepare
    from trainer.small_model import make_small_model

    folder = make_small_model(tmp_path / "m", hidden=128, heads=4, layers=1)
    made = document(
        model=str(folder),
        recipe={"engine": {"kind": "vllm-push"}, "num_generations": 4, "micro_batch_size": 2},
        train={"prompts_per_step": 6},
    )
    run, train = parse_run(made, root=tmp_path)
    ready = prepare(run, train)
    engine = ready.engine
    try:
        core = engine.llm.llm_engine.engine_core.engine_core
        config = engine.llm.llm_engine.vllm_config
        assert config.scheduler_config.max_num_seqs == 24
        assert config.scheduler_config.enable_chunked_prefill
        assert config.scheduler_config.max_num_batched_tokens == 8192
        assert config.cache_config.enable_prefix_caching
        assert config.model_config.enforce_eager  # a CPU has no graphs
        assert not ready.plan.resolved.cuda_graphs
        assert config.cache_config.kv_cache_memory_bytes == cache_of(ready.plan)
        at_once = []
        schedule = core.scheduler.schedule

        def watched(*arguments, **options):
            made = schedule(*arguments, **options)
            at_once.append(len(made.num_scheduled_tokens))
            return made

        core.scheduler.schedule = watched
        prompts = [[5 + place] * (3 + place) for place in range(6)]
        settings = SamplingSettings(num_generations=4, max_new_tokens=3, stop_token_ids=())
        assert len(engine.generate(prompts, settings)) == 24
        assert max(at_once) == 24
    finally:
        engine.close()


@pytest.mark.vllm
@pytest.mark.parametrize("graphs", [None, True, False])
def test_what_a_card_gets_is_what_was_planned(graphs, small_model, monkeypatch):
    """vLLM's own EngineArgs take every argument; on a card the decode step is captured unless it was said not to."""
    vllm = pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.engine.arg_utils import EngineArgs

    from trainer.engines import vllm_llm
    from trainer.engines.vllm_settings import VllmSettings

    seen = []

    def llm(**arguments):
        seen.append(
            EngineArgs(**{k: v for k, v in arguments.items() if k != "skip_tokenizer_init"})
        )
        raise ValueError("as far as a machine without a card goes")

    monkeypatch.setattr(vllm, "LLM", llm)
    monkeypatch.setattr(vllm_llm, "runs_on_cpu", lambda: False)
    options = {} if graphs is None else {"cuda_graphs": graphs}
    settings = VllmSettings(
        model=str(small_model), dtype="bfloat16", max_model_len=LENGTH, max_num_seqs=STEP, kv_bytes=GiB, **options
    )  # fmt: skip
    with pytest.raises(VramwiseError, match="cannot start: as far as"):
        vllm_llm.start_llm(settings)
    (made,) = seen
    assert made.enforce_eager == (graphs is False)
    assert (made.max_num_seqs, made.kv_cache_memory_bytes) == (STEP, GiB)
    assert made.enable_chunked_prefill
    assert made.enable_prefix_caching


@pytest.mark.parametrize("stated", [2, None], ids=["stated", "micro-batches"])
def test_a_plan_of_the_file_generates_as_wide_as_its_training(stated, tmp_path, capsys):
    from app.cli import main

    machine = make_machine("h200")
    asked = recipe()
    train = {"output": "out"} | ({} if stated is None else {"prompts_per_step": stated})
    run = RunFile(model=LLAMA.name, recipe=asked, machine={"gpu": "h200"}, train=train)
    path = tmp_path / "run.yaml"
    save_run_file(run, path)
    assert main(["plan", str(path), "--json"]) == 0
    phases = json.loads(capsys.readouterr().out)["phases"]
    rollout = next(phase for phase in phases if phase["name"] == "rollout")
    cache = next(term["bytes"] for term in rollout["terms"] if term["name"] == "kv_cache")
    made, planned = wide(machine, asked, prompts=stated or 1)
    assert cache == cache_of(planned)
    assert made.engine.max_num_seqs == (stated or 1) * GENERATIONS
