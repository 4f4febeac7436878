"""The towers' saved tensors: transformers' own code on a CPU beside the plan, within 5%."""

from typing import Any

import pytest

from planner.families import model_spec_from_config
from planner.machines.machine import make_machine
from planner.run.recipe import Attention, Checkpointing, Method, Recipe, Task
from planner.run.resolve import resolve
from planner.terms.tower import Graph, tower_activations

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 512, "head_dim": 16,
}  # fmt: skip
QWEN = {
    "depth": 3, "num_heads": 4, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "in_channels": 3,
}  # fmt: skip


def qwen2_5() -> tuple[dict[str, Any], Any, Any]:
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as code

    vision = {**QWEN, "hidden_size": 256, "intermediate_size": 700, "out_hidden_size": 64}
    vision |= {"fullatt_block_indexes": [2], "window_size": 112}
    config = {"model_type": "qwen2_5_vl", **TEXT, "vision_config": vision}
    settings = code.Qwen2_5_VLVisionConfig(**vision, attn_implementation="sdpa")
    tower = code.Qwen2_5_VisionTransformerPretrainedModel(settings)
    return config, tower, (torch.randn(1024, 3 * 2 * 14 * 14), torch.tensor([[1, 32, 32]]))


def qwen2() -> tuple[dict[str, Any], Any, Any]:
    from transformers.models.qwen2_vl import modeling_qwen2_vl as code

    vision = {**QWEN, "embed_dim": 256, "hidden_size": 64, "mlp_ratio": 4}
    config = {"model_type": "qwen2_vl", **TEXT, "vision_config": vision}
    settings = code.Qwen2VLVisionConfig(**vision, attn_implementation="sdpa")
    tower = code.Qwen2VisionTransformerPretrainedModel(settings)
    return config, tower, (torch.randn(1024, 3 * 2 * 14 * 14), torch.tensor([[1, 32, 32]]))


def qwen3() -> tuple[dict[str, Any], Any, Any]:
    from transformers.models.qwen3_vl import modeling_qwen3_vl as code

    vision = {**QWEN, "patch_size": 16, "hidden_size": 256, "intermediate_size": 900}
    vision |= {
        "out_hidden_size": 64,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [2],
    }
    text = {**TEXT, "model_type": "qwen3_vl_text"}
    config = {"model_type": "qwen3_vl", "text_config": text, "vision_config": vision}
    settings = code.Qwen3VLVisionConfig(**vision, attn_implementation="sdpa")
    tower = code.Qwen3VLVisionModel(settings)
    return config, tower, (torch.randn(1024, 3 * 2 * 16 * 16), torch.tensor([[1, 32, 32]]))


def siglip() -> tuple[dict[str, Any], Any, Any]:
    from transformers.models.siglip import modeling_siglip as code

    vision = {
        "hidden_size": 256, "intermediate_size": 900, "num_hidden_layers": 3, "patch_size": 14,
        "num_attention_heads": 4, "image_size": 448, "vision_use_head": False, "num_channels": 3,
        "model_type": "siglip_vision_model",
    }  # fmt: skip
    text = {**TEXT, "model_type": "gemma3_text"}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": vision}
    settings = code.SiglipVisionConfig(**vision, attn_implementation="sdpa")
    return config, code.SiglipVisionModel(settings), (torch.randn(1, 3, 448, 448),)


SQUARE = {
    "hidden_size": 256, "intermediate_size": 900, "num_hidden_layers": 3, "patch_size": 14,
    "num_attention_heads": 4, "image_size": 448, "num_channels": 3,
}  # fmt: skip


def clip() -> tuple[dict[str, Any], Any, Any]:
    from transformers.models.clip import modeling_clip as code

    config = {"model_type": "llava", "text_config": TEXT, "vision_config": SQUARE}
    settings = code.CLIPVisionConfig(**SQUARE, attn_implementation="sdpa")
    return config, code.CLIPVisionModel(settings), (torch.randn(1, 3, 448, 448),)


def internvl() -> tuple[dict[str, Any], Any, Any]:
    from transformers.models.internvl import modeling_internvl as code

    config = {"model_type": "internvl", "text_config": TEXT, "vision_config": SQUARE}
    settings = code.InternVLVisionConfig(**SQUARE, attn_implementation="sdpa")
    return config, code.InternVLVisionModel(settings), (torch.randn(1, 3, 448, 448),)


def pixtral() -> tuple[dict[str, Any], Any, Any]:
    from transformers.models.pixtral import modeling_pixtral as code

    vision = {**SQUARE, "head_dim": 64, "hidden_act": "silu"}
    config = {"model_type": "mistral3", "text_config": TEXT, "vision_config": vision}
    settings = code.PixtralVisionConfig(**vision, attn_implementation="sdpa")
    return config, code.PixtralVisionModel(settings), (torch.randn(1, 3, 448, 448),)


def idefics3() -> tuple[dict[str, Any], Any, Any]:
    from transformers.models.idefics3 import modeling_idefics3 as code

    config = {"model_type": "idefics3", "text_config": TEXT, "vision_config": SQUARE}
    settings = code.Idefics3VisionConfig(**SQUARE, attn_implementation="sdpa")
    return config, code.Idefics3VisionTransformer(settings), (torch.randn(1, 3, 448, 448),)


def qwen2_audio() -> tuple[dict[str, Any], Any, Any]:
    from transformers.models.qwen2_audio import modeling_qwen2_audio as code

    audio = {
        "d_model": 256, "encoder_ffn_dim": 900, "encoder_layers": 3, "encoder_attention_heads": 4,
        "num_mel_bins": 16, "max_source_positions": 1024,
    }  # fmt: skip
    config = {"model_type": "qwen2_audio", "text_config": TEXT, "audio_config": audio}
    settings = code.Qwen2AudioEncoderConfig(**audio, attn_implementation="sdpa")
    return config, code.Qwen2AudioEncoder(settings), (torch.randn(1, 16, 2048),)


TOWERS = {
    "qwen2_vl": qwen2,
    "qwen2_5_vl": qwen2_5,
    "qwen3_vl": qwen3,
    "gemma3": siglip,
    "llava": clip,
    "internvl": internvl,
    "idefics3": idefics3,
    "mistral3": pixtral,
    "qwen2_audio": qwen2_audio,
}
"""Each on 1,024 rows, a class token apart."""


FAST = "gemma3"
"""Traced in every run; the others with the slow tests."""


def traced(tower: Any, inputs: Any) -> int:
    """Return bytes of the storages that autograd saved, parameters apart."""
    tower = tower.to(torch.bfloat16).train()
    own = {p.untyped_storage().data_ptr() for p in tower.parameters()}
    saved: dict[int, int] = {}
    keep = []

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
            keep.append(tensor)
        return tensor

    stack = getattr(tower, "encoder", getattr(tower, "transformer", tower))
    blocks = next(getattr(stack, n) for n in ("blocks", "layers", "layer") if hasattr(stack, n))
    sizes: list[int] = []

    def before(*_: Any) -> None:
        sizes.append(sum(saved.values()))

    def after(*_: Any) -> None:
        sizes.append(sum(saved.values()))

    blocks[0].register_forward_pre_hook(before)
    blocks[-1].register_forward_hook(after)
    values = [x.to(torch.bfloat16) if x.is_floating_point() else x for x in inputs]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        tower(*values)
    return sizes[1] - sizes[0]


@pytest.mark.parametrize(
    "name",
    [name if name == FAST else pytest.param(name, marks=pytest.mark.slow) for name in TOWERS],
)
def test_kept_by_the_blocks(name: str) -> None:
    config, tower, inputs = TOWERS[name]()
    model = model_spec_from_config(config, name=name)
    tower_spec = model.vision or model.audio
    assert tower_spec is not None
    recipe = Recipe(
        task=Task.SFT,
        method=Method.FULL,
        framework="hf-trainer",
        dtype="bf16",
        mixed_precision="none",
        context=16,
        attention=Attention.SDPA,
        checkpointing=Checkpointing.NONE,
    )
    r = resolve(model, recipe, make_machine("h100"))
    rows = 1024 + getattr(tower_spec, "class_token", 0)
    planned = tower_activations(tower_spec, r, rows, 1, graph=Graph.TRAINED).kept
    if tower_spec.masked:  # one for all blocks, which vision.py adds
        planned += 2 * rows * rows
    found = traced(tower, inputs)
    print(name, found, planned, planned / found)
    assert planned == pytest.approx(found, rel=0.05)
