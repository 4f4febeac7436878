"""A small Llama with one token a character, made on the spot: for tests, and for a demo offline."""

from pathlib import Path
from typing import Any

import torch

PAD, BEGIN, END = "<pad>", "<s>", "</s>"
CHARACTERS = (
    "\n 0123456789+-*=abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:;?!'\"()<>_|/#"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_small_model(
    folder: Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    intermediate: int = 128,
    vocab: int | None = None,
    chat: bool = False,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write config, random fp32 weights and tokenizer to `folder`; the same seed, the same bytes.

    `vocab` over the number of characters leaves ids that no text has. More Llama settings in `config`.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = small_tokenizer(chat=chat)
    settings = LlamaConfig(
        vocab_size=max(vocab or 0, len(tokenizer)),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=2048,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **{"tie_word_embeddings": True, "num_key_value_heads": max(1, heads // 2), **config},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(settings)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def small_tokenizer(*, chat: bool = False) -> Any:
    """Return a tokenizer with one token a character; no token is added to a text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((PAD, BEGIN, END, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="_"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BEGIN,
        eos_token=END,
        chat_template=CHAT_TEMPLATE if chat else None,
        clean_up_tokenization_spaces=False,
    )
