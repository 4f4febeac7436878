"""What people expect of SFT beside the loss: dropout, packing, epochs, NEFTune, the experts' balance."""

import json

import pytest
import torch

from planner.errors import UsageError
from trainer.batching import Layout, ScoredSequence, collate
from trainer.model import load_policy
from trainer.scoring import hidden_and_routers, hidden_rows

ROWS = [
    {"prompt": f"{left} + {right} =", "completion": f" {left + right}\n"}
    for left in range(5)
    for right in range(5)
]


@pytest.fixture
def sft(document, tmp_path):
    """Return a function that makes an SFT run document over 25 short rows."""
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")

    def make(*, recipe=None, train=None, **top):
        made = document(
            recipe={"task": "sft", "context": 32, "micro_batch_size": 4, **(recipe or {})},
            train={"dataset": str(path), "rewards": [], "save_every": 0, **(train or {})},
            **top,
        )
        for key in ("num_generations", "prompt_length", "completion_length"):
            del made["recipe"][key]
        return made

    return make


def recipe_of(**fields):
    from planner.run.runfile import make_recipe

    return make_recipe(task="sft", dtype="fp32", context=32, **fields)


def batch_of(lengths=(8, 5), layout=Layout.SORTED):
    sequences = [
        ScoredSequence(
            token_ids=tuple(range(4, 4 + length)), scored=(False,) + (True,) * (length - 1)
        )
        for length in lengths
    ]
    return collate(sequences, range(len(lengths)), layout=layout, row_tokens=sum(lengths))


@pytest.fixture
def dropping(small_model):
    """Return a LoRA policy with dropout whose adapters do something."""
    policy = load_policy(str(small_model), recipe=recipe_of(lora={"rank": 4, "dropout": 0.5}))
    for name, parameter in policy.trainable():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return policy


def test_dropout_drops_in_training_and_nowhere_else(dropping):
    batch = batch_of()
    with torch.no_grad():
        still = [hidden_rows(dropping, batch) for _ in range(2)]
        with dropping.training():
            moving = [hidden_rows(dropping, batch) for _ in range(2)]
        after = hidden_rows(dropping, batch)
    assert torch.equal(still[0], still[1])
    assert torch.equal(still[0], after)
    assert not torch.allclose(moving[0], moving[1])


@pytest.mark.parametrize("mode", ["full", "every-k", "offload"])
def test_a_recomputed_layer_drops_what_it_dropped(small_model, dropping, mode):
    """Checkpointed, in tiles, or not: one random state, one gradient."""
    from trainer.preflight import apply_memory_choices

    def gradients():
        dropping.model.zero_grad()
        torch.manual_seed(5)
        with dropping.training():
            hidden_rows(dropping, batch_of((12, 9))).square().mean().backward()
        return [parameter.grad.clone() for _, parameter in dropping.trainable()]

    plain = gradients()
    apply_memory_choices(
        dropping,
        recipe_of(checkpointing=mode, checkpoint_every=2 if mode == "every-k" else 1),
    )
    for ours, expected in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(ours, expected)


def losses(result):
    return [step["loss"] for step in result.metrics]


def test_a_run_with_dropout_learns_otherwise_and_the_same_twice(sft, train_run_of):
    def run(dropout, name):
        return losses(
            train_run_of(
                sft(
                    recipe={"lora": {"rank": 4, "dropout": dropout}},
                    train={"output": name, "steps": 4, "lr": 0.05},
                )
            )
        )

    first = run(0.5, "a")
    assert first == run(0.5, "b")
    assert first != run(0.0, "c")


def test_epochs_are_counted_in_samples(sft, train_run_of):
    made = sft(train={"epochs": 2})
    del made["train"]["steps"]
    result = train_run_of(made)
    assert result.steps == 13, "2 x 25 samples, 4 a step"
    assert [step["epoch"] for step in result.metrics][-1] == 2
    with pytest.raises(UsageError, match="epochs: 2 and steps: 5 contradict"):
        train_run_of(sft(train={"epochs": 2, "steps": 5}))


def test_packing_takes_rows_not_samples(sft, train_run_of):
    """25 samples of 10 or 11 tokens: two or three a row of 32."""
    made = sft(recipe={"packing": True}, train={"epochs": 1})
    del made["train"]["steps"]
    packed = train_run_of(made)
    plain = sft(train={"epochs": 1, "output": "plain"})
    del plain["train"]["steps"]
    unpacked = train_run_of(plain)
    assert packed.steps == 4, "13 rows, 4 a step"
    assert sum(step["sequences"] for step in packed.metrics[:3]) > 20
    assert unpacked.steps == 7
    assert all(step["train_tokens"] <= 4 * 32 for step in packed.metrics)


def test_a_packed_step_has_the_loss_and_gradient_of_its_samples(sft, tmp_path):
    from trainer.config import parse_run
    from trainer.data import load_samples
    from trainer.preflight import prepare
    from trainer.sft import loss, make_order, next_batch, split
    from trainer.sft_data import read_examples

    found = []
    batch = None
    for packing in (True, False):
        run, train = parse_run(sft(recipe={"packing": packing, "method": "full"}), root=tmp_path)
        ready = prepare(run, train)
        samples = load_samples(train.dataset, root=tmp_path)
        examples = read_examples(
            samples, ready.policy.tokenizer, train.dataset, limit=32, loss_on="completion"
        )
        order, _ = make_order(examples, run, train)
        batch = batch or next_batch(examples, order, ready=ready)
        tokens = sum(sum(sequence.scored) for sequence in batch)
        for part in split(batch, 64, ready=ready):
            loss(part, ready=ready, num_tokens=tokens)[0].backward()
        found.append({name: p.grad.clone() for name, p in ready.policy.trainable()})
    for name, expected in found[1].items():
        torch.testing.assert_close(found[0][name], expected, rtol=1e-3, atol=1e-6, msg=name)


def test_padding_free_batches_run_no_padding(sft, train_run_of):
    said: list[str] = []
    free = train_run_of(sft(train={"padding_free": True, "output": "free"}), say=said.append)
    (line,) = [line for line in said if line.startswith("padding_free: ")]
    assert (
        "sdpa attention keeps samples apart by a mask: they lie end to end in rows of at most 32"
        in line
    )
    padded = train_run_of(sft(train={"output": "padded"}))
    for one, other in zip(free.metrics, padded.metrics, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["train_tokens"] <= other["train_tokens"]


@pytest.mark.parametrize("alpha", [5.0, 15.0])
def test_noise_is_that_of_transformers(small_model, alpha):
    """The same seed, the same noise: one sample through transformers' own hook and through ours."""
    from transformers.integrations.neftune import activate_neftune, deactivate_neftune

    plain = load_policy(str(small_model), recipe=recipe_of(method="full"))
    noisy = load_policy(str(small_model), recipe=recipe_of(method="full"), neftune_alpha=alpha)
    batch = batch_of((8,))
    seen = {}
    for name, policy in (("theirs", plain), ("ours", noisy)):
        handle = activate_neftune(policy.model, alpha) if name == "theirs" else None
        layer = policy.base.model.layers[0]
        note = layer.register_forward_pre_hook(
            lambda _module, inputs, name=name: seen.__setitem__(name, inputs[0].detach().clone())
        )
        torch.manual_seed(3)
        with policy.training():
            hidden_rows(policy, batch)
        note.remove()
        if handle is not None:
            deactivate_neftune(policy.model, handle)
    torch.testing.assert_close(seen["ours"], seen["theirs"])
    with torch.no_grad():
        assert torch.equal(hidden_rows(noisy, batch), hidden_rows(plain, batch)), "not in scoring"


@pytest.mark.parametrize("layout", list(Layout))
def test_noise_is_scaled_by_each_samples_own_length(small_model, layout):
    policy = load_policy(str(small_model), recipe=recipe_of(method="full"), neftune_alpha=10.0)
    batch = batch_of((20, 5), layout=layout)
    policy.noise.aim(batch)
    embedding = policy.base.get_input_embeddings()
    with torch.no_grad():
        clean = embedding(batch.input_ids)
        embedding.train()
        noise = (embedding(batch.input_ids) - clean).reshape(-1, clean.shape[-1])
        embedding.eval()
    short = noise[20:25]
    assert noise[:20].abs().max() <= 10 / (20 * 64) ** 0.5 * 1.0001
    assert 10 / (20 * 64) ** 0.5 < short.abs().max() <= 10 / (5 * 64) ** 0.5 * 1.0001


@pytest.fixture(scope="module")
def small_moe(tmp_path_factory):
    """Return the folder of a two-layer Mixtral of four experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    from trainer.small_model import small_tokenizer

    folder = tmp_path_factory.mktemp("models") / "moe"
    tokenizer = small_tokenizer(chat=True)
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.02,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    MixtralForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("layout", [Layout.SORTED, Layout.PACKED])
def test_the_balance_of_experts_is_transformers_own(small_moe, layout):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    from trainer.router_loss import balance_loss, real_tokens, router_coefficient

    policy = load_policy(str(small_moe), recipe=recipe_of(method="full"))
    batch = batch_of((9, 4), layout=layout)
    _, routers = hidden_and_routers(policy, batch, routers=True)
    assert int(real_tokens(batch).sum()) == 13
    ours = balance_loss(routers, policy.base.config, batch)
    expected = load_balancing_loss_func(
        routers, 4, 2, attention_mask=batch.attention_mask if layout is Layout.SORTED else None
    )
    torch.testing.assert_close(ours, expected)
    assert router_coefficient(policy.base.config, None) == 0.02
    assert router_coefficient(policy.base.config, 0.0) == 0.0


def test_a_step_adds_the_experts_balance_as_transformers_does(sft, small_moe, tmp_path):
    """Loss and gradients of one micro-batch: the model's own forward with its router's loss."""
    from trainer.config import parse_run
    from trainer.preflight import prepare
    from trainer.sft import loss

    run, train = parse_run(
        sft(
            recipe={"method": "full", "checkpointing": "full", "tiled_mlp": False},
            model=str(small_moe),
        ),
        root=tmp_path,
    )
    ready = prepare(run, train)
    batch = batch_of((9, 4))
    share, said = loss(batch, ready=ready, num_tokens=11, all_tokens=13, coefficient=0.5)
    share.backward()
    ours = {name: parameter.grad.clone() for name, parameter in ready.policy.trainable()}
    model = ready.policy.model
    model.zero_grad()
    model.router_aux_loss_coef = 0.5
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    expected = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        labels=labels,
        output_router_logits=True,
        use_cache=False,
    )
    expected.loss.backward()
    assert share.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    assert said.balance == pytest.approx(expected.aux_loss.item(), rel=1e-5)
    for name, parameter in ready.policy.trainable():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


def test_the_balance_is_logged_and_refused_where_there_is_none(sft, small_moe, train_run_of):
    logged = train_run_of(
        sft(
            recipe={"lora": {"rank": 4, "targets": "attention"}},
            train={"steps": 1},
            model=str(small_moe),
        )
    ).metrics[0]
    assert logged["aux_loss"] > 0
    with pytest.raises(UsageError, match=r"router_aux_loss_coef: 0\.1"):
        train_run_of(sft(train={"router_aux_loss_coef": 0.1, "output": "dense"}))
