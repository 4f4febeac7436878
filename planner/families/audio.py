"""Whisper-like encoders of Qwen2-Audio and Voxtral, and their projectors."""

from planner.families.blocks import conv, embedding, linear, norm
from planner.families.fields import ConfigFields
from planner.families.towers import Modules, repeated, two_layer
from planner.models.vision_spec import AudioSpec, Projector

VOXTRAL_TEXT = {
    "vocab_size": 131072,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "head_dim": 128,
}
"""What VoxtralConfig fills its text_config up with."""
ENCODERS = {"qwen2_audio": "qwen2_audio_encoder", "voxtral": "voxtral_encoder"}
PROJECTOR = "multi_modal_projector"


def encoder(fields: ConfigFields) -> ConfigFields:
    """Return the fields of the encoder."""
    return fields.sub("audio_config", ENCODERS[fields.model_type])


def audio_towers(fields: ConfigFields, text_hidden: int) -> Modules:
    """Return the encoder and its projector."""
    audio = encoder(fields)
    hidden, mels = audio.integer("hidden_size"), audio.integer("num_mel_bins")
    width = audio.integer("intermediate_size")
    block = (
        linear("self_attn.k_proj", hidden, hidden),
        *(
            linear(f"self_attn.{n}", hidden, hidden, bias=True)
            for n in ("q_proj", "v_proj", "out_proj")
        ),
        norm("self_attn_layer_norm", hidden, bias=True),
        *two_layer(hidden, width, ("fc1", "fc2")),
        norm("final_layer_norm", hidden, bias=True),
    )
    projector: Modules
    if fields.model_type == "voxtral":
        projector = (
            linear(f"{PROJECTOR}.linear_1", width, text_hidden),
            linear(f"{PROJECTOR}.linear_2", text_hidden, text_hidden),
        )
    else:
        projector = (linear(f"{PROJECTOR}.linear", hidden, text_hidden, bias=True),)
    root = "audio_tower"
    return (
        conv(f"{root}.conv1", (hidden, mels, 3), (hidden,)),
        conv(f"{root}.conv2", (hidden, hidden, 3), (hidden,)),
        embedding(f"{root}.embed_positions", audio.integer("max_source_positions"), hidden),
        *repeated(f"{root}.layers.*", audio.integer("num_hidden_layers"), block),
        norm(f"{root}.layer_norm", hidden, bias=True),
        *projector,
    )


def audio_spec(fields: ConfigFields, text_hidden: int) -> AudioSpec | None:
    """Return the encoder's spec, None where sounds are not planned."""
    if fields.model_type not in ENCODERS:
        return None
    audio = encoder(fields)
    hidden, width = audio.integer("hidden_size"), audio.integer("intermediate_size")
    whole = fields.model_type == "voxtral"
    if whole:
        audio.divide("intermediate_size", width, "hidden_size", hidden)
    pool = width // hidden if whole else 2
    return AudioSpec(
        hidden=hidden,
        heads=audio.integer("num_attention_heads"),
        depth=audio.integer("num_hidden_layers"),
        intermediate=width,
        activation=audio.text("activation_function"),
        joined=True,
        root="audio_tower.layers.*",
        names=(
            *((f"self_attn.{n}_proj", f"self_attn.{n}_proj") for n in "qkv"),
            ("self_attn.o_proj", "self_attn.out_proj"),
            ("mlp.up_proj", "fc1"),
            ("mlp.down_proj", "fc2"),
        ),
        projector=Projector(
            root=PROJECTOR,
            wide=width if whole else hidden,
            inner=text_hidden if whole else 0,
            out=text_hidden,
            leaves=("linear_1", "linear_2") if whole else ("linear",),
        ),
        mels=audio.integer("num_mel_bins"),
        positions=audio.integer("max_source_positions"),
        pool=pool,
        whole_windows=whole,
        source=f"models/{fields.model_type}: windows of 30 s, {pool} rows a token",
    )
