"""Images: cut as the processors cut them, their term in every phase, and bad input by name."""

from typing import Any

import pytest

from planner.errors import UnsupportedError, UsageError
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.models.images import cut_image, cut_tokens, cut_video
from planner.plan import Plan, plan
from planner.run.runfile import make_recipe

CARD = make_machine("h200")
SIZES = [(1024, 1024), (28, 28), (4000, 3000), (640, 480), (37, 1900), (100, 100), (8192, 8192)]


def _plan(name: str = "qwen2.5-vl-3b", **fields: Any) -> Plan:
    fields = {"task": "sft", "framework": "hf-trainer", "context": 4096, **fields}
    return plan(catalogue_model(name), make_recipe(**fields), CARD)


def _vision(planned: Plan) -> dict[str, int]:
    return {p.name: t.bytes for p in planned.phases for t in p.terms if t.name == "vision"}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["qwen2.5-vl-3b", "qwen3-vl-4b"])
def test_native_sizes_are_the_processors(name: str, size: tuple[int, int]) -> None:
    """transformers' own smart_resize, with the limits of the published preprocessor_config."""
    image = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    vision = catalogue_model(name).vision
    assert vision is not None
    factor = vision.patch * vision.merge
    high, wide = image.smart_resize(
        size[1], size[0], factor=factor, min_pixels=vision.min_pixels, max_pixels=vision.max_pixels
    )
    one = cut_image(vision, *size)
    assert one.patches == (high // vision.patch) * (wide // vision.patch)
    assert one.tokens == one.patches // 4


def test_counts_by_hand() -> None:
    qwen, gemma = catalogue_model("qwen2.5-vl-3b").vision, catalogue_model("gemma-3-4b").vision
    llama = catalogue_model("llama-3.2-11b-vision").vision
    assert qwen is not None
    assert gemma is not None
    assert llama is not None
    # 1024 rounds to 1036 = 74 patches of 14
    assert cut_image(qwen, 1024, 1024).patches == 5476
    assert cut_tokens(qwen, 4096).patches == 16_384
    # 16 frames are 8 steps of two
    assert cut_video(qwen, 280, 280, 16).patches == 8 * 20 * 20
    assert (cut_image(gemma, 3000, 20).patches, cut_image(gemma, 3000, 20).tokens) == (4096, 256)
    rows = (llama.size // 14) ** 2 + 1
    assert cut_image(llama, 100, 100).patches == 4 * (-(-rows // 8) * 8)


def test_the_term_follows_what_is_trained() -> None:
    fields = {"context": 8192, "images": 1, "image_size": "1792x1792", "checkpointing": "none"}
    fields["micro_batch_size"] = 1
    frozen = _vision(_plan(**fields, lora={"targets": "q_proj,v_proj"}))
    left = 16_384 * 1_176 * 4  # the pixels, in the batch until the step is over
    outputs = (
        16_384 * 1_280 * 2 + 2 * 4_096 * 2_048 * 2
    )  # the last block's, the features and their join
    assert frozen == {"forward": left + outputs, "loss": left, "backward": left, "step": left}
    full = _vision(_plan(**fields, method="full"))
    assert full["loss"] > 100 * left
    saved = _vision(_plan(**{**fields, "checkpointing": "full"}, method="full"))
    assert left < saved["loss"] < full["loss"] / 10
    adapted = _vision(_plan(**fields, lora={"targets": "all-linear"}))
    assert left < adapted["loss"]


def test_images_count_in_the_context() -> None:
    planned = _plan(images=2)
    assert any("2,738 of the sample's 4,096 tokens are images" in n for n in planned.assumptions)
    with pytest.raises(UsageError, match="images alone are 4,107 tokens"):
        _plan(images=3)


def test_without_images_the_plan_says_what_one_would_add() -> None:
    said = " ".join(_plan().not_modeled)
    assert "5,476 patches, 1,369 of the context's tokens, and adds up to" in said
    assert "images" not in " ".join(_plan(images=1).not_modeled)
    assert "their activations are not" in " ".join(_plan("gemma-3n-e4b").not_modeled)
    assert "images" not in " ".join(_plan("llama-3.1-8b").not_modeled)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"images": 1, "image_size": "10x2001"}, "aspect ratio above 200"),
        ({"images": 1, "image_size": "0x20"}, "image_size: '0x20' is not a size"),
        ({"images": 1, "image_size": "wide"}, "is not a size"),
        ({"image_size": "64x64"}, "there are no images"),
        ({"images": 1, "image_size": "64x64", "image_tokens": 5}, "not both"),
        ({"videos": 1}, "a video without frames"),
        ({"video_frames": 4}, "there are no videos"),
        ({"images": 1, "name": "llama-3.1-8b"}, "takes none"),
        ({"images": 1, "image_tokens": 100, "name": "gemma-3-4b"}, "has 256 tokens"),
        ({"images": 1, "image_tokens": 9, "name": "internvl3-8b"}, "as many as their size makes"),
        ({"audio_seconds": 4.0}, "there are no sounds"),
        ({"audio": 1}, "audio: qwen2.5-vl-3b takes none"),
        ({"images": 1, "name": "qwen2-audio-7b"}, "images: qwen2-audio-7b takes none"),
        ({"audio": 1, "audio_seconds": 1e-3, "name": "qwen2-audio-7b"}, "not a sound's length"),
        ({"audio": 1, "context": 700, "name": "qwen2-audio-7b"}, "sounds alone are 750 tokens"),
    ],
)
def test_bad_input_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        _plan(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"images": 1, "name": "gemma-3n-e4b"},
        {"videos": 1, "video_frames": 4, "name": "gemma-3-4b"},
        {"videos": 1, "video_frames": 4, "name": "smolvlm-256m"},
        {"images": 1, "task": "serve", "framework": "vllm"},
        {"audio": 1, "task": "serve", "framework": "vllm", "name": "qwen2-audio-7b"},
        {"audio": 1, "name": "gemma-3n-e4b"},
    ],
)
def test_what_is_not_planned_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="planned"):
        _plan(**fields)


def test_a_frozen_tower_keeps_a_graph_where_its_embedding_is_hooked() -> None:
    """transformers 5: with checkpoints and adapters; Qwen3-VL's tower names no embedding."""
    fields = {"context": 8192, "images": 1, "image_size": "1792x1792", "checkpointing": "full"}
    fields |= {"micro_batch_size": 1, "lora": {"targets": "q_proj,v_proj"}}
    new, old = (
        _vision(_plan(framework=name, **fields)) for name in ("hf-trainer", "hf-trainer==4.57")
    )
    inputs = 32 * 16_384 * 1_280 * 2
    assert inputs < new["loss"] - old["loss"] < 1.2 * inputs
    leaf = 8_192 * 2_048 * 2  # the text's embeddings, beside their copy with the features in it
    assert old["loss"] == 16_384 * 1_176 * 4 + leaf
    other = _vision(_plan("qwen3-vl-4b", **fields))
    assert other["loss"] == 112**2 * 1_536 * 4 + 8_192 * 2_560 * 2


def test_only_the_blocks_linears_that_are_named_are_adapted() -> None:
    """q_proj is in CLIP's blocks and in the text's; gate_proj is not, and CLIP stays frozen."""
    fields = {"images": 1, "context": 2048, "micro_batch_size": 1, "checkpointing": "none"}
    both = _vision(_plan("llava-1.5-7b", **fields, lora={"targets": "q_proj"}))
    mlp = _vision(_plan("llava-1.5-7b", **fields, lora={"targets": "q_proj,fc1,fc2"}))
    text = _vision(_plan("llava-1.5-7b", **fields, lora={"targets": "gate_proj"}))
    assert text["loss"] == 336 * 336 * 3 * 4
    # fp32 adapters on fc1's and fc2's inputs, in 23 blocks whose output is used
    assert mlp["loss"] - both["loss"] > 23 * 577 * (1_024 + 4_096) * 2
    assert both["loss"] > 23 * 577 * 1_024 * 2 * 5


def test_every_micro_batch_of_a_step_waits_with_its_pixels() -> None:
    fields = {"images": 1, "context": 2048, "micro_batch_size": 2, "gradient_accumulation": 4}
    seen = _vision(_plan("llava-1.5-7b", **fields, lora={"targets": "gate_proj"}))
    assert seen["step"] == 4 * 2 * 336 * 336 * 3 * 4


def test_sounds_are_planned() -> None:
    fields = {"audio": 2, "audio_seconds": 10.0, "context": 2048, "micro_batch_size": 1}
    planned = _plan("qwen2-audio-7b", **fields, lora={"targets": "gate_proj"}, checkpointing="none")
    assert any("500 of the sample's 2,048 tokens are sounds" in n for n in planned.assumptions)
    assert _vision(planned)["loss"] == 2 * 3_000 * 128 * 4
    assert "750 of the context's tokens" in " ".join(_plan("qwen2-audio-7b").not_modeled)
    full = _vision(_plan("qwen2-audio-7b", **fields, method="full", checkpointing="none"))
    assert full["loss"] > 2 * 1_500 * 32 * (1_280 * 8 + 5_120 * 2) * 2


def test_checkpoints_do_not_reach_llama_vision_s_tower() -> None:
    """models/mllama: its encoder layer is a plain nn.Module, and its embedding is hooked."""
    fields = {"context": 1024, "images": 1, "micro_batch_size": 1, "checkpointing": "full"}
    fields["lora"] = {"targets": "gate_proj"}
    new, old = (
        _vision(_plan("llama-3.2-11b-vision", framework=name, **fields))
        for name in ("hf-trainer", "hf-trainer==4.57")
    )
    vision = catalogue_model("llama-3.2-11b-vision").vision
    assert vision is not None
    rows = cut_image(vision, 1024, 1024).patches
    # frozen blocks keep at least norms' inputs, queries, keys, values, attention's result, the MLP's inner one
    each = rows * (1_280 * 6 + 5_120) * 2
    assert 39 * each < new["loss"] - old["loss"] < 42 * each
