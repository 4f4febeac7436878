"""Unsloth by version, by hand: tables of positions, the allocator's warm-up, its losses and experts."""

from dataclasses import replace

import pytest

from planner.accuracy.notebooks import data_set, notebook_of, step_lengths
from planner.accuracy.prediction import NotARun
from planner.accuracy.rows import Layout, Row
from planner.accuracy.sft_rows import predict_sft
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.plan import plan
from planner.replay.warmup import warmup_bytes
from planner.run.framework import pick
from planner.run.recipe import LoraSection, Method, Recipe, Task
from planner.run.resolve import resolve
from planner.terms.free_chunks import chunks
from planner.terms.rope_tables import rope_tables
from planner.units import GiB, MiB

T4 = make_machine("t4")
MISTRAL = catalogue_model("mistral-7b-v0.3")
LLAMA = catalogue_model("llama-3.2-3b")


def _recipe(version: str, **fields: object) -> Recipe:
    given = {
        "task": Task.SFT,
        "method": Method.QLORA,
        "framework": f"unsloth=={version}",
        "lora": LoraSection(rank=16),
        "micro_batch_size": 2,
        "context": 2048,
        **fields,
    }
    return Recipe(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("version", "law"),
    [
        ("2024.5", "unsloth-2024"),
        ("2024.9.post4", "unsloth-2024"),
        ("2024.11.9", "unsloth-2024.11"),
        ("2025.4.5", "unsloth-2025.1"),
        ("2025.8.5", "unsloth-2025.8"),
        ("2026.1.4", "unsloth-2025.8"),
        ("2026.5.10", "unsloth-2026.2"),
        ("2026.10.9", "unsloth"),
    ],
)
def test_a_release_has_its_law(version: str, law: str) -> None:
    assert pick("unsloth", version).name == law


def test_every_layer_kept_tables_of_all_positions_until_transformers_448() -> None:
    # Mistral v0.3: 32 layers x (cos, sin) x 32,768 positions x 128 x 2 B
    old = rope_tables(MISTRAL, resolve(MISTRAL, _recipe("2024.5"), T4))
    assert sum(old) == 32 * 2 * 32768 * 128 * 2 == 512 * MiB
    new = rope_tables(MISTRAL, resolve(MISTRAL, _recipe("2025.4.5"), T4))
    assert sum(new) == 2 * 32768 * 128 * 2
    assert not rope_tables(MISTRAL, resolve(MISTRAL, _recipe("2024.5", framework="trl"), T4))


def test_gemmas_tables_are_fp32_and_longer_sequences_grow_them() -> None:
    gemma = catalogue_model("gemma-2-2b")
    # 26 layers x 2 x 8,192 x 256 x 4 B
    assert sum(rope_tables(gemma, resolve(gemma, _recipe("2024.8"), T4))) == 26 * 2 * 8192 * 256 * 4
    long = resolve(LLAMA, _recipe("2024.8", context=40_000), T4)
    assert rope_tables(LLAMA, long)[0] == 40_960 * 128 * 2  # the next multiple of 8,192


def test_transformers_takes_one_segment_before_it_loads() -> None:
    r = resolve(LLAMA, _recipe("2025.9.1"), T4)
    # 4.5x: a quarter of the 16-bit bytes, as 16-bit elements
    assert warmup_bytes(LLAMA, r, 14 * GiB) == 2 * (2 * LLAMA.parameters // 4)
    # never more than the card less 1.2 GiB
    small = 2 * GiB
    assert warmup_bytes(LLAMA, r, small) == 2 * ((small - 1_288_490_188) // 4)
    lora = resolve(LLAMA, _recipe("2025.9.1", method=Method.LORA), T4)
    assert warmup_bytes(LLAMA, lora, 14 * GiB) == 2 * LLAMA.parameters
    assert warmup_bytes(LLAMA, resolve(LLAMA, _recipe("2024.9"), T4), 14 * GiB) == 0


def test_loading_holds_the_warm_up_segment() -> None:
    warmed = plan(LLAMA, _recipe("2025.9.1"), T4)
    least = 2 * (2 * LLAMA.parameters // 4)
    assert (
        warmed.reserved.loaded
        >= least
        > sum(
            term.bytes
            for term in warmed.phase("load").terms
            if term.name in {"weights", "adapters"}
        )
    )


def test_until_2024_the_loss_has_logits_and_accelerates_copy() -> None:
    result = plan(LLAMA, _recipe("2024.9"), T4)
    logits = next(term for term in result.phase("loss").terms if term.name == "logits")
    assert logits.bytes == 2 * 2048 * LLAMA.vocab * (2 + 4)


@pytest.mark.parametrize(("tokens", "rows"), [(512, 1024), (1024, 1)])
def test_cut_cross_entropy_takes_over_above_1024_tokens(tokens: int, rows: int) -> None:
    result = plan(LLAMA, _recipe("2025.4.5", context=tokens), T4)
    logits = next(term for term in result.phase("loss").terms if term.name == "logits")
    kept = 2 * tokens * LLAMA.hidden * 2
    assert logits.bytes == kept + rows * LLAMA.vocab * (2 + 4)


def test_half_of_what_is_free_bounds_a_chunk() -> None:
    r = resolve(LLAMA, _recipe("2025.9.1", micro_batch_size=16, context=8192), T4)
    result = plan(LLAMA, _recipe("2025.9.1", micro_batch_size=16, context=8192), T4)
    standing = sum(
        term.bytes for term in result.phase("load").terms if term.name in {"weights", "adapters"}
    )
    free = T4.vram_bytes - T4.context_bytes - standing
    whole = 16 * 8192 * LLAMA.vocab * 4
    assert chunks(LLAMA, r, T4) == -(-whole // (4 * (free // 2))) * 4
    assert result.resolved.loss_chunk_rows == -(-16 * 8192 // chunks(LLAMA, r, T4))
    short = resolve(LLAMA, _recipe("2025.9.1"), T4)
    assert chunks(LLAMA, short, T4) == 1  # 2.0 GiB of logits, half of 12 GiB free
    # since 2026.7 four GiB at most, whatever the card
    big = make_machine("h200")
    capped = resolve(LLAMA, _recipe("2026.10", micro_batch_size=16, context=8192), big)
    assert chunks(LLAMA, capped, big) == -(-whole // (16 * GiB)) * 4


def test_a_chosen_chunk_is_kept() -> None:
    chosen = plan(LLAMA, _recipe("2026.10", loss_chunk_rows=128), T4)
    assert chosen.resolved.loss_chunk_rows == 128


def test_gpt_oss_experts_are_linears_and_so_4_bit() -> None:
    oss = catalogue_model("gpt-oss-20b")
    result = plan(oss, _recipe("2025.8.5", context=1024, micro_batch_size=1), T4)
    assert result.reserved.on_card < T4.vram_bytes  # a T4 ran it at 12.98 GiB
    held = next(term for term in result.phase("load").terms if term.name == "weights")
    assert held.bytes == pytest.approx(11.66 * GiB, rel=0.01)
    gemma = catalogue_model("gemma-4-26b-a4b")
    card = make_machine("a100-80gb")
    fused = plan(gemma, _recipe("2026.4.4", context=1024), card).phase("load").total_bytes
    quantised = plan(gemma, _recipe("2026.10", context=1024), card).phase("load").total_bytes
    assert fused > 2 * quantised  # 36 GiB of bf16 experts until zoo 2026.5


def test_expandable_segments_lose_nothing_between_lengths() -> None:
    result = plan(LLAMA, _recipe("2024.9"), T4)
    mixed = result.reserved_over((300, 2048, 900, 1500, 2048)).on_card
    assert mixed <= 1.02 * result.peak_bytes
    # in torch's own segments the same lengths leave holes
    plain = replace(
        result.resolved,
        switches=result.resolved.switches.model_copy(update={"expandable_segments": False}),
    )
    held = replace(result, resolved=plain).reserved_over((300, 2048, 900, 1500, 2048)).on_card
    assert held > mixed


def test_lengths_come_from_the_data_set_and_stop_at_the_cap() -> None:
    alpaca = data_set("unsloth/alpaca-cleaned")
    assert alpaca is not None
    drawn = step_lengths(alpaca, 2048, 2, 480, 0.5)
    assert max(drawn) == drawn[-1] == alpaca.longest
    assert step_lengths(alpaca, 300, 2, 480, 0.5)[-1] == 300
    likely = step_lengths(alpaca, 2048, 2, 480, 0.95)[-1]
    assert step_lengths(alpaca, 2048, 2, 480, 0.05)[-1] < drawn[-1] <= likely
    thoughts = data_set("unsloth/OpenMathReasoning-mini")
    assert thoughts is not None
    assert set(step_lengths(thoughts, 2048, 4, 960, 0.5)) == {2048}
    assert data_set("nobody/knows") is None


def _row(path: str, quantity: str) -> Row:
    fields = {
        "source_family": "unsloth-notebooks",
        "path": path,
        "model": "unsloth/Llama-3.2-3B-Instruct",
        "method": "qlora",
        "base_quant": "bnb-nf4",
        "lora_rank": "16",
        "optimizer": "adamw_8bit",
        "grad_ckpt": "unsloth (offloaded)",
        "seq_len": "2048",
        "micro_batch": "2",
        "grad_accum": "4",
        "gpu": "Tesla T4 (14.748 GiB)",
        "framework": "unsloth",
        "quantity": quantity,
    }
    return Row(Layout.SFT, fields)


def test_a_notebooks_row_is_planned_by_its_release() -> None:
    row = _row("nb/Llama3.2_(1B_and_3B)-Conversational.ipynb", "reserved_before_training")
    found = notebook_of(row)
    assert found is not None
    assert (found.release, found.trained) == ("2024.10.0", 24_313_856)
    loaded = predict_sft(row)
    assert loaded.value == pytest.approx(2.635 * GiB, rel=0.01)  # as the notebook printed
    assert loaded.plan is not None
    assert loaded.plan.resolved.framework.name == "unsloth-2024"


def test_copied_outputs_are_no_runs() -> None:
    with pytest.raises(NotARun, match="copy of Gemma2"):
        predict_sft(_row("nb/Falcon_H1_(0.5B)-Alpaca.ipynb", "peak_reserved"))


@pytest.mark.parametrize(
    ("card", "dtype", "weights", "autocast"),
    [
        ("t4", None, 4, "fp16"),
        ("t4", "bf16", 4, "fp16"),
        ("l4", None, 2, "bf16"),
        ("l4", "fp16", 4, "fp16"),
    ],
)
def test_a_whole_model_in_fp16_has_fp32_weights(
    card: str, dtype: str | None, weights: int, autocast: str
) -> None:
    """Unsloth makes them so, and takes fp16 by itself where a card has no bf16."""
    model = catalogue_model("qwen3-0.6b")
    made = plan(
        model, Recipe(method=Method.FULL, framework="unsloth", dtype=dtype), make_machine(card)
    )
    loaded = next(term for term in made.phase("load").terms if term.name == "weights")
    tables = rope_tables(model, made.resolved)
    assert loaded.bytes == weights * model.parameters + sum(tables)
    assert made.resolved.autocast == autocast
    lora = plan(model, Recipe(framework="unsloth"), make_machine(card))
    assert lora.resolved.dtype == "bf16"
