"""Which model of the catalogue has the widths that a config spells out instead of a name."""

from typing import Any, NamedTuple

from planner.models.catalogue import catalogue_model, load_catalogue
from planner.models.spec import MlpKind


class Shape(NamedTuple):
    """What tells dense and mixed decoders apart; None = any."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int | None
    experts: int | None
    vocab: int | None
    gated: bool = True


def _of(config: dict[str, Any]) -> Shape | None:
    try:
        heads = int(config["num_attention_heads"])
        experts = config.get("num_experts") or config.get("num_local_experts")
        width = config.get("moe_intermediate_size") if experts else None
        return Shape(
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            intermediate=int(width or config["intermediate_size"]),
            experts=int(experts) if experts else None,
            vocab=int(config["vocab_size"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


def model_of(asked: Shape) -> str | None:
    """Return the hub id of a catalogue model of these widths: one with the vocabulary, if there is one."""
    alike = [
        (
            abs(found.vocab - asked.vocab) if asked.vocab and found.vocab else 0,
            place,
            entry["hub_id"],
        )
        for place, (name, entry) in enumerate(load_catalogue().items())
        if (found := _of(entry["config"])) is not None
        and found[:4] == asked[:4]
        and asked.intermediate in (None, found.intermediate)
        and found.experts == asked.experts
        and (catalogue_model(name).layers[0].mlp.kind is not MlpKind.PLAIN) is asked.gated
    ]
    return min(alike)[2] if alike else None
