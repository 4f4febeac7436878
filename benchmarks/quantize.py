"""What four bits lose at equal bytes: plain NF4, searched scales, vramwise's codes, and the same with a few bytes more.

`python benchmarks/quantize.py [--json] [--tokens N] [--calibrate prose,docs,code]`. SmolLM2-135M-Instruct out of the
demo's package. That copy is itself of four bits in blocks of 32, whose few levels flatter any code: each weight of its
linears is spread evenly over its own cell first, and that model is the reference. KL in nats a token, on rows of 256
tokens that no code has seen, of three kinds of text: prose (Verne's "In the Year 2889", which reasoning-gym carries), docs
(this repository's pages) and code (Python's own library).
"""

import argparse
import json
import resource
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trainer.demo_model import find_demo_model
from trainer.model import load_tokenizer
from trainer.quantize.bnb import BitsAndBytes, book, nested, packed
from trainer.quantize.calibration import ROW_TOKENS
from trainer.quantize.choice import KEPT, choose, curve, groups
from trainer.quantize.codes import plain_scales, rounded, searched_scales, values
from trainer.quantize.files import candidate_of, fixed_bytes
from trainer.quantize.formats import Factored, Format, Tensors
from trainer.quantize.harm import Linear, Measurement
from trainer.quantize.streamed import Streamed, Weights

SCHEMA_VERSION = 1
DTYPE = torch.bfloat16
CELL = 32
"""Weights of a row that share a scale in the package's copy."""
MORE = (5, 10, 20)
"""Percent of the least bytes of the linears."""
HELD_ROWS = 4
ROOT = Path(__file__).resolve().parent.parent


class Plain(BitsAndBytes):
    """bitsandbytes' own codes."""

    name = "plain"
    blocks = (64,)

    def store(
        self, weight: Tensor, block: int, *, moments: Tensor, factored: Factored, dtype: torch.dtype
    ) -> tuple[Tensors, Tensor]:
        """Round against the largest weight of each block, as bitsandbytes does."""
        state, read = nested(plain_scales(weight, book(), block))
        codes = rounded(weight, plain_scales(weight, book(), block), book())
        return packed(codes, state, dtype), values(codes, read, book()).to(dtype)


class Searched(BitsAndBytes):
    """The same layout with scales searched, and no feedback."""

    name = "searched"
    blocks = (64,)

    def store(
        self, weight: Tensor, block: int, *, moments: Tensor, factored: Factored, dtype: torch.dtype
    ) -> tuple[Tensors, Tensor]:
        """Round against the searched scale as it is read back."""
        state, read = nested(searched_scales(weight, moments.diagonal(), book(), block))
        codes = rounded(weight, read, book())
        return packed(codes, state, dtype), values(codes, read, book()).to(dtype)


def dithered(source: Path, folder: Path) -> Path:
    """Write the model with each weight of a linear spread evenly over the cell that it was rounded in."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(source / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith("_proj.weight"):
            blocks = weight.view(weight.shape[0], -1, CELL)
            gaps = blocks.sort(-1).values.diff(dim=-1)
            # levels lie a step apart: the least gap between two weights that differ
            step = torch.where(gaps > gaps.amax(-1, keepdim=True) / 64, gaps, torch.inf).amin(-1)
            step = torch.where(step.isfinite(), step, 0.0).unsqueeze(-1)
            noise = torch.rand(blocks.shape, generator=generator) - 0.5
            tensors[name] = (blocks + noise * step).view_as(weight).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def texts() -> dict[str, str]:
    """Return the three kinds of text."""
    import reasoning_gym.data

    library = Path(sysconfig.get_paths()["stdlib"])
    prose = Path(next(iter(reasoning_gym.data.__path__))) / "in_the_year_2889.txt"
    pages = ("training", "engines", "model", "adapters", "profiling")
    modules = ("argparse", "tarfile", "datetime", "asyncio/base_events")
    return {
        "prose": prose.read_text(encoding="utf-8"),
        "docs": "\n".join((ROOT / f"docs/{page}.md").read_text("utf-8") for page in pages),
        "code": "\n".join((library / f"{name}.py").read_text("utf-8") for name in modules),
    }


def rows_of(tokenizer: Any, tokens: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return the rows to calibrate on by kind, and the held rows of all kinds, one kind after the other."""
    count, own, held = -(-tokens // ROW_TOKENS), {}, []
    for kind, text in texts().items():
        ids = torch.tensor(tokenizer(text)["input_ids"])
        rows = ids[: len(ids) // ROW_TOKENS * ROW_TOKENS].view(-1, ROW_TOKENS)
        apart = torch.linspace(0, len(rows) - 1, HELD_ROWS).long()
        held.append(rows[apart])
        left = torch.ones(len(rows), dtype=torch.bool)
        left[apart] = False
        own[kind] = rows[left][:count]
    return own, torch.cat(held)


def weights_of(
    measured: Measurement, linears: list[Linear], form: Format, blocks: Mapping[str, int]
) -> Callable[[int | None], Weights]:
    """Return the weights of a choice, all others in DTYPE, as `divergence` asks for them."""
    model = measured.model
    by_name = {f"{linear.name}.weight": linear for linear in linears}

    def of(layer: int | None) -> Weights:
        prefixes = tuple(f"{name}." for name in model.layer_names)
        inside = prefixes if layer is None else (prefixes[layer],)
        found: dict[str, Tensor] = {}
        for name in model.files:
            if name.startswith(inside) == (layer is None):
                continue
            linear = by_name.get(name)
            if linear is None or blocks[linear.name] == KEPT:
                found[name] = model.files[name].to(DTYPE)
            else:
                own = candidate_of(linear, form, blocks[linear.name])
                found[name] = form.read_back(measured.stored(linear.name, own), DTYPE)
        return found

    return of


def measure(model: Streamed, rows: Tensor, held: Tensor, work: Path, say: Any) -> dict[str, Any]:
    """Return bytes and KL of every variant, calibrated on `rows`."""
    ours, plain, searched = BitsAndBytes(), Plain(), Searched()
    measured = Measurement(
        model, work, rows=rows, held=held, formats=(ours, plain, searched), dtype=DTYPE, seed=0
    )
    began, spent = time.monotonic(), time.process_time()
    linears = measured.run(lambda number, text: say(f"{number}/{measured.parts} {text}"))
    seconds, cpu_seconds = time.monotonic() - began, time.process_time() - spent
    fixed = fixed_bytes(model, linears, DTYPE.itemsize)
    parts = groups(linears, ours, DTYPE.itemsize)
    least = curve(parts, fixed)[0].bytes
    all64 = dict.fromkeys((linear.name for linear in linears), 64)
    asked: dict[str, tuple[Format, Mapping[str, int], int, float]] = {}
    for form in (plain, searched, ours):
        own = [candidate_of(linear, form, 64) for linear in linears]
        size = fixed + sum(candidate.bytes for candidate in own)
        asked[form.name] = form, all64, size, sum(candidate.harm for candidate in own)
    for percent in MORE:
        chosen = choose(parts, fixed, least + (least - fixed) * percent // 100)
        asked[f"{ours.name} +{percent}%"] = ours, chosen.blocks, chosen.bytes, chosen.harm
    found = {}
    kinds = list(texts())
    for name, (form, blocks, size, harm) in asked.items():
        by_row = measured.divergence(weights_of(measured, linears, form, blocks))
        by_kind = by_row.view(len(kinds), -1).mean(1).tolist()
        found[name] = {
            "bytes": size,
            "predicted_kl": harm,
            "kl": dict(zip(kinds, by_kind, strict=True)),
        }
        say(f"{name}: {found[name]}")
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "variants": found}


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--calibrate", default="prose,docs,code")
    options = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    source = find_demo_model("smollm2", say=say).path
    own, held = rows_of(load_tokenizer(str(source)), options.tokens)
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "tokens": options.tokens,
        "held_tokens": held.numel(),
        "calibrated_on": {},
    }
    with tempfile.TemporaryDirectory(prefix="vramwise-") as scratch:
        folder = dithered(source, Path(scratch) / "dithered")
        model = Streamed(folder, device=torch.device("cpu"))
        for kind in options.calibrate.split(","):
            work = Path(scratch) / kind
            work.mkdir()
            document["calibrated_on"][kind] = measure(model, own[kind], held, work, say)
            shutil.rmtree(work)
    document["peak_host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if options.json:
        print(json.dumps(document))
        return 0
    for kind, result in document["calibrated_on"].items():
        print(
            f"calibrated on {kind}, {result['seconds']:.0f} s ({result['cpu_seconds']:.0f} s CPU)"
        )
        for name, figures in result["variants"].items():
            shown = "  ".join(f"{text} {kl:.3f}" for text, kl in figures["kl"].items())
            print(f"  {name:12} {figures['bytes']:>12,} B  {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
