"""Which release a file was written for, by the names it uses."""

import json
import re
from pathlib import Path

import pytest

from planner.datafiles import data_dir
from planner.importers import import_config
from planner.importers.context import PACKAGES
from planner.importers.report import report_text
from planner.importers.trl_versions import infer
from planner.importers.versions import stated
from planner.run.recipe import EngineKind, Loss, Task
from tests.planner.importers.test_page import EXAMPLES

MODEL = "m = AutoModelForCausalLM.from_pretrained('Qwen/Qwen2.5-7B')\n"


@pytest.mark.parametrize(
    ("task", "keys", "trainer", "version"),
    [
        (Task.SFT, ["max_length", "packing"], [], None),
        (Task.SFT, ["max_seq_length"], [], "0.19.1"),
        (Task.SFT, ["use_liger"], [], "0.17.0"),
        (Task.SFT, [], ["max_seq_length", "args"], "0.12.2"),
        (Task.SFT, [], ["tokenizer"], "0.11.4"),
        (Task.DPO, [], ["beta", "max_prompt_length"], "0.12.2"),
        (Task.DPO, ["max_prompt_length"], [], "0.28.0"),
        (Task.GRPO, ["vllm_device"], [], "0.17.0"),
        (Task.GRPO, ["vllm_device", "vllm_mode"], [], None),
        (Task.GRPO, ["max_prompt_length", "vllm_mode"], [], "0.27.2"),
        (Task.SFT, ["torch_dtype", "max_length"], [], "0.26.2"),
    ],
)
def test_names_date_a_trl_run(
    task: Task, keys: list[str], trainer: list[str], version: str | None
) -> None:
    found = infer(task, keys, trainer)
    assert (found.version if found else None) == version


def test_the_table_holds_spans_of_releases_that_were_read() -> None:
    table = json.loads((data_dir() / "importers" / "trl_versions.json").read_text(encoding="utf-8"))
    known = [*table["read"], None]
    for fields in table["classes"].values():
        for first, last in fields.values():
            assert first in known
            assert last in known
            assert first is None or last is None or known.index(first) <= known.index(last)


def test_the_report_says_which_release_and_why() -> None:
    found = import_config("trl sft --model_name_or_path Qwen/Qwen3-4B --max_seq_length 64\n")
    assert (found.version, found.report.version_assumed) == ("0.19.1", True)
    assert "max_seq_length was last read by TRL 0.19.1" in report_text(found)
    stated = import_config(
        "trl sft --model_name_or_path Qwen/Qwen3-4B --max_length 64\n", version="0.24.0"
    )
    assert stated.version == "0.24.0"
    assert not stated.report.version_why


def test_flags_and_yaml_of_the_same_keys_are_the_same_run() -> None:
    keys = {
        "model_name_or_path": "Qwen/Qwen2.5-1.5B",
        "max_seq_length": "4096",
        "per_device_train_batch_size": "4",
    }
    flags = " ".join(f"--{key} {value}" for key, value in keys.items())
    yaml = "".join(f"{key}: {value}\n" for key, value in keys.items())
    shell, file = (import_config(text).run.recipe for text in (f"trl sft {flags}\n", yaml))
    assert (
        (shell.context, shell.loss, shell.dtype)
        == (file.context, file.loss, file.dtype)
        == (4096, Loss.FULL, "fp32")
    )


def test_settings_in_an_old_trainers_call_are_read() -> None:
    source = (
        "from trl import SFTTrainer\nfrom transformers import TrainingArguments\n" + MODEL
        + "SFTTrainer(model=m, dataset_text_field='t', max_seq_length=3000, packing=True, "
        "args=TrainingArguments(per_device_train_batch_size=3, output_dir='o'))\n"
    )  # fmt: skip
    found = import_config(source)
    recipe = found.run.recipe
    assert (found.version, recipe.context, recipe.packing, recipe.micro_batch_size) == (
        "0.12.2",
        3000,
        True,
        3,
    )
    assert (recipe.loss, recipe.dtype) == (Loss.FULL, "fp32")


def test_an_old_trainers_call_under_unsloth() -> None:
    source = "from unsloth import FastLanguageModel\nm, t = FastLanguageModel.from_pretrained('unsloth/Qwen3-4B', max_seq_length=4096)\nm = FastLanguageModel.get_peft_model(m, r=8)\nDPOTrainer(model=m, beta=0.3, max_length=700, args=TrainingArguments(per_device_train_batch_size=1, gradient_accumulation_steps=5))\n"
    recipe = import_config(source).run.recipe
    assert (recipe.context, recipe.micro_batch_size, recipe.gradient_accumulation, recipe.beta) == (
        700,
        1,
        5,
        0.3,
    )


def test_a_plain_trainer_is_no_trl() -> None:
    source = (
        MODEL
        + "a = TrainingArguments(output_dir='o', per_device_train_batch_size=2, evaluation_strategy='no')\nTrainer(model=m, args=a)\n"
    )
    found = import_config(source)
    assert (found.tool, found.run.recipe.loss, found.run.recipe.checkpointing) == (
        "hf-trainer",
        "full",
        "none",
    )
    assert found.version == "4.57"
    assert "transformers 4" in found.report.version_why
    assert found.run.recipe.dtype == "fp32"


@pytest.mark.parametrize(
    ("extra", "dtype"),
    [("", "bf16"), (", torch_dtype='float32'", "fp32"), (", dtype='float16'", "fp16")],
)
def test_from_pretrained_without_a_dtype_takes_the_checkpoints(extra: str, dtype: str) -> None:
    source = f"m = AutoModelForCausalLM.from_pretrained('Qwen/Qwen2.5-7B'{extra})\nt = SFTTrainer(model=m, args=SFTConfig(max_length=64))\n"
    assert import_config(source).run.recipe.dtype == dtype


def test_vllm_on_another_gpu() -> None:
    source = (
        MODEL
        + "a = GRPOConfig(use_vllm=True, vllm_device='{0}', max_completion_length=64)\nGRPOTrainer(model=m, args=a)\n"
    )
    other, same = (
        import_config(source.format(device)).run.recipe for device in ("cuda:3", "cuda:0")
    )
    assert (other.engine.kind, same.engine.kind) == (EngineKind.VLLM_SERVER, EngineKind.VLLM_PUSH)


@pytest.mark.parametrize(
    "declared",
    [
        "p.add_argument('--size', type=int, default=7)\nargs = p.parse_args()\nn = args.size",
        "@dataclass\nclass A:\n    size: int = field(default=7, metadata={})\n(args,) = parser.parse()\nn = args.size",
        "import os\nn = int(os.environ.get('N', '7'))",
        "def main(n: int = 7):\n    pass",
        "n = 7 if True else 9",
        "d = {'a': 7}\nn = d['a']",
    ],
)
def test_defaults_of_options_are_constants(declared: str) -> None:
    source = f"{declared}\na = SFTConfig(per_device_train_batch_size=n)\nSFTTrainer(model='Qwen/Qwen3-4B', args=a)\n"
    assert import_config(source).run.recipe.micro_batch_size == 7


def test_device_count_is_what_was_given() -> None:
    source = "import torch\nllm = LLM(model='Qwen/Qwen3-4B', tensor_parallel_size=torch.cuda.device_count())\n"
    assert import_config(source, gpus=4).run.recipe.engine.tensor_parallel == 4
    assert import_config(source).run.recipe.engine.tensor_parallel == 1


@pytest.mark.parametrize(
    ("text", "package", "version"),
    [
        ("INFO api_server.py:1: vLLM API server version 0.9.1\n", "vllm", "0.9.1"),
        ("Unsloth version: 2025.3.19\n", "unsloth", "2025.3.19"),
        ('[[package]]\nname = "trl"\nversion = "0.18.2"\nsource = {}\n', "trl", "0.18.2"),
        ("docker run vllm/vllm-openai:v0.11.1 --model x\n", "vllm", "0.11.1"),
        ("image: lmsysorg/sglang:v0.5.3-cu126\n", "sglang", "0.5.3"),
        ("docker run vllm/vllm-openai:latest --port 8000\n", "vllm", None),
        ("the vllm server has version control\n", "vllm", None),
    ],
)
def test_banners_locks_and_image_tags(text: str, package: str, version: str | None) -> None:
    assert stated(text, package) == version


def test_a_lock_file_beside_the_config_pins_it(tmp_path: Path) -> None:
    config = tmp_path / "sft.yaml"
    config.write_text(
        "model_name_or_path: Qwen/Qwen3-4B\nmax_length: 64\nuse_peft: true\n", encoding="utf-8"
    )
    (tmp_path / "requirements.txt").write_text("torch\ntrl==0.24.0\n", encoding="utf-8")
    found = import_config(config)
    assert (found.version, found.report.version_assumed) == ("0.24.0", False)
    assert found.report.version_why == "requirements.txt beside it pins it"
    assert "trl 0.24.0 (requirements.txt beside it pins it)" in report_text(found)
    assert import_config(config, version="0.18.0").version == "0.18.0"


SUFFIXES = {"torchtitan": ".toml", "prime-rl": ".toml", "unsloth": ".py", "xtuner": ".py"}
WAYS = {
    "requirements.txt": "torch\n{0}=={1}\n",
    "requirements-gpu.txt": "{0}=={1}\n",
    "uv.lock": '[[package]]\nname = "{0}"\nversion = "{1}"\n',
    "poetry.lock": '[[package]]\nname = "{0}"\nversion = "{1}"\n',
    "Pipfile.lock": '{{"default": {{"{0}": {{"hashes": [], "version": "=={1}"}}}}}}\n',
    "pip-freeze.txt": "accelerate==1.1.0\n{0}=={1}\n",
    "pip_list.txt": "Package Version\n------- -------\n{0}    {1}\n",
    "environment.yml": "dependencies:\n  - python=3.11\n  - {0}={1}\n",
    "pyproject.toml": '[project]\ndependencies = ["{0}=={1}"]\n',
    "Dockerfile": "FROM python:3.11\nRUN pip install {0}=={1}\n",
}
"""Files beside a config -> what each says of a package's release."""


@pytest.mark.parametrize(("tool", "text"), [(t, text) for t, text in EXAMPLES if t != "vllm"])
def test_every_tools_release_is_read_from_its_text_and_from_beside_it(
    tool: str, text: str, tmp_path: Path
) -> None:
    package, release = PACKAGES.get(tool, (tool,))[0], import_config(text).version + ".1"
    yaml = ".yaml" if re.match(r"[\w.]+:", text) else ".sh"
    config = tmp_path / f"config{SUFFIXES.get(tool, yaml)}"
    config.write_text(text, encoding="utf-8")
    for name, line in WAYS.items():
        beside = tmp_path / name
        beside.write_text(line.format(package, release), encoding="utf-8")
        found = import_config(config).report
        assert (found.version, found.version_assumed) == (release, False), name
        assert found.version_why == f"{name} beside it pins it"
        beside.unlink()
    found = import_config(f"# pip install {package}=={release}\n{text}").report
    assert (found.version, found.version_why) == (release, f"the file says '{package}=={release}'")
    given = import_config(f"# pip install {package}==0.0.1\n{text}", version=release).report
    assert (given.version, given.version_assumed, given.version_why) == (release, False, "")


def test_an_images_tag_is_the_servers_release() -> None:
    text = dict(EXAMPLES)["vllm"]
    found = import_config(text).report
    assert (found.version, found.version_why) == ("0.11.1", "the file says 'vllm-openai:v0.11.1'")
    assert import_config(text, version="0.10.2").version == "0.10.2"


def test_flags_of_vllms_first_engine_date_it() -> None:
    found = import_config("vllm serve Qwen/Qwen3-8B --num-scheduler-steps 8 --max-model-len 64\n")
    assert found.version == "0.10.2"
    assert "V0" in found.report.version_why
