"""Tiles and tokens against the processors of transformers (the PIL ones, which need no torchvision)."""

from typing import Any

import pytest

from planner.errors import UsageError
from planner.families import model_spec_from_config
from planner.models.catalogue import catalogue_model
from planner.models.images import cut_image, cut_video
from planner.models.sounds import cut_sound
from planner.models.vision_spec import VisionSpec

SIZES = [(336, 336), (640, 480), (100, 1000), (1920, 1080), (449, 300), (1, 1), (997, 331)]
MANY = [(w, h) for w in (1, 37, 336, 449, 800, 1920, 4000) for h in (1, 90, 337, 448, 1080, 2999)]


def _vision(name: str) -> VisionSpec:
    vision = catalogue_model(name).vision
    assert vision is not None
    return vision


def _image(size: tuple[int, int]) -> Any:
    return pytest.importorskip("PIL.Image").new("RGB", size)


@pytest.mark.parametrize("name", ["smolvlm-2.2b", "smolvlm-256m"])
def test_idefics3_splits(name: str) -> None:
    code = pytest.importorskip("transformers.models.idefics3.image_processing_pil_idefics3")
    vision = _vision(name)
    side = vision.size
    processor = code.Idefics3ImageProcessorPil(
        size={"longest_edge": 4 * side}, max_image_size={"longest_edge": side}
    )
    for size in SIZES[1:4] if side > 400 else SIZES:
        image = _image(size)
        made = processor.preprocess([[image]], return_row_col_info=True, return_tensors="np")
        rows, columns = made["rows"][0][0], made["cols"][0][0]
        one = cut_image(vision, *size)
        assert made["pixel_values"].size == one.pixels
        assert one.sequences == made["pixel_values"].shape[1] == rows * columns + 1
        # processing_idefics3.py, _get_num_multimodal_tokens
        tokens = (vision.tokens + 2) * columns + 1
        assert one.tokens == vision.tokens + 3 + tokens * rows


def test_internvl_crops() -> None:
    code = pytest.importorskip("transformers.models.got_ocr2.image_processing_pil_got_ocr2")
    processor = code.GotOcr2ImageProcessorPil(size={"height": 448, "width": 448})
    vision = _vision("internvl3-8b")
    for width, height in MANY:
        tiles = processor.get_number_of_image_patches(height, width, {"crop_to_patches": True})
        one = cut_image(vision, width, height)
        assert (one.sequences, one.tokens) == (tiles, 256 * tiles + 2), (width, height)
        assert one.patches == tiles * 1025
    assert cut_video(vision, 640, 480, 8).tokens == 8 * 258


def test_pixtral_sizes() -> None:
    """Rows and columns as processing_pixtral.py asks its image processor for: patches of merged patches."""
    code = pytest.importorskip("transformers.models.pixtral.image_processing_pil_pixtral")
    numpy = pytest.importorskip("numpy")
    vision = _vision("ministral-3-3b")
    for width, height in MANY:
        image = numpy.zeros((3, height, width), dtype=numpy.uint8)
        high, wide = code.get_resize_output_image_size(
            image, size=1540, patch_size=28, input_data_format="channels_first"
        )
        if not wide * high:
            with pytest.raises(UsageError, match="nothing is left"):
                cut_image(vision, width, height)
            continue
        one = cut_image(vision, width, height)
        assert one.pixels == 3 * high * wide, (width, height)
        assert one.patches == (high // 14) * (wide // 14)
        # an image token a merged patch, [IMG_BREAK] or [IMG_END] at a row's end
        assert one.tokens == (high // 28) * (wide // 28 + 1)


@pytest.mark.parametrize("name", ["llava-1.6-mistral-7b", "llava-onevision-7b"])
def test_anyres(name: str) -> None:
    pytest.importorskip("transformers")
    vision = _vision(name)
    processor, tokens_of = _anyres_processor(name)
    for width, height in MANY:
        one = cut_image(vision, width, height)
        assert one.tokens == tokens_of(width, height), (width, height)
    for size in SIZES[:4]:
        made = processor.preprocess([_image(size)], return_tensors="np")
        one = cut_image(vision, *size)
        assert made["pixel_values"].shape[1] == one.sequences
        assert made["pixel_values"].size == one.pixels


def _anyres_processor(name: str) -> tuple[Any, Any]:
    from transformers.models.llava_next import image_processing_pil_llava_next as next_images
    from transformers.models.llava_next import processing_llava_next as next_code
    from transformers.models.llava_onevision import image_processing_pil_llava_onevision as images
    from transformers.models.llava_onevision import processing_llava_onevision as code

    processor: Any
    if name == "llava-onevision-7b":
        image_processor = images.LlavaOnevisionImageProcessorPil()
        processor = object.__new__(code.LlavaOnevisionProcessor)
        processor.num_image_tokens, processor.vision_aspect_ratio = 729, "anyres_max_9"
        side, dropped = 384, 0
    else:
        image_processor = next_images.LlavaNextImageProcessorPil(
            size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}
        )
        processor = object.__new__(next_code.LlavaNextProcessor)
        # the class token that "default" takes off again
        processor.patch_size, processor.num_additional_image_tokens = 14, 1
        side, dropped = 336, 1
    processor.image_processor = image_processor

    def tokens(width: int, height: int) -> int:
        return int(processor._get_number_of_features(height, width, side, side) - dropped)

    return image_processor, tokens


def test_onevision_cuts_several_images_and_videos_otherwise() -> None:
    """processing_llava_onevision.py: 729 tokens and a line's end; 14 x 14 a frame and one more."""
    vision = _vision("llava-onevision-7b")
    assert cut_image(vision, 1920, 1080, images=3).tokens == 730
    assert cut_video(vision, 640, 480, 16).tokens == 16 * 196 + 1


def test_llava_1_5_has_one_size() -> None:
    one = cut_image(_vision("llava-1.5-7b"), 1920, 1080)
    assert (one.patches, one.tokens, one.features) == (577, 576, 576)


@pytest.mark.parametrize("seconds", [0.01, 0.5, 1.23, 10.0, 29.99, 30.0, 47.0])
def test_qwen2_audio_hears_thirty_seconds(seconds: float) -> None:
    np = pytest.importorskip("numpy")
    whisper = pytest.importorskip("transformers.models.whisper.feature_extraction_whisper")
    code = pytest.importorskip("transformers.models.qwen2_audio.processing_qwen2_audio")
    processor: Any = object.__new__(code.Qwen2AudioProcessor)
    processor.feature_extractor = whisper.WhisperFeatureExtractor(feature_size=128)
    processor.audio_token = "|"
    sound = np.zeros(int(seconds * 16_000), dtype=np.float32)
    made, texts = processor._process_audio([sound], sampling_rate=16_000)
    audio = catalogue_model("qwen2-audio-7b").audio
    assert audio is not None
    one = cut_sound(audio, seconds)
    assert len(texts[0]) == one.tokens
    assert np.asarray(made["input_features"]).size == one.pixels
    assert (one.patches, one.features) == (1500, 750)


def test_voxtral_takes_whole_windows() -> None:
    audio = catalogue_model("voxtral-mini-3b").audio
    assert audio is not None
    assert (cut_sound(audio, 5).tokens, cut_sound(audio, 30).tokens) == (375, 375)
    assert (cut_sound(audio, 31).tokens, cut_sound(audio, 31).sequences) == (750, 2)


def test_towers_read_what_a_config_says() -> None:
    base = {"text_config": {"hidden_size": 64, "num_attention_heads": 4}, "model_type": "llava"}
    whole = {"vision_feature_select_strategy": "full", "vision_feature_layer": [-3, -7]}
    vision = model_spec_from_config({**base, **whole}).vision
    assert vision is not None
    assert (vision.tokens, vision.unused, vision.depth) == (577, 2, 24)
    assert vision.projector is not None
    assert vision.projector.wide == 2048
