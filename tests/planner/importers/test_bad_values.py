"""A value that a key cannot have is refused by the key's name in every importer, never replaced by a default."""

import json
import re
from collections.abc import Iterator

import pytest

from planner.errors import UsageError
from planner.importers import import_config
from planner.importers.loading import load_yaml
from planner.importers.settings import Settings, as_int, as_real
from planner.importers.toml_files import load_toml
from tests.planner.importers.test_page import EXAMPLES

TEXTS = {name: text for name, text in EXAMPLES if name not in ("unsloth", "xtuner", "vllm")}
"""The page's examples; two are programs, whose calls are SOURCES below, one a manifest."""
TEXTS["vllm"] = "vllm serve Qwen/Qwen3-8B --max-model-len 8192 --enable-lora\n"
DERIVED = {"recomputes", "adapter_rank", "tensor", "pipeline", "context", "expert", "engine_tensor"}
"""Names that importers give what they worked out of other keys."""
UNUSED = {("areal", "actor.lora_rank")}
"""Has no meaning without another key (use_lora)."""
COUNTS = ("0", "-3", "2.5", "1e-5", "two", "[4]", "true", "nan")
NUMBERS = ("half", "nan", "[0.5]", "true")
SWITCHES = ("perhaps", "2", "-1")
BAD = {"count": COUNTS, "number": NUMBERS, "flag": SWITCHES}


def asked(text: str) -> dict[str, tuple[str, bool]]:
    """Return the keys that an importer asks for: how it reads them, and whether 0 is a value."""
    found: dict[str, tuple[str, bool]] = {}
    plain = {name: getattr(Settings, name) for name in BAD}

    def listening(name: str) -> object:
        def read(self: Settings, *keys: str, **rest: object) -> object:
            found.setdefault(keys[0], (name, bool(rest.get("off"))))
            return plain[name](self, *keys, **rest)

        return read

    with pytest.MonkeyPatch.context() as patch:
        for name in BAD:
            patch.setattr(Settings, name, listening(name))
        import_config(text)
    return found


def with_value(text: str, key: str, value: str) -> str:
    """Return an example with one key set to something."""
    if load_toml(text, named=False) is not None:
        return _in_toml(text, key, value)
    if re.match(r"[\w.]*: |[\w]+:\n", text):
        document = load_yaml(text)
        assert isinstance(document, dict)
        return _dumped(document, key, value)
    flag = f" {key}={value}" if "." in key else f" --{key} {value}"
    return text.rstrip("\n") + flag + "\n"


def _in_toml(text: str, key: str, value: str) -> str:
    *path, last = key.split(".")
    head = f"[{'.'.join(path)}]"
    word = value if re.fullmatch(r"[-\d.e\[\]]+|true|nan", value) else f'"{value}"'
    kept = [line for line in text.splitlines() if not line.startswith(f"{last} =")]
    if not path:
        kept.insert(0, f"{last} = {word}")
    elif head in kept:
        kept.insert(kept.index(head) + 1, f"{last} = {word}")
    else:
        kept += [head, f"{last} = {word}"]
    return "\n".join(kept) + "\n"


def _dumped(document: dict[str, object], key: str, value: str) -> str:
    """Return the document as JSON, which is YAML, with a dotted key set."""
    *path, last = key.split(".")
    inner: object = document
    for part in path:
        assert isinstance(inner, dict)
        if not isinstance(inner.get(part), dict):
            inner[part] = {}
        inner = inner[part]
    assert isinstance(inner, dict)
    inner[last] = load_yaml(f"v: {value}")["v"]
    return json.dumps(document) + "\n"


def cases(tool: str) -> Iterator[tuple[str, str, str]]:
    """Return key, value and text of everything that the tool's example cannot say."""
    text = TEXTS[tool]
    for key, (name, off) in asked(text).items():
        if key in DERIVED or (tool, key) in UNUSED:
            continue
        for value in BAD[name]:
            if not (off and value in ("0", "-3")):
                yield key, value, with_value(text, key, value)


@pytest.mark.parametrize("tool", sorted(TEXTS))
def test_nonsense_is_refused_by_its_keys_name(tool: str) -> None:
    tried, silent = 0, []
    for key, value, text in cases(tool):
        tried += 1
        try:
            import_config(text)
        except UsageError as error:
            if re.split(r"[.-]", key)[-1] not in error.message.replace("-", "_"):
                silent.append((key, value, error.message))
        else:
            silent.append((key, value, "taken"))
    assert not silent
    assert tried > 10


@pytest.mark.parametrize(
    ("tool", "key"),
    [
        ("axolotl", "rl"),
        ("axolotl", "adapter"),
        ("axolotl", "gradient_checkpointing"),
        ("llamafactory", "flash_attn"),
        ("trl", "dtype"),
        ("hf-trainer", "fsdp"),
        ("torchtitan", "activation_checkpoint.mode"),
        ("ms-swift", "rlhf_type"),
        ("litgpt", "quantize"),
        ("llm-foundry", "precision"),
        ("verl", "algorithm.adv_estimator"),
        ("skyrl", "trainer.strategy"),
        ("slime", "recompute_granularity"),
        ("areal", "allocation_mode"),
        ("roll", "actor_train.device_mapping"),
        ("sglang", "kv-cache-dtype"),
        ("vllm", "quantization"),
    ],
)
@pytest.mark.parametrize("word", ["zorgl", "${CHOSEN}"])
def test_a_word_that_no_tool_has_is_reported(tool: str, key: str, word: str) -> None:
    found = import_config(with_value(TEXTS[tool], key, word))
    said = {row.value for row in found.report.not_understood}
    assert {word, "", "$CHOSEN"} & said or any(word in each for each in found.report.effects)


SOURCES = {
    "from unsloth import FastLanguageModel\nm, t = FastLanguageModel.from_pretrained('unsloth/Qwen3-4B', max_seq_length={0})\nm = FastLanguageModel.get_peft_model(m, r=8)\n": "max_seq_length",
    "from unsloth import FastLanguageModel\nm, t = FastLanguageModel.from_pretrained('unsloth/Qwen3-4B')\nm = FastLanguageModel.get_peft_model(m, r={0})\n": "r",
    "m = AutoModelForCausalLM.from_pretrained('Qwen/Qwen2.5-7B')\nt = SFTTrainer(model=m, args=SFTConfig(per_device_train_batch_size={0}))\n": "per_device_train_batch_size",
    "m = AutoModelForCausalLM.from_pretrained('Qwen/Qwen2.5-7B')\nTrainer(model=m, args=TrainingArguments(output_dir='o', gradient_accumulation_steps={0}))\n": "gradient_accumulation_steps",
    "from vllm import LLM\nllm = LLM(model='Qwen/Qwen3-4B', max_model_len={0})\n": "max_model_len",
    "pretrained_model_name_or_path = 'internlm/internlm2-chat-7b'\nmax_length = {0}\nmodel = dict(type=SupervisedFinetune, llm=dict(torch_dtype=torch.float16))\n": "max_length",
}


@pytest.mark.parametrize(("source", "key"), SOURCES.items())
@pytest.mark.parametrize("value", ["0", "-2", "2.5", "'two'"])
def test_nonsense_in_a_program_is_refused_too(source: str, key: str, value: str) -> None:
    with pytest.raises(UsageError, match=key.replace("_", "[_-]")):
        import_config(source.format(value))


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("8k", 8000),
        ("8K", 8192),
        ("20g", 20 * 10**9),
        ("1.5G", 3 * 2**29),
        ("1_024", 1024),
        ("1e4", 10_000),
        (4.0, 4),
        ("1e-5", None),
        ("2.5", None),
        (True, None),
        ("4 4", None),
    ],
)
def test_whole_numbers_as_tools_spell_them(value: object, number: int | None) -> None:
    assert as_int(value) == number


def test_a_number_is_finite() -> None:
    assert [as_real(value) for value in ("nan", "inf", True, None, "1e-5")] == [*[None] * 4, 1e-5]


@pytest.mark.parametrize("word", ["null", "none", "''"])
def test_an_empty_value_is_the_default(word: str) -> None:
    found = import_config(f"base_model: x/y\nmicro_batch_size: {word}\n")
    assert found.run.recipe.micro_batch_size == 1
    assert "micro_batch_size" in {row.field for row in found.report.defaulted}


def test_none_is_said_where_zero_means_it() -> None:
    found = import_config("base_model: Qwen/Qwen3-4B\nsequence_len: 64\ncontext_parallel_size: 0\n")
    assert found.run.recipe.context == 64
    assert "context_parallel_size" in {row.key for row in found.report.taken}
