"""Harm against the KL that a change really makes, and calibration text."""

import json

import pytest
import torch

from planner.errors import UsageError
from trainer.config import DatasetSection
from trainer.model import load_tokenizer
from trainer.quantize.bnb import BitsAndBytes
from trainer.quantize.calibration import ROW_TOKENS, read_calibration
from trainer.quantize.harm import Measurement, token_fisher
from trainer.quantize.streamed import Streamed


def test_token_fisher_by_hand():
    """Two tokens, two outputs: (d . dW x)^2 / 2, averaged."""
    error = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    inputs = torch.tensor([[1.0, 1.0], [3.0, 0.0]])
    outputs = torch.tensor([[1.0, 1.0], [2.0, 5.0]])
    # 1 * 1 + 1 * 2 = 3; 2 * 3 + 5 * 0 = 6
    assert token_fisher(error, inputs, outputs) == (9 + 36) / 2 / 2


def test_where_a_change_stays_within_its_token_the_prediction_is_the_kl(small_model, tmp_path):
    """The last layer's linears but q, k and v: no other position sees what they compute."""
    model = Streamed(small_model, device=torch.device("cpu"))
    ids = read_calibration(
        load_tokenizer(str(small_model)),
        DatasetSection(name="arithmetic"),
        root=tmp_path,
        tokens=2048,
    )
    form = BitsAndBytes()
    measured = Measurement(
        model,
        tmp_path,
        rows=ids.rows,
        held=ids.rows,
        formats=(form,),
        dtype=torch.float32,
        seed=0,
    )
    linears = measured.run(lambda _number, _text: None)
    seen = 0
    for linear in linears:
        if not linear.name.startswith("model.layers.1.") or linear.name[-6:] in (
            "q_proj",
            "k_proj",
            "v_proj",
        ):
            continue
        for candidate in linear.candidates:
            weight = form.read_back(measured.stored(linear.name, candidate), torch.float32)
            changed = {f"{linear.name}.weight": weight}
            kl = float(measured.divergence(lambda layer, w=changed: w if layer == 1 else {}).mean())
            assert candidate.harm == pytest.approx(kl, rel=0.3), linear.name
            seen += 1
    assert seen == 8
    assert float(measured.divergence(lambda _layer: {}).abs().max()) == 0


def test_rows_are_text_in_its_order_and_every_fifth_is_kept_apart(small_model, tmp_path):
    tokenizer = load_tokenizer(str(small_model))
    (tmp_path / "text.txt").write_text("".join(f"{n} " for n in range(2000)))
    made = read_calibration(
        tokenizer, DatasetSection(name="text.txt"), root=tmp_path, tokens=4 * ROW_TOKENS
    )
    ids = tokenizer((tmp_path / "text.txt").read_text())["input_ids"]
    assert made.rows.shape == (4, ROW_TOKENS)
    assert made.rows.flatten().tolist() == ids[: 4 * ROW_TOKENS]
    assert made.held.flatten().tolist() == ids[4 * ROW_TOKENS : 5 * ROW_TOKENS]


def test_jsonl_rows_are_texts_prompts_and_messages(small_model, tmp_path):
    tokenizer = load_tokenizer(str(small_model))
    rows = [
        {"text": "abc"},
        {"prompt": "1+2="},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows * 40))
    made = read_calibration(
        tokenizer, DatasetSection(name="rows.jsonl"), root=tmp_path, tokens=ROW_TOKENS
    )
    text = tokenizer.decode(made.rows.flatten().tolist())
    assert "abc</s>1+2=</s><user>hi\n<assistant>yo\n</s>abc" in text


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("short.txt", "abc " * 100, r"short\.txt has 400 tokens, 1,280 are needed"),
        ("odd.jsonl", '{"question": "x"}', r"odd\.jsonl has the columns question"),
        ("none.txt", None, r"no such file|cannot load"),
    ],
)
def test_text_that_cannot_be_used_is_one_line(small_model, tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=message):
        read_calibration(
            load_tokenizer(str(small_model)),
            DatasetSection(name=str(tmp_path / name)),
            root=tmp_path,
            tokens=1024,
        )
