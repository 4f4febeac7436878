"""What people type: names in any spelling, memory as a card, counts, pasted commands, standard input, GGUF files."""

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.cli import main
from planner.errors import UnknownNameError, UsageError, VramwiseError
from planner.importers.typed import typed_model
from planner.machines.machine import find_gpu, gpu_catalogue, gpus_like, make_machine
from planner.models.catalogue import catalogue_names, models_like
from planner.models.gguf import base_of, kind_of, merged
from planner.names import OPTIMIZER_WORDS, TASK_WORDS, word_of
from planner.units import GiB, parse_count, parse_memory
from planner.verbs.typed import is_command, rejoined


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("llama 3.1 8b", "llama-3.1-8b"),
        ("Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("qwen 3 8b", "qwen3-8b"),
        ("phi4", "phi-4"),
        ("8b qwen3.5 9b".removeprefix("8b "), "qwen3.5-9b"),
        ("GPT OSS 20B", "gpt-oss-20b"),
    ],
)
def test_a_model_in_any_spelling(typed: str, name: str) -> None:
    assert typed_model(typed, offline=True).model.name == name


def test_every_name_and_card_means_itself() -> None:
    assert all(models_like(name) == (name,) for name in catalogue_names())
    for gpu in gpu_catalogue().values():
        assert find_gpu(gpu.id) is gpu


def test_a_derivative_and_a_hub_id_offline() -> None:
    found = typed_model("NousResearch/Hermes-3-Llama-3.1-8B", offline=True)
    assert found.model.name == "llama-3.1-8b"
    assert "has the shapes of" in found.said


@pytest.mark.parametrize(
    ("typed", "near"), [("lama-3.1-8b", "llama-3.1-8b"), ("qwen3-9b", "qwen3")]
)
def test_a_typing_error_is_not_taken_for_a_model(typed: str, near: str) -> None:
    with pytest.raises(UnknownNameError) as error:
        typed_model(typed, offline=True)
    assert near in str(error.value.hint)


def test_a_name_of_several_models_asks_which() -> None:
    with pytest.raises(UsageError, match="could be several") as error:
        typed_model("llama 8b", offline=True)
    assert "llama-3.1-8b" in str(error.value.hint)


@pytest.mark.parametrize(
    ("typed", "gpu"),
    [
        ("4090 laptop", "rtx-4090-laptop"),
        ("rtx-4090-laptop", "rtx-4090-laptop"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090-laptop"),
        ("rtx4090laptop", "rtx-4090-laptop"),
        ("rtx 4090", "rtx-4090"),
        ("4070 Laptop", "rtx-4070-laptop"),
        ("strix halo", "strix-halo-128gb"),
        ("MacBook M4 Pro 48 GB", "apple-m4-pro-48gb"),
        ("H100 80GB", "h100-sxm"),
    ],
)
def test_a_card_in_any_spelling(typed: str, gpu: str) -> None:
    assert find_gpu(typed).id == gpu
    assert gpus_like(typed)[0] == gpu


SPELLINGS = json.loads(Path(__file__).with_name("typed_names.json").read_text(encoding="utf-8"))


def meant(kind: str, typed: str) -> tuple[str, bool]:
    """Return what a name is taken for, or else the first name that the refusal offers; and whether it was taken."""
    try:
        if kind == "models":
            return typed_model(typed, offline=True).model.name, True
        gpu = make_machine(typed).gpu
        return (gpu.id if gpu else ""), True
    except VramwiseError as error:
        offered = re.search(r"(?:say which: |did you mean )([^,;?]+)", str(error.hint))
        return (offered[1].strip() if offered else ""), False


@pytest.mark.parametrize(
    ("kind", "count", "least_taken", "least_right"),
    [("models", 75, 72, 74), ("cards", 48, 47, 47)],
)
def test_what_people_write_in_posts(
    kind: str, count: int, least_taken: int, least_right: int
) -> None:
    """The floors are what was measured; the rest is two names of which several are right."""
    found = [(typed, right, *meant(kind, typed)) for typed, right in SPELLINGS[kind]]
    wrong = [(typed, right, got) for typed, right, got, _ in found if got != right]
    assert len(found) == count
    assert len(found) - len(wrong) >= least_right, wrong
    assert sum(taken and got == right for _, right, got, taken in found) >= least_taken, wrong


@pytest.mark.parametrize(
    ("typed", "gpu"),
    [
        ("GTX 3090", "rtx-3090"),
        ("nvidia 3090 with 24G", "rtx-3090"),
        ("RTX 3070 8GB", "rtx-3070"),
        ("macbook pro m3 max 64gb", "apple-m3-max-64gb"),
        ("MacBook Air M3 16GB", "apple-m3-16gb"),
        ("iMac M3 24GB", "apple-m3-24gb"),
    ],
)
def test_the_computer_and_the_memory_beside_a_card(typed: str, gpu: str) -> None:
    assert find_gpu(typed).id == gpu


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("2x3090", "--gpu rtx-3090 --gpus 2"),
        ("8 x H100", "--gpu h100-sxm --gpus 8"),
        ("3090 x2", "--gpu rtx-3090 --gpus 2"),
    ],
)
def test_a_count_beside_a_card_says_where_it_goes(typed: str, hint: str) -> None:
    with pytest.raises(UsageError, match="counts cards") as error:
        find_gpu(typed)
    assert error.value.hint == hint


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("qwen3 30b", "qwen3-30b-a3b"),
        ("llama 3.1 8b instruct q4", "llama-3.1-8b"),
        ("qwen2.5:7b-instruct-q4_K_M", "qwen2.5-7b"),
        ("Llama 3.1 8B (4bit)", "llama-3.1-8b"),
    ],
)
def test_a_file_kind_and_active_parameters_are_no_other_model(typed: str, name: str) -> None:
    assert typed_model(typed, offline=True).model.name == name


@pytest.mark.parametrize("typed", ["16 GB", "16gb", "16GB card", "16 g"])
def test_memory_is_a_card(typed: str) -> None:
    machine = make_machine(typed)
    cards = [g for g in gpu_catalogue().values() if g.marketed_gb == 16 and g.kind == "consumer"]
    assert machine.vram_bytes == min(
        g.torch_total_bytes or 0 for g in cards if g.vendor == "nvidia"
    )
    assert "16 GB" in machine.label


def test_memory_of_no_card_is_that_much() -> None:
    assert make_machine("100 GB").vram_bytes == 100 * GiB
    assert make_machine(vram="24").vram_bytes == 24 * GiB == parse_memory("24GiB")


def test_counts() -> None:
    assert [parse_count(each) for each in ("8192", "8,192", "8k", "8K", "128k", "1M")] == [
        *(8192, 8192, 8192, 8192, 131072, 1048576)
    ]
    for bad in ("8q", "", "-1", "1.5", "k"):
        with pytest.raises(UsageError, match="context"):
            parse_count(bad, field="context")


def test_words_of_other_tools() -> None:
    tasks = ["sft", "grpo", "serve", "dpo"]
    assert word_of("task", "Inference", tasks, TASK_WORDS) == "serve"
    optimizers = ["adamw", "adamw-8bit", "adamw-fused", "paged-adamw-8bit"]
    assert (
        word_of("optimizer", "paged_adamw_8bit", optimizers, OPTIMIZER_WORDS) == "paged-adamw-8bit"
    )
    with pytest.raises(UsageError, match="optimizer") as error:
        word_of("optimizer", "adamx", optimizers, OPTIMIZER_WORDS)
    assert "did you mean adamw" in str(error.value.hint)


def test_a_command_of_another_tool() -> None:
    line = [
        "plan",
        "trl",
        "sft",
        "--model_name_or_path",
        "Qwen/Qwen3-8B",
        "--gpu",
        "rtx-4090",
        "--json",
    ]
    assert rejoined(line) == [
        *("plan", "trl sft --model_name_or_path Qwen/Qwen3-8B", "--gpu", "rtx-4090", "--json")
    ]
    assert rejoined(["plan", "llama-3.1-8b", "--gpu", "h100"]) == [
        "plan",
        "llama-3.1-8b",
        "--gpu",
        "h100",
    ]
    assert is_command("vllm serve Qwen/Qwen3-8B")
    assert not is_command("llama 3.1 8b")


def test_pasted_and_piped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = "trl sft --model_name_or_path Qwen/Qwen3-8B --use_peft --max_length 4096"
    peaks = []
    for arguments, piped in (
        ([*command.split()], ""),
        ([command], ""),
        (["-"], command),
    ):
        monkeypatch.setattr(
            "sys.stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(piped.encode()))
        )
        assert main(["plan", *arguments, "--gpu", "h100", "--json"]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["peak_bytes"])
    assert len(set(peaks)) == 1
    run = b"model: qwen3-8b\nrecipe:\n  method: qlora\n  context: 4096\n"
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(run)))
    assert main(["plan", "-", "--gpu", "24 GB", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["recipe"]["method"] == "qlora"
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(b"")))
    assert main(["plan", "-", "--gpu", "h100"]) == 2


def test_gguf_files_are_added_up_and_named() -> None:
    sizes = {
        "model-Q4_K_M.gguf": 5,
        "model-BF16-00001-of-00002.gguf": 10,
        "model-BF16-00002-of-00002.gguf": 6,
        "mmproj-F16.gguf": 1,
        "README.md": 1,
    }
    files = merged(sizes)
    assert [(each.kind, each.size_bytes) for each in files] == [("Q4_K_M", 5), ("BF16", 16)]
    assert kind_of("UD-Q2_K_XL/model-UD-Q2_K_XL.gguf") == "UD-Q2_K_XL"
    assert base_of({"base_model": ["Qwen/Qwen3-8B", "other"]}) == "Qwen/Qwen3-8B"
    assert base_of(None) == ""


def test_a_gguf_repository_offline_is_its_base() -> None:
    found = typed_model("bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", offline=True)
    assert found.model.name == "llama-3.1-8b"
    assert "GGUF files of" in found.said
    with pytest.raises(UsageError, match="which model they were made of"):
        typed_model("someone/unheard-of-GGUF", offline=True)


OURS = [
    "vramwise plan 'qwen3-8b' --task grpo --context 8k --gpu h100",
    "$ uvx vramwise advise qwen3-8b --task grpo \\\n    --context 8k --gpu h100  # as a page shows it",
    "```sh\nvramwise plan qwen3-8b --task=grpo --context=8192 --gpu=h100\n```",
]


@pytest.mark.parametrize("typed", OURS)
def test_a_command_of_our_own_is_read_back(
    typed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def peak(arguments: list[str]) -> tuple[int, int]:
        assert main([*arguments, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        return document["capacity_bytes"], document["peak_bytes"]

    stated = ["plan", "qwen3-8b", "--task", "grpo", "--context", "8192"]
    monkeypatch.setattr(
        "sys.stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(typed.encode()))
    )
    assert peak(["plan", "-"]) == peak([*stated, "--gpu", "h100"])
    monkeypatch.setattr(
        "sys.stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(typed.encode()))
    )
    # what is said beside it wins
    assert peak(["plan", "-", "--gpu", "rtx-4090"]) == peak([*stated, "--gpu", "rtx-4090"])


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("vramwise recommend --gpu h100", "vramwise recommend describes no run"),
        ("vramwise plan -", "vramwise plan without its model or file"),
        ("vramwise plan qwen3-8b --gpuu h100", "--gpuu"),
    ],
)
def test_a_command_of_our_own_that_states_no_run_is_one_line(
    typed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", typed, "--gpu", "h100"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert said in lines[0]
    assert len(lines) <= 2
