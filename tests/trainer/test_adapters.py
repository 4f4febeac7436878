"""Every kind of adapter: what it starts as, what a checkpoint brings back, what merging makes of it."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from planner.errors import VramwiseError
from planner.run.runfile import make_recipe
from trainer import checkpoint
from trainer.config import parse_run
from trainer.merge import merge_checkpoint
from trainer.model import load_policy
from trainer.small_model import make_small_model

IDS = torch.arange(3, 19).reshape(2, 8)
KINDS = {
    "rslora": {"use_rslora": True},
    "gaussian": {"init": "gaussian"},
    "dora": {"dora": True},
    "pissa": {"init": "pissa"},
    "pissa_rslora": {"init": "pissa_niter_4", "use_rslora": True},
    "bias_all": {"bias": "all"},
    "bias_lora_only": {"bias": "lora_only", "targets": ["q_proj"]},
    "embedding": {"modules_to_save": ["embed_tokens"]},
    "head": {"modules_to_save": ["lm_head"]},
    "norms": {"modules_to_save": ["norm"]},
}


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """Return the folder of a small tied model whose projections have biases that are not zero."""
    folder = make_small_model(
        tmp_path_factory.mktemp("biased") / "m", initializer_range=0.1, attention_bias=True
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    return folder


def policy_of(folder, *, beta=0.0, method="lora", dtype="fp32", alpha=None, **lora):
    recipe = make_recipe(
        task="grpo",
        method=method,
        dtype=dtype,
        beta=beta,
        lora={"rank": 4} | lora,
        attention="eager",
    )
    return load_policy(str(folder), recipe=recipe, lora_alpha=alpha)


@torch.no_grad()
def logits(policy):
    return policy.model(input_ids=IDS).logits


@torch.no_grad()
def train(policy, seed=3):
    """Move everything that is trained."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in policy.trainable():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_starts_as_the_base_and_comes_back_and_merges(kind, biased, tmp_path):
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(biased)(input_ids=IDS).logits
    policy = policy_of(biased, beta=0.1, **KINDS[kind])
    assert torch.allclose(logits(policy), base, atol=2e-4)
    train(policy)
    moved = logits(policy)
    assert not torch.allclose(moved, base, atol=1e-2)
    with policy.reference():
        assert torch.allclose(logits(policy), base, atol=2e-4)
    assert torch.equal(logits(policy), moved)

    folder = tmp_path / "checkpoint"
    folder.mkdir()
    checkpoint.write_weights(policy, folder)
    again = policy_of(biased, beta=0.1, **KINDS[kind])
    checkpoint.read_weights(again, folder)
    assert torch.allclose(logits(again), moved, atol=1e-6)
    with again.reference():
        assert torch.allclose(logits(again), base, atol=2e-4)

    merge_checkpoint(folder, tmp_path / "merged", base=str(biased), dtype="fp32")
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=IDS).logits
    assert torch.allclose(merged, moved, atol=5e-4)


def test_rank_stabilised_adapters_act_at_alpha_over_the_root(biased):
    policy = policy_of(biased, use_rslora=True, alpha=6.0)
    layer = policy.base.model.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == pytest.approx(6 / math.sqrt(4))
    assert (
        policy_of(biased, use_rslora=True).base.model.layers[0].self_attn.q_proj.scaling["default"]
        == 2
    )


def test_pissa_takes_the_first_singular_vectors_out_of_the_base(biased):
    original = AutoModelForCausalLM.from_pretrained(biased).model.layers[1].mlp.up_proj.weight
    layer = policy_of(biased, init="pissa").base.model.layers[1].mlp.up_proj
    values = torch.linalg.svdvals(original.detach())
    left = torch.linalg.svdvals(layer.get_base_layer().weight.detach())
    assert torch.allclose(left[: len(values) - 4], values[4:], atol=1e-4)
    assert torch.allclose(torch.linalg.svdvals(layer.get_delta_weight("default").detach())[:4], values[:4], atol=1e-4)  # fmt: skip


def test_a_pissa_checkpoint_of_another_decomposition_sets_the_base_right(biased, tmp_path):
    """Singular vectors have no sign of their own: another machine may choose the other."""
    policy = policy_of(biased, init="pissa")
    train(policy)
    checkpoint.write_weights(policy, tmp_path)
    other = policy_of(biased, init="pissa_niter_1")
    checkpoint.read_weights(other, tmp_path)
    assert torch.allclose(logits(other), logits(policy), atol=2e-4)


def test_a_tied_head_moves_with_its_embedding(biased):
    policy = policy_of(biased, modules_to_save=["embed_tokens"])
    assert policy.base.get_output_embeddings().weight is policy.base.get_input_embeddings().weight
    assert policy.head.weight.requires_grad


def test_copies_and_biases_keep_the_bases_dtype(biased):
    recipe = make_recipe(
        method="lora", dtype="bf16", lora={"rank": 4, "dtype": "fp32", "bias": "all", "modules_to_save": ["norm"]}
    )  # fmt: skip
    policy = load_policy(str(biased), recipe=recipe)
    widths = {"lora" if "lora_" in name else "rest": p.dtype for name, p in policy.trainable()}
    assert widths == {"lora": torch.float32, "rest": torch.bfloat16}


# an adapter that exists already


@pytest.fixture(scope="module")
def begun(biased, tmp_path_factory):
    """Return a folder with a trained DoRA-free adapter of rank 3 on two projections."""
    folder = tmp_path_factory.mktemp("begun")
    policy = policy_of(biased, rank=3, targets=["q_proj", "up_proj"], alpha=7.0)
    train(policy)
    checkpoint.write_weights(policy, folder)
    return folder, logits(policy)


def test_an_adapter_goes_on_where_it_was(biased, begun):
    folder, moved = begun
    policy = policy_of(
        biased, beta=0.1, rank=3, targets=["q_proj", "up_proj"], **{"from": str(folder)}
    )
    assert torch.allclose(logits(policy), moved, atol=1e-6)
    config = policy.model.peft_config["default"]
    assert (config.r, config.lora_alpha, sorted(config.target_modules)) == (3, 7.0, ["q_proj", "up_proj"])  # fmt: skip
    train(policy)
    # as TRL has it: the reference is the policy that the run began with, not the bare base
    with policy.reference():
        assert torch.allclose(logits(policy), moved, atol=1e-6)


def test_a_four_bit_base_goes_on_with_an_adapter(biased, begun, tmp_path):
    folder, _ = begun
    policy = policy_of(
        biased, method="qlora", dtype="bf16", beta=0.1, rank=3, targets=["q_proj", "up_proj"],
        **{"from": str(folder), "bias": "none"},
    )  # fmt: skip
    began = logits(policy)
    plain = policy_of(
        biased, method="qlora", dtype="bf16", rank=3, targets=["q_proj", "up_proj"], alpha=7.0
    )
    assert not torch.allclose(began, logits(plain), atol=1e-1)
    train(policy)
    checkpoint.write_weights(policy, tmp_path)
    checkpoint.read_weights(plain, tmp_path)
    assert torch.allclose(logits(plain), logits(policy), atol=1e-2)
    with policy.reference():
        assert torch.allclose(logits(policy), began, atol=1e-2)


def test_adapters_on_fused_experts_merge(tmp_path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from trainer.small_model import small_tokenizer

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=96, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
            initializer_range=0.2,
        )
    )  # fmt: skip
    model.save_pretrained(tmp_path / "base")
    small_tokenizer().save_pretrained(tmp_path / "base")
    policy = policy_of(
        tmp_path / "base", targets=["q_proj"], target_parameters=["mlp.experts.down_proj"]
    )
    train(policy)
    (tmp_path / "adapter").mkdir()
    checkpoint.write_weights(policy, tmp_path / "adapter")
    merge_checkpoint(
        tmp_path / "adapter", tmp_path / "merged", base=str(tmp_path / "base"), dtype="fp32"
    )
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=IDS).logits
    assert torch.allclose(merged, logits(policy), atol=5e-4)


def test_an_adapter_of_another_model_is_one_line(small_model, begun, tmp_path_factory):
    other = make_small_model(tmp_path_factory.mktemp("wide") / "m", hidden=32)
    with pytest.raises(VramwiseError, match=r"lora\.from: .*size mismatch"):
        policy_of(other, rank=3, targets=["q_proj", "up_proj"], **{"from": str(begun[0])})


def run_document(biased, folder, tmp_path, **train):
    return {
        "model": str(biased),
        "recipe": {
            "task": "sft", "method": "lora", "dtype": "fp32", "context": 24, "micro_batch_size": 2,
            "lora": {"from": str(folder)},
        },
        "train": {
            "output": str(tmp_path / "out"), "dataset": "rows.jsonl", "steps": 2, "lr": 1e-2,
            "preflight": False, "print_completions": 0, "save_every": 1,
        } | train,
    }  # fmt: skip


def test_sft_goes_on_with_an_adapter_and_resumes(biased, begun, tmp_path):
    from trainer.run import train_parsed

    rows = [json.dumps({"prompt": f"{n}+{n}=", "completion": f"{2 * n}"}) for n in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    said = []
    for steps, resume in ((1, False), (2, True)):
        run, section = parse_run(
            run_document(biased, begun[0], tmp_path, steps=steps), root=tmp_path
        )
        result = train_parsed(run, section, root=tmp_path, resume=resume, say=said.append)
    assert result.steps == 2
    written = json.loads(
        (tmp_path / "out/checkpoints/step-00000002/adapter_config.json").read_text("utf-8")
    )
    assert (written["r"], written["lora_alpha"]) == (3, 7.0)
    run, section = parse_run(
        run_document(biased, begun[0], tmp_path, output=str(tmp_path / "whole")), root=tmp_path
    )
    whole = train_parsed(run, section, root=tmp_path)
    assert whole.metrics[-1]["loss"] == pytest.approx(result.metrics[-1]["loss"], rel=1e-5)
    assert "from: " in (tmp_path / "out/run.yaml").read_text("utf-8")


def test_grpo_goes_on_with_an_adapter_and_is_held_to_it(document, train_run_of, biased, begun):
    recipe = {"beta": 0.1, "lora": {"from": str(begun[0])}}
    result = train_run_of(document(model=str(biased), recipe=recipe, train={"steps": 1}))
    # before the first step the policy is its reference
    assert result.metrics[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert result.steps == 1


@pytest.mark.parametrize(
    ("recipe", "train", "named"),
    [
        ({"lora": {"init": "pissa"}, "method": "qlora"}, {}, "recipe.lora.init"),
        ({"lora": {"init": "pissa", "dora": True}}, {}, "recipe.lora.init"),
        ({"lora": {"init": "svd"}}, {}, "lora.init"),
        ({"lora": {"init": "pissa"}, "engine": {"kind": "vllm-shared"}}, {}, "recipe.lora.init"),
        ({"lora": {"modules_to_save": ["lm_head"]}, "engine": {"kind": "vllm-shared"}}, {}, "recipe.lora.modules_to_save"),
        ({"lora": {"target_parameters": ["mlp.experts.down_proj"]}, "engine": {"kind": "vllm-push"}}, {}, "recipe.lora.target_parameters"),
        ({"lora": {"bias": "lora"}}, {}, "lora.bias"),
        ({"lora": {"from": "somewhere"}}, {"lora_alpha": 4.0}, "train.lora_alpha"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_by_name(recipe, train, named, document, tmp_path):
    with pytest.raises(VramwiseError) as caught:
        parse_run(document(recipe=recipe, train=train), root=tmp_path)
    assert named in caught.value.message
    assert caught.value.hint


def test_an_adapted_head_is_refused(biased):
    with pytest.raises(VramwiseError, match="lm_head cannot be adapted"):
        policy_of(biased, targets=["q_proj", "lm_head"])


def test_packed_weights_are_not_trained_whole(biased):
    with pytest.raises(VramwiseError, match="q_proj is quantised"):
        policy_of(
            biased, method="qlora", dtype="bf16", targets=["v_proj"], modules_to_save=["q_proj"]
        )
