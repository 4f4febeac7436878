"""The registry of token mixers is total, and adding one is a word and a file."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from enum import StrEnum
from pathlib import Path

import pytest

import planner.mixers
from planner.machines.machine import make_machine
from planner.mixers import registry
from planner.mixers.mixer import Cache, Mixer, Pages
from planner.models.hub import find_model
from planner.models.lora_targets import lora_counts
from planner.models.spec import MixerKind, ModelSpec
from planner.plan import plan
from planner.run.recipe import EngineKind, EngineSection, Method, Recipe, Task
from planner.terms.kv_cache import bytes_per_token, sequence_bytes

ROOT = Path(__file__).parents[2]
TOY_FILE = '''
"""Attention that sums pairs of tokens: half of them are cached."""

from dataclasses import replace

from planner.mixers import attention as a
from planner.mixers.mixer import Cache, Mixer


def record(p, x, layer, linears, width):
    """Two projections, no scores at all."""
    first = p.linear(x, linears.ins[0], width)
    mixed = p.tape.op((first,), first.size, saves=(first,))
    p.tape.drop(first)
    out = p.linear(mixed, linears.out, width)
    p.tape.drop(mixed)
    return out


MIXER = Mixer(
    record=record,
    assumes="toy-kernels",
    keeps_apart=True,
    reads_images=False,
    divides=True,
    cache=Cache(
        token=a.keys_and_values,
        beyond=a.nothing,
        tokens_held=lambda mixer, tokens: tokens // 2,
        state=a.nothing,
    ),
    pages=replace(a.PAGES, own_group=True, longest=lambda window, longest, flying: (longest // 2, 0)),
    lora_roots=frozenset({"self_attn"}),
)
'''


class Kinds(StrEnum):
    """One more word."""

    TOY = "toy"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder that counts as part of planner/mixers."""
    monkeypatch.setattr(planner.mixers, "__path__", [*planner.mixers.__path__, str(tmp_path)])
    yield tmp_path
    sys.modules.pop("planner.mixers.toy", None)


@pytest.fixture
def toy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    """Follow CONTRIBUTING's "Add a token mixer"; return a model made of the new kind."""
    (folder / "toy.py").write_text(TOY_FILE, encoding="utf-8")
    monkeypatch.setitem(registry.MIXERS, Kinds.TOY, registry.load([Kinds.TOY])[Kinds.TOY])
    model = find_model("llama-3.1-8b")
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, kind=Kinds.TOY)) for layer in model.layers
    )
    return replace(model, name="toy", layers=layers)


H100 = make_machine("h100")


def test_a_new_kind_is_planned_by_its_own_parts(toy: ModelSpec) -> None:
    llama = find_model("llama-3.1-8b")
    assert bytes_per_token(toy) == bytes_per_token(llama)
    assert sequence_bytes(toy, 1000) == sequence_bytes(llama, 500)
    recipe = Recipe(task=Task.SFT, method=Method.LORA, context=4096, micro_batch_size=1)
    ours, theirs = plan(toy, recipe, H100), plan(llama, recipe, H100)
    # bf16 without checkpointing: q's output alone instead of rotated q and k, v, and the context
    assert ours.peak_bytes < theirs.peak_bytes
    assert any("toy-kernels" in note for note in ours.assumptions)
    assert lora_counts(toy, "attention", rank=8) == lora_counts(llama, "attention", rank=8)


@pytest.mark.parametrize("engine", ["transformers", "vllm-shared"])
def test_a_new_kind_rolls_out_and_serves(toy: ModelSpec, engine: str) -> None:
    recipe = Recipe(
        task=Task.GRPO,
        method=Method.LORA,
        prompt_length=512,
        completion_length=512,
        num_generations=4,
        micro_batch_size=4,
        engine=EngineSection(kind=EngineKind(engine)),
    )
    cache = {term.name: term.bytes for term in plan(toy, recipe, H100).phase("rollout").terms}
    # 4 sequences of 1,024 tokens, half of them cached, 131,072 B each
    assert cache["kv_cache"] == 4 * 512 * bytes_per_token(toy) == 268_435_456
    assert plan(toy, Recipe(task=Task.SERVE, context=8192), H100).fits


def test_a_forgotten_file_or_entry_is_an_error_at_import(folder: Path) -> None:
    with pytest.raises(ImportError, match="toy"):
        registry.load((*MixerKind, Kinds.TOY))
    (folder / "toy.py").write_text("OTHER = 1\n", encoding="utf-8")
    with pytest.raises(ImportError, match=r"planner/mixers/toy.py has no MIXER"):
        registry.load([Kinds.TOY])


@pytest.mark.parametrize(
    ("kind", "part"),
    [(kind, part) for kind in (Mixer, Cache, Pages) for part in kind.__dataclass_fields__],
)
def test_an_entry_that_misses_a_part_is_an_error_at_import(kind: type, part: str) -> None:
    entry = registry.MIXERS[MixerKind.FULL]
    whole = next(one for one in (entry, entry.cache, entry.pages) if isinstance(one, kind))
    parts = {f.name: getattr(whole, f.name) for f in fields(whole) if f.name != part}
    assert kind(**parts, **{part: getattr(whole, part)}) == whole
    with pytest.raises(TypeError, match=part):
        kind(**parts)


def test_the_registry_is_the_kinds_and_the_files() -> None:
    shared = {"__init__", "mixer", "registry", "attention", "recurrence", "delta"}
    files = {path.stem for path in (ROOT / "planner/mixers").glob("*.py")} - shared
    assert set(registry.MIXERS) == set(MixerKind)
    assert {str(kind) for kind in MixerKind} == files


def test_only_families_and_mixers_name_a_kind() -> None:
    """No if-chain over kinds anywhere else: what a kind does is asked of the registry."""
    builders = {
        "planner/terms/standing.py",
        "planner/terms/tower.py",
        "profiler/meta_model.py",
    }
    named = [
        f"{relative}:{node.lineno}"
        for package in ("planner", "profiler", "trainer", "app")
        for path in sorted((ROOT / package).rglob("*.py"))
        if not (relative := path.relative_to(ROOT).as_posix()).startswith(
            ("planner/families/", "planner/mixers/")
        )
        and relative not in builders
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "MixerKind"
    ]
    assert named == []
