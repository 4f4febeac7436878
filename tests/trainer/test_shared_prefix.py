"""Shared prompts: the mask token by token and as CUDA's kernels want it, gradients, memory, the criterion."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from planner.machines.machine import make_machine
from planner.models.hub import find_model
from planner.plan import plan
from planner.run.recipe import Recipe
from planner.units import MiB
from trainer.batching import Layout, ScoredSequence, collate
from trainer.checkpointing import checkpoint_layers, decoder_layers
from trainer.fake_device import FakeDevice
from trainer.model import load_policy
from trainer.scoring import hidden_rows, log_probs
from trainer.shared_plan import (
    PHASES,
    largest_rows,
    plan_sharing,
    row_cost,
    shared_phases,
)
from trainer.shared_prefix import (
    MASKED,
    MEMORY_EFFICIENT_SLOWDOWN,
    RowCost,
    can_share,
    collate_shared,
    mask_bytes,
    shared_mask,
    shared_tokens,
    worth_sharing,
)

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def group(prompt, completions, seed=0):
    """Return sequences over one prompt; `completions` are their lengths."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count):
        return tuple(torch.randint(5, 60, (count,), generator=generator).tolist())

    head = ids(prompt)
    return [
        ScoredSequence(token_ids=head + ids(length), scored=(False,) * prompt + (True,) * length)
        for length in completions
    ]


def visible_pairs(ends, width):
    """Return which query sees which key, from the definition alone."""
    seen = torch.zeros(len(ends), width, width, dtype=torch.bool)
    for row, parts in enumerate(ends):
        owner = [sum(place >= end for end in parts) for place in range(width)]
        for query in range(width):
            for key in range(width):
                earlier_own = owner[key] == owner[query] and key <= query
                prompt = key < parts[0] and key <= query
                padding = query >= parts[-1]
                seen[row, query, key] = prompt if padding else prompt or earlier_own
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ends", [[[7, 11, 11, 20]], [[3, 9], [10, 14, 30]], [[16, 32], [1, 5]]])
def test_the_mask_is_what_each_token_may_see(ends, dtype):
    width = max(parts[-1] for parts in ends)
    mask = shared_mask(ends, dtype=dtype, device=CPU)
    assert mask.shape == (len(ends), 1, width, width)
    assert mask.dtype == dtype
    assert torch.equal(mask[:, 0] == 0, visible_pairs(ends, width))
    assert set(mask.unique().tolist()) <= {0.0, torch.tensor(MASKED, dtype=dtype).item()}


@pytest.mark.parametrize("width", [15, 16, 17, 100])
def test_rows_of_a_mask_begin_where_torch_copies_none(width):
    """attention.cpp's aligned_tensor: every stride but the last a multiple of 16 (or 8), the last 1."""
    mask = shared_mask([[5, width], [3, 9]], dtype=torch.float32, device=CPU)
    assert all(stride % 16 == 0 for stride in mask.stride()[:-1])
    assert mask.stride(-1) == 1
    assert mask.untyped_storage().nbytes() == mask_bytes(2, width, 4)


@pytest.fixture(scope="module")
def policy(small_model):
    policy = load_policy(str(small_model), recipe=Recipe(task="grpo", dtype="fp32"))
    torch.manual_seed(0)
    with torch.no_grad():
        for _, parameter in policy.trainable():
            parameter.normal_(std=0.2)
    return policy


def gradients(policy, batch):
    logp = log_probs(policy, batch, hidden_rows(policy, batch)).logp
    weights = torch.arange(1, 1 + len(batch.indices)) / 7
    (logp * weights[batch.sequence_ids]).sum().backward()
    found = [parameter.grad.clone() for _, parameter in policy.trainable()]
    policy.model.zero_grad()
    return logp.detach(), found


RAGGED = [(13, (4, 1, 9, 2)), (29, (6, 3)), (5, (11, 11, 11))]


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_ragged_groups_in_one_micro_batch_have_the_gradient_of_separate_rows(
    small_model, attention, mode
):
    """Rows of three widths, none a multiple of 16: padding beside completions of 1 to 11 tokens."""
    recipe = Recipe(task="grpo", dtype="fp32", attention=attention, checkpointing=mode)
    policy = load_policy(str(small_model), recipe=recipe)
    torch.manual_seed(0)
    with torch.no_grad():
        for _, parameter in policy.trainable():
            parameter.normal_(std=0.2)
    checkpoint_layers(decoder_layers(policy.base), mode=recipe.checkpointing)
    groups = [group(prompt, lengths, seed) for seed, (prompt, lengths) in enumerate(RAGGED)]
    flat = [sequence for each in groups for sequence in each]
    indices = range(len(flat))
    apart = collate(flat, indices, layout=Layout.SORTED)
    together = collate_shared(groups, indices, pad_id=0, dtype=policy.dtype, device=CPU)
    assert len({shared_tokens(each) for each in groups}) == 3
    assert together.num_tokens < apart.num_tokens
    logp, expected = gradients(policy, apart)
    shared_logp, found = gradients(policy, together)
    torch.testing.assert_close(shared_logp, logp, rtol=1e-4, atol=1e-4)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_every_layer_gets_the_same_mask_as_its_kernel_wants_it(policy, monkeypatch):
    taken = []
    own = functional.scaled_dot_product_attention

    def spy(query, *args, attn_mask=None, **options):
        taken.append((attn_mask, query.dtype))
        return own(query, *args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    batch = collate_shared([group(13, (4, 9))], range(2), pad_id=0, dtype=policy.dtype, device=CPU)
    hidden_rows(policy, batch)
    assert len(taken) == len(decoder_layers(policy.base))
    for mask, dtype in taken:
        assert mask.data_ptr() == batch.attention_mask.data_ptr()
        assert mask.dtype == dtype
        assert all(stride % 16 == 0 for stride in mask.stride()[:-1])


def test_making_micro_batches_holds_one_mask_at_a_time(policy):
    """Counted bytes: 4 groups of 300 + 8 x 50 tokens, as the step takes them."""
    from trainer.data import Prompt
    from trainer.engines.protocol import Completion
    from trainer.rollout import Rollout, split
    from trainer.shared_plan import Sharing

    prompts, completions = [], []
    for number in range(4):
        head = group(300, [50], seed=number)[0].token_ids
        for index in range(8):
            prompts.append(Prompt(token_ids=head[:300], text="", sample={}, conversational=False))
            ids = tuple((5 + index + place) % 55 for place in range(50))
            completions.append(
                Completion(prompt_index=number, token_ids=ids, logprobs=None, finished=True)
            )
    rollout = Rollout(prompts=prompts, completions=completions, texts=[""] * 32, num_generations=8)
    sharing = Sharing(cost=RowCost(token=1, pair=0), always=True, budget_tokens=692)
    alive = []
    device = FakeDevice(10**12)
    with device:
        batches = split(
            rollout,
            range(32),
            policy=policy,
            budget_tokens=10_000,
            layout=Layout.SORTED,
            sharing=sharing,
        )
        for batch in batches:
            assert sum(reference() is not None for reference in alive) == 0
            alive.append(weakref.ref(batch.attention_mask))
            del batch
    assert len(alive) == 4
    whole = mask_bytes(1, 692, 4)
    # the prompt's triangle is cut out of a copy on a CPU
    assert whole <= device.peak_bytes <= 1.3 * whole


def test_a_step_lets_go_of_a_mask_before_the_next_is_made(document, tmp_path):
    from trainer.config import parse_run
    from trainer.preflight import prepare

    run, section = parse_run(document(), root=tmp_path)
    ready = prepare(run, section)
    alive = []

    def micro_batches(_budget):
        for seed in range(3):
            gc.collect()
            assert not any(reference() is not None for reference in alive)
            batch = collate_shared(
                [group(20, (5, 5), seed)], range(2), pad_id=0, dtype=torch.float32, device=CPU
            )
            alive.append(weakref.ref(batch.attention_mask))
            yield batch
            del batch

    def loss(batch):
        logp = log_probs(ready.policy, batch, hidden_rows(ready.policy, batch)).logp
        return -logp.sum(), None

    update = ready.stepper.run(0, micro_batches=micro_batches, loss=loss, longest=30)
    assert len(update.stats) == len(alive) == 3
    assert not update.skipped


def test_sharing_wants_full_attention(policy):
    assert can_share(policy.base)
    implementation = policy.base.config._attn_implementation
    policy.base.config._attn_implementation = "flash_attention_2"
    assert not can_share(policy.base)
    policy.base.config._attn_implementation = implementation


def cost_of(name, device=GPU, **recipe):
    spec = find_model(name)
    recipe = Recipe(task="grpo", method="lora", **recipe)
    return row_cost(spec, plan(spec, recipe, make_machine("h100-sxm")).resolved, device)


@pytest.fixture
def capability(monkeypatch):
    """Let cards of a chosen compute capability stand behind torch.cuda."""
    chosen = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: chosen[0])
    return chosen


def test_what_a_token_and_a_pair_cost_is_counted_from_the_model(capability):
    cost = cost_of("llama-3.1-8b", checkpointing="none")
    # 32 layers of 4096: q, o 2 x 4096^2, k, v 2 x 4096 x 1024, MLP 3 x 4096 x 14336, two norms
    weights = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)
    assert cost.token == 2 * weights * 2
    assert cost.pair == 32 * 4 * 4096 * 3.5
    assert cost.masked == MEMORY_EFFICIENT_SLOWDOWN
    again = cost_of("llama-3.1-8b", checkpointing="offload")
    assert again.token == 2 * weights * 3
    assert again.pair == 32 * 4 * 4096 * 4.5


def test_a_mixture_costs_what_its_chosen_experts_cost(capability):
    spec = find_model("qwen3-30b-a3b")
    cost = cost_of("qwen3-30b-a3b", checkpointing="none")
    assert 0.7 * spec.active_parameters < cost.token / 4 < spec.active_parameters


def test_a_mask_costs_a_slower_kernel_only_where_flash_would_have_run(capability):
    assert cost_of("llama-3.1-8b", dtype="bf16").masked > 2
    assert cost_of("llama-3.1-8b", dtype="fp32").masked == 1
    assert cost_of("llama-3.1-8b", dtype="bf16", device=CPU).masked == 1
    capability[0] = (7, 5)
    assert cost_of("llama-3.1-8b", dtype="fp16").masked == 1
    # eager attention makes all pairs, masked or not
    eager = cost_of("llama-3.1-8b", attention="eager")
    assert eager.shared(100) == eager.separate([100])


def test_a_row_is_shared_where_that_is_less_work(capability):
    large, small = cost_of("llama-3.1-8b"), cost_of("smollm2-135m")
    assert shared_tokens(group(100, [10] * 8)) == 100 + 8 * 9
    for cost in (large, small):
        assert worth_sharing(group(100, [10] * 8), cost)
        assert not worth_sharing(group(10, [300] * 8), cost)
        assert not worth_sharing(group(8000, [200] * 8), cost)  # over MAX_SHARED_TOKENS
        assert not worth_sharing(group(100, [10]), cost)
    # 3,000 + 8 x 500: a quarter of the tokens, as many pairs, each of them dearer
    long = group(3000, [500] * 8)
    assert worth_sharing(long, large)
    assert not worth_sharing(long, small)
    assert worth_sharing(long, replace(small, masked=1.0))


def shared_run(budget_rows, **recipe):
    spec = find_model("llama-3.1-8b")
    made = Recipe(
        task="grpo",
        framework="vramwise",
        micro_batch_size=budget_rows,
        num_generations=8,
        prompt_length=3000,
        completion_length=500,
        **recipe,
    )
    planned = plan(spec, made, make_machine("h100-sxm"))
    sharing = plan_sharing(
        spec, planned, budget_tokens=budget_rows * 3500, device=CPU, always=False
    )
    return spec, planned, sharing


@pytest.mark.parametrize("checkpointing", ["none", "full", "offload"])
@pytest.mark.parametrize("rows", [2, 8, 32])
def test_shared_rows_stay_under_the_planned_peak(rows, checkpointing):
    spec, planned, sharing = shared_run(rows, checkpointing=checkpointing)
    assert sharing is not None
    assert max(phase.total_bytes for phase in sharing.phases) <= planned.peak_bytes
    assert {phase.name for phase in sharing.phases} == set(PHASES)
    if sharing.budget_tokens < rows * 3500:
        count, prompt, tokens = largest_rows(sharing.budget_tokens + 1, sharing.row_tokens, 3000, 8)
        more = shared_phases(spec, planned, rows=count, prompt=prompt, tokens=tokens)
        assert max(phase.total_bytes for phase in more) > planned.peak_bytes


def test_the_plan_of_shared_rows_counts_the_mask_and_repeated_keys():
    spec, planned, _ = shared_run(8, checkpointing="offload")
    mask = mask_bytes(2, 6992, 2)
    assert mask == pytest.approx(2 * 93.3 * MiB, rel=0.01)
    with_mask = {
        phase.name: phase.total_bytes
        for phase in shared_phases(spec, planned, rows=2, prompt=3000, tokens=6992)
    }
    alone = replace(planned.resolved, sequences=2, prompt_tokens=3000, completion_tokens=3992)
    from planner.phases import budget

    for phase in budget(spec, alone, planned.machine).phases:
        if phase.name in with_mask:
            assert with_mask[phase.name] >= phase.total_bytes + mask
        if phase.name == "backward":
            # keys and values of 8 heads become those of 32: 2 x 24 heads x 128 x 2 B a token more
            repeated = 2 * 6992 * 2 * 24 * 128 * 2
            assert with_mask["backward"] >= phase.total_bytes + mask + repeated


def test_the_preflight_runs_the_largest_shared_micro_batch(document, tmp_path):
    """Measured with sharing and without: the mask is there, and no more than was planned."""
    from trainer.config import parse_run
    from trainer.preflight import prepare

    measured = {}
    for share in (False, True):
        made = document(
            recipe={"prompt_length": 400, "completion_length": 20, "num_generations": 8},
            train={"preflight": True, "share_prefix": share},
        )
        run, section = parse_run(made, root=tmp_path)
        ready = prepare(run, section)
        measured[share] = ready
    sharing = measured[True].sharing
    assert measured[False].sharing is None
    assert sharing is not None
    rows, _, tokens = largest_rows(sharing.budget_tokens, sharing.row_tokens, 400, 8)
    assert tokens == 400 + 8 * 19
    assert rows >= 2
    assert sharing.phases[0].name == "score"
    blocks = {
        share: {event.bytes for event in ready.measured.events if event.kind == "alloc"}
        for share, ready in measured.items()
    }
    assert mask_bytes(rows, tokens, 4) in blocks[True]
    assert mask_bytes(rows, tokens, 4) not in blocks[False]
    for name in ("forward", "backward"):
        assert measured[True].measured_bytes[name] <= 1.1 * measured[True].planned_bytes[name]
