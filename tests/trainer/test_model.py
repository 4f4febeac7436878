import pytest
import torch

from planner.errors import UnsupportedError, UsageError
from planner.run.recipe import Recipe
from trainer.batching import Layout, ScoredSequence, collate
from trainer.model import eos_ids, load_policy
from trainer.scoring import hidden_rows, log_probs

SEQUENCE = ScoredSequence(
    token_ids=(5, 9, 14, 3, 22, 8), scored=(False, False, True, True, True, True)
)


def policy_of(source, **recipe):
    return load_policy(str(source), recipe=Recipe(**{"dtype": "fp32", **recipe}))


def naive(model, sequence=SEQUENCE):
    """Return log-probabilities of the scored tokens from the model's own full logits."""
    ids = torch.tensor([sequence.token_ids])
    logp = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
    picked = logp.gather(-1, ids[0, 1:, None])[:, 0]
    return picked[torch.tensor(sequence.scored[1:])]


def ours(policy):
    batch = collate([SEQUENCE], [0], layout=Layout.SORTED)
    return log_probs(policy, batch, hidden_rows(policy, batch)).logp


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("fp32", torch.float32),
        (None, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_weights_have_the_asked_dtype_and_no_other(small_model, dtype, expected, method):
    policy = policy_of(small_model, dtype=dtype, method=method)
    assert {parameter.dtype for parameter in policy.model.parameters()} == {expected}


def test_adapters_are_trained_alone_and_may_have_their_own_dtype(small_model):
    policy = policy_of(small_model, dtype="bf16", lora={"rank": 4, "dtype": "fp32"})
    names = [name for name, _ in policy.trainable()]
    assert names
    assert all("lora_" in name for name in names)
    assert {parameter.dtype for _, parameter in policy.trainable()} == {torch.float32}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (
            "all-linear",
            {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        ),
        ("attention", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("mlp", {"gate_proj", "up_proj", "down_proj"}),
        (("q_proj",), {"q_proj"}),
    ],
    ids=["all", "attention", "mlp", "named"],
)
def test_lora_targets(small_model, targets, expected):
    policy = policy_of(small_model, lora={"rank": 2, "targets": targets})
    assert {name.split(".")[-4] for name, _ in policy.trainable()} == expected


def test_adapters_act_at_twice_the_rank_unless_told_otherwise(small_model):
    recipe = Recipe(dtype="fp32", lora={"rank": 4, "targets": ("q_proj",)})
    for alpha, scale in ((None, 2.0), (4.0, 1.0)):
        policy = load_policy(str(small_model), recipe=recipe, lora_alpha=alpha)
        assert policy.base.model.layers[0].self_attn.q_proj.scaling == {"default": scale}


def test_the_same_seed_gives_the_same_adapters(small_model):
    first, second = policy_of(small_model), policy_of(small_model)
    for (name, one), (_, other) in zip(first.trainable(), second.trainable(), strict=True):
        assert torch.equal(one, other), name


def test_the_reference_is_the_base_model(small_model):
    policy = policy_of(small_model, method="lora")
    base = naive(policy_of(small_model, method="full").model)
    with torch.no_grad():
        for _, parameter in policy.trainable():
            parameter.add_(0.1)
        assert not torch.allclose(ours(policy).double(), base, atol=1e-3)
        with policy.reference():
            torch.testing.assert_close(ours(policy).double(), base, rtol=1e-5, atol=1e-6)


def test_full_training_has_no_reference(small_model):
    policy = policy_of(small_model, method="full")
    with pytest.raises(UnsupportedError, match=r"recipe\.beta"), policy.reference():
        pass


def family(name, tmp_path):
    """Save a tiny model whose head is not plain."""
    import transformers

    from trainer.small_model import small_tokenizer

    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    config = {
        "gemma2": lambda: transformers.Gemma2Config(
            **sizes, head_dim=16, final_logit_softcapping=3.0, sliding_window=4
        ),
        "granite": lambda: transformers.GraniteConfig(**sizes, logits_scaling=4.0),
        "cohere": lambda: transformers.CohereConfig(**sizes, logit_scale=0.25),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=96, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
        ),
    }[name]()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    model.save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["gemma2", "granite", "cohere", "gpt2"])
def test_soft_caps_and_logit_scales_are_the_models_own(tmp_path, name):
    policy = policy_of(family(name, tmp_path), method="full")
    with torch.no_grad():
        torch.testing.assert_close(ours(policy).double(), naive(policy.model), rtol=1e-5, atol=1e-5)


def test_qlora_gradients_are_those_of_the_dequantised_base(small_model):
    pytest.importorskip("bitsandbytes")
    import bitsandbytes.functional as functional

    policy = policy_of(small_model, method="qlora", lora={"rank": 4})
    with torch.no_grad():  # B starts at 0, which would hide A's gradient
        for name, parameter in policy.trainable():
            if "lora_B" in name:
                parameter.fill_(0.05)
    # generation first: an eval-mode 4-bit linear would repack itself for a kernel without backward
    with torch.no_grad():
        ours(policy)
    ours(policy).sum().backward()
    quantised = [
        (name, module)
        for name, module in policy.model.named_modules()
        if name.endswith("base_layer")
    ]
    assert len(quantised) == 14
    reference = policy_of(small_model, method="lora", lora={"rank": 4})
    modules = dict(reference.model.named_modules())
    with torch.no_grad():
        for name, module in quantised:
            modules[name].weight.copy_(
                functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            )
        for (_, one), (_, other) in zip(policy.trainable(), reference.trainable(), strict=True):
            other.copy_(one)
    ours(reference).sum().backward()
    for (name, one), (_, other) in zip(policy.trainable(), reference.trainable(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_qlora_weighs_half_a_byte(small_model):
    pytest.importorskip("bitsandbytes")
    policy = policy_of(small_model, method="qlora", dtype="bf16")
    linear = policy.base.model.layers[0].mlp.gate_proj.base_layer.weight
    assert linear.dtype == torch.uint8
    assert linear.numel() * 2 == 64 * 128


@pytest.mark.parametrize(
    ("source", "recipe", "said"),
    [
        ("nowhere/at-all", {}, "no tokenizer at 'nowhere/at-all'"),
        (None, {"dtype": "int8"}, "recipe.dtype: 'int8'"),
        (None, {"lora": {"targets": ("nothing",)}}, "lora.targets: nothing matches no layer"),
    ],
    ids=["model", "dtype", "targets"],
)
def test_what_cannot_be_loaded_is_one_line(small_model, source, recipe, said):
    with pytest.raises(UsageError) as caught:
        policy_of(source or small_model, **recipe)
    assert said in caught.value.message
    assert "\n" not in caught.value.message


def test_a_folder_without_weights_is_one_line(small_model, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((small_model / name).read_bytes())
    with pytest.raises(UsageError, match="model: cannot load"):
        policy_of(tmp_path)


def test_every_end_of_text_token_ends_a_completion(small_model):
    policy = policy_of(small_model)
    policy.base.generation_config.eos_token_id = [2, 7]
    assert eos_ids(policy) == (2, 7)
