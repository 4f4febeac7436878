"""A model of 0.1 M parameters that every trainer test shares, and run documents over it."""

import copy

import pytest


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """Return the folder of a two-layer Llama with one token a character."""
    from trainer.small_model import make_small_model

    folder = tmp_path_factory.mktemp("models") / "small"
    # with the usual 0.02 the logits of so small a model are all but equal, whatever adapters do
    return make_small_model(folder, chat=True, initializer_range=0.1)


@pytest.fixture(scope="session")
def qwen2_folder(tmp_path_factory):
    """Return the folder of a two-layer Qwen2 that vLLM runs; its embedding, tied, is padded there."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    path = tmp_path_factory.mktemp("qwen2")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=500,  # not a multiple of 64: vLLM pads the embedding to 512
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=1,
    )
    AutoModelForCausalLM.from_config(config).float().save_pretrained(path)
    return str(path)


@pytest.fixture
def document(small_model, tmp_path):
    """Return a function that makes a GRPO run document; keyword arguments change recipe and train."""
    base = {
        "model": str(small_model),
        "recipe": {
            "task": "grpo",
            "method": "lora",
            "dtype": "fp32",
            "num_generations": 4,
            "micro_batch_size": 16,
            "prompt_length": 40,
            "completion_length": 6,
            "lora": {"rank": 4},
        },
        "train": {
            "output": str(tmp_path / "out"),
            "dataset": {"name": "arithmetic", "options": {"digits": 1, "size": 64}},
            "rewards": [{"name": "format", "options": {"pattern": ".*[0-9].*"}}],
            "steps": 2,
            "lr": 1e-3,
            "preflight": False,
            "print_completions": 0,
        },
    }

    def make(*, recipe=None, train=None, **top):
        made = copy.deepcopy(base) | top
        made["recipe"] |= recipe or {}
        made["train"] |= train or {}
        return made

    return make


@pytest.fixture
def train_run_of(tmp_path):
    """Return a function that runs a document and returns its Result."""
    from trainer.config import parse_run
    from trainer.run import train_parsed

    def run(made, **options):
        run_file, train = parse_run(made, root=tmp_path)
        return train_parsed(run_file, train, root=tmp_path, **options)

    return run
