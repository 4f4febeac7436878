"""Real vLLM inside gloo ranks: an engine a rank, or two ranks that are one; weights reach it from FSDP2's parts."""

import socket
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config

from planner.models.hub import find_model
from planner.run.parallel import layout_of
from planner.run.recipe import Recipe
from planner.units import MiB
from profiler.torch_recorder import record
from tests.trainer.parallel.gloo import on_ranks
from tests.trainer.parallel.processes import ended, kill, said, start
from tests.trainer.serving import save_word_tokenizer
from trainer.config import parse_run
from trainer.engines import vllm_group
from trainer.engines.protocol import SamplingSettings
from trainer.engines.vllm_llm import vllm_model
from trainer.engines.vllm_push import VllmPushEngine
from trainer.engines.vllm_shared import VllmSharedEngine
from trainer.model import Policy, load_policy
from trainer.parallel import watch
from trainer.parallel.ranks import ALONE
from trainer.parallel.sharding import over_ranks, shard_policy
from trainer.run import train_parsed
from trainer.small_model import make_small_model

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("ranks")]

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [30, 40, 50, 60, 70]]
GREEDY = SamplingSettings(num_generations=1, max_new_tokens=12, temperature=0.0, seed=3)
SAMPLED = replace(GREEDY, temperature=1.0, num_generations=2)

VOCABULARY, HIDDEN, MLP, LAYERS = 500, 128, 192, 3
LAYER = 2 * HIDDEN**2 + 2 * HIDDEN * 64 + 3 * HIDDEN * MLP + 2 * HIDDEN + HIDDEN + 2 * 64
OUTSIDE = 2 * VOCABULARY * HIDDEN + HIDDEN
UNIT_BYTES = 4 * max(LAYER, OUTSIDE)
WHOLE_BYTES = 4 * (LAYERS * LAYER + OUTSIDE)
LARGEST_MODULE_BYTES = 4 * 512 * HIDDEN


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen2")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,  # vLLM pads the embedding, and cuts it between the ranks
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=1,
    )
    AutoModelForCausalLM.from_config(config).float().save_pretrained(path)
    save_word_tokenizer(path, VOCABULARY)
    return str(path)


def policy_of(ranks, folder, method, **engine):
    """Return the policy, in parts on several ranks, and its recipe."""
    wanted = Recipe(
        task="grpo",
        method="full" if method == "full" else "lora",
        context=64,
        dtype="fp32",
        sharding="fsdp2",
        parallel={"data_shard": ranks.size},
        engine={"kind": "vllm-push", "kv_bytes": 4 * MiB, "max_num_seqs": 4} | engine,
        lora={"rank": 4, "dora": method == "dora"},
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if method != "full":
        torch.manual_seed(1)
        config = LoraConfig(r=4, init_lora_weights=False, use_dora=method == "dora")
        model = get_peft_model(model, config)
    policy = Policy(
        model=model,
        tokenizer=SimpleNamespace(eos_token_id=1),
        method=wanted.method,
        source=folder,
        revision=None,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    recipe = over_ranks(wanted, ranks.size)
    if ranks.several:
        layout = layout_of(find_model(folder), wanted, ranks.size)
        policy = shard_policy(policy, recipe, layout, ranks)
    return policy, recipe


@torch.no_grad()
def train(policy):
    """Change every trained weight by something that depends on its place in the whole alone."""
    ranks = policy.ranks
    for (_, local), (_, whole) in zip(policy.stepped(), policy.trainable(), strict=True):
        torch.manual_seed(whole.shape.numel())
        change = 0.1 * torch.randn(whole.shape)
        local.add_(change.chunk(ranks.shards)[ranks.shard_index] if ranks.several else change)


def pushed_twice(ranks, folder, method, degree):
    """Return what all prompts are answered before and after a push that changes the logits.

    And by how much engine and policy differ behind it, the bytes of this rank's part, and how many are born
    and alive at most while weights are pushed.
    """
    policy, recipe = policy_of(ranks, folder, method, tensor_parallel=degree)
    engine = VllmPushEngine(policy, recipe=recipe)
    try:
        before = answers(engine, ranks)
        train(policy)
        engine.update_weights()
        difference = engine.check("after a push")
        here = sum(local_bytes(parameter) for parameter in policy.model.parameters())
        return before, answers(engine, ranks), difference, here, born_in_a_push(engine, policy)
    finally:
        engine.close()


def shared_twice(ranks, folder, cases):
    """Return what `pushed_twice` does of an engine whose weights are the policy's, and how much is another copy's.

    Copies of the policy, one a rank: sharding ddp. Nothing is pushed: the optimizer writes vLLM's own memory.
    """
    found = []
    for method in cases:
        wanted = Recipe(
            task="grpo",
            method=method,
            context=64,
            dtype="fp32",
            sharding="ddp",
            engine={"kind": "vllm-shared", "kv_bytes": 4 * MiB, "max_num_seqs": 4},
            lora={"rank": 4},
        )
        recipe = over_ranks(wanted, ranks.size)
        policy = load_policy(folder, recipe=recipe, on_host=ranks.several)
        if method == "lora":
            torch.manual_seed(1)
            for name, parameter in policy.model.named_parameters():
                if "lora_" in name:  # as PEFT starts them B is zero
                    parameter.data.copy_(0.3 * torch.randn(parameter.shape))
        engine = VllmSharedEngine(policy, recipe=recipe, ranks=ranks)
        if ranks.several:
            layout = layout_of(find_model(folder), recipe, ranks.size)
            policy = shard_policy(policy, recipe, layout, ranks, stay=engine.shared)
            engine.follow(policy)
        try:
            before = answers(engine, ranks)
            train(policy)
            engine.update_weights()
            difference = engine.check("after a step")
            apart = [
                name
                for name, parameter in policy.model.named_parameters()
                if "lora_" not in name and storage(parameter) not in served_storages(engine)
            ]
            found.append((before, answers(engine, ranks), difference, apart))
        finally:
            engine.close()
    return found


def storage(parameter):
    local = getattr(parameter, "to_local", lambda: parameter)()
    return local.untyped_storage().data_ptr()


def served_storages(engine):
    return {storage(parameter) for parameter in vllm_model(engine.llm).parameters()}


def answers(engine, ranks):
    """Return tokens and log-probabilities of every prompt, whichever rank has asked it; greedy, and sampled."""
    own = ranks.share(range(len(PROMPTS)))
    found = []
    for settings in (GREEDY, SAMPLED):
        asked = replace(settings, numbers=tuple(own))
        made = engine.generate([PROMPTS[index] for index in own], asked)
        mine = [(own[each.prompt_index], (each.token_ids, each.logprobs)) for each in made]
        every = [pair for part in ranks.gather_objects(mine) for pair in part]
        found += [answer for _, answer in sorted(every, key=lambda pair: pair[0])]
    return found


def born_in_a_push(engine, policy):
    engine.update_weights()  # the third: engine and policy are compared behind it
    with record(policy.model, subject="push", follow=True) as live:
        with live.phase("load"):  # what stands is seen when it is first touched
            engine.update_weights()
        with live.phase("sync"):
            engine.update_weights()
    alive, now, most = set(), 0, 0
    for event in live.recording.events:
        if event.kind == "alloc" and event.phase == "sync":
            alive.add(event.block)
            now += event.bytes
        elif event.block in alive:
            alive.remove(event.block)
            now -= event.bytes
        most = max(most, now)
    return most


def local_bytes(parameter):
    return getattr(parameter, "to_local", lambda: parameter)().nbytes


def every_push(ranks, folder, cases):
    return [pushed_twice(ranks, folder, *case) for case in cases]


def check(cases, ranks, expected):
    """Compare what two ranks answered with what is `expected` of each method."""
    for rank in ranks:
        for case, (before, after, difference, here, born) in zip(cases, rank, strict=True):
            method, degree = case
            assert difference < 1e-4
            for ours, theirs in zip((before, after), expected[method][:2], strict=True):
                assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
                for (_, logprobs), (_, wanted) in zip(ours, theirs, strict=True):
                    assert logprobs == pytest.approx(wanted, abs=1e-4)
            assert before != after, "the push changed the logits"
            if method == "full":
                # in an engine of a rank's own nothing is whole but where it belongs. Through vLLM's loader: one
                # layer, or what is outside the layers; and the one module that it lays out anew before it copies it
                assert born <= (
                    UNIT_BYTES + LARGEST_MODULE_BYTES if degree == 2 else LARGEST_MODULE_BYTES
                )
                assert born > 0 or degree == 1
                assert here < 0.51 * WHOLE_BYTES


def test_one_engine_of_two_ranks_says_what_an_engine_each_does_before_and_after_a_push(folder):
    cases = [("full", 1), ("full", 2)]
    first, second = on_ranks(2, every_push, folder, cases)
    check(cases, (first, second), {"full": first[0]})


@pytest.mark.slow
def test_two_ranks_generate_what_one_process_does(folder):
    methods = ("full", "lora", "dora")  # dora: merged where a layer is whole
    cases = [(method, degree) for method in methods for degree in (1, 2)]
    alone = {method: pushed_twice(ALONE, folder, method, 1) for method in methods}
    check(cases, on_ranks(2, every_push, folder, cases), alone)


@pytest.mark.slow
def test_each_rank_generates_with_the_weights_that_it_trains(folder):
    """vllm-shared over copies: two ranks say what one process does, before and after a change, and hold no copy."""
    cases = ("full", "lora")
    alone = shared_twice(ALONE, folder, cases)
    for rank in on_ranks(2, shared_twice, folder, cases):
        for (*ours, difference, apart), (*theirs, _, _) in zip(rank, alone, strict=True):
            assert difference < 1e-4
            assert apart == []
            for answered, wanted in zip(ours, theirs, strict=True):
                assert [tokens for tokens, _ in answered] == [tokens for tokens, _ in wanted]
                for (_, logprobs), (_, expected) in zip(answered, wanted, strict=True):
                    assert logprobs == pytest.approx(expected, abs=1e-4)
            assert ours[0] != ours[1], "the change is heard"


def slept(ranks, folder, cases):
    """Return how engine and policy differ after a sleep that spoils what a GPU would have dropped."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.cpu_worker import CPUWorker

    def sleep(self, level=1):
        with torch.no_grad():
            for tensor in self.model_runner.kv_caches:
                tensor.fill_(1e3)
            for tensor in self.model_runner.model.parameters() if level == 2 else ():
                tensor.fill_(1e3)

    type(current_platform).is_sleep_mode_available = lambda self: True
    CPUWorker.sleep, CPUWorker.wake_up = sleep, lambda self, tags=None: None
    found = []
    for method, degree, level in cases:
        policy, recipe = policy_of(ranks, folder, method, tensor_parallel=degree, sleep_level=level)
        engine = VllmPushEngine(policy, recipe=recipe)
        engine.release()
        assert engine.memory()["weights"] == 0
        train(policy)
        engine.resume()
        answers(engine, ranks)  # nobody has pushed what the sleep dropped: the engine does
        engine.update_weights()
        found.append(engine.check("after a sleep"))
        if degree == 2:
            # time is up: both leave the rollout at the same step, and the engine lives
            vllm_group.LOOK_EVERY = 3
            patient, engine._group = engine._group, vllm_group.Group(2, timeout_s=0.0)
            with pytest.raises(vllm_group.TooLong, match="took longer than"):
                answers(engine, ranks)
            engine._group = patient
            answers(engine, ranks)
        engine.close()
    return found


@pytest.mark.slow
def test_engines_in_the_ranks_sleep_and_take_their_weights_again(folder):
    cases = [("full", 2, 2), ("full", 1, 2), ("lora", 1, 1)]
    for rank in on_ranks(2, slept, folder, cases):
        assert all(difference < 1e-4 for difference in rank)


def generates_without_end(ranks, folder, marks):
    watch.SILENCE_S = 6.0
    policy, recipe = policy_of(ranks, folder, "full", tensor_parallel=2)
    engine = VllmPushEngine(policy, recipe=recipe)
    while True:
        answers(engine, ranks)
        (marks / str(ranks.rank)).touch()


@pytest.mark.slow
def test_a_killed_rank_ends_the_one_that_is_an_engine_with_it(folder, tmp_path):
    """The other waits in C++ for its half of a layer, and no connection breaks: it misses the signs of life."""
    processes = start(2, generates_without_end, folder, tmp_path, folder=tmp_path)
    deadline = time.monotonic() + 300
    while not all((tmp_path / str(rank)).exists() for rank in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    kill(processes[1])
    assert ended(processes) == [1, -9]
    told = [line for line in said(tmp_path, 2)[0].splitlines() if line.startswith("error:")]
    assert told == [
        f"error: rank 1 of 2 on {socket.gethostname()} is gone: killed, or its machine is lost"
    ]


def grpo(ranks, documents, root):
    """Return the metrics of each run."""
    found = []
    for document in documents:
        run, section = parse_run(document, root=Path(root))
        result = train_parsed(run, section, root=Path(root), ranks=ranks)
        ranks.barrier()  # the group is whole when its engines have gone
        found.append(result.metrics)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
def test_two_ranks_learn_through_engines_of_their_own_and_through_one(document, tmp_path, method):
    model = make_small_model(tmp_path / "wide", hidden=128, heads=4, layers=2, chat=True)
    documents = [
        document(
            model=str(model),
            recipe={
                "method": method,
                "sharding": sharding,
                "engine": {"kind": kind, "tensor_parallel": degree},
                "num_generations": 4,
                "micro_batch_size": 8,
                "completion_length": 6,
            },
            train={
                "steps": 4,
                "prompts_per_step": 3,  # two of them the first rank's
                "output": str(tmp_path / f"out-{kind}-{degree}"),
                "lr": 1e-2,
            },
        )
        for kind, degree, sharding in (
            ("vllm-push", 1, "fsdp2"),
            ("vllm-push", 2, "fsdp2"),
            ("vllm-shared", 1, "ddp"),
        )
    ]
    first, second = on_ranks(2, grpo, documents, str(tmp_path))
    for metrics, other in zip(first, second, strict=True):
        assert len(metrics) == 4
        assert [row["loss"] for row in metrics] == [row["loss"] for row in other]
        learned = [row for row in metrics if not row.get("nothing_to_learn")]
        assert learned
        for row in learned:  # what was sampled is what is scored, after every push
            assert row["sampling/ratio_mean"] == pytest.approx(1.0, abs=1e-3)
            assert row["sampling/logp_difference_max"] < 1e-2
