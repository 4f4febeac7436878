"""FSDP as configs say it: TrainingArguments' words, fsdp_config mappings (with or without fsdp_ prefixes), accelerate's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.importers.loading import load_json, read_text
from planner.importers.settings import Settings, as_bool, as_int, as_names
from planner.importers.spread import Launch
from planner.run.recipe import Sharding


def from_fsdp_config(
    section: Mapping[str, Any], *, version: Any = None, gpus: int | None = None
) -> Launch:
    """Return what a mapping of FSDP options says, accelerate's, transformers' or axolotl's."""
    read = {str(key).removeprefix("fsdp_"): value for key, value in section.items()}
    strategy = str(read.get("sharding_strategy", "")).upper()
    told = as_int(version) or as_int(read.get("version"))
    second = told == 2
    reshard = read.get("reshard_after_forward")
    grad_op = (
        "GRAD_OP" in strategy
        or as_bool(reshard) is False
        or str(reshard).upper().endswith("GRAD_OP")
    )
    offload = as_bool(read.get("offload_params", read.get("cpu_offload"))) is True
    if strategy in ("NO_SHARD", "3"):
        sharding = Sharding.DDP
    else:
        # units that stay whole between forward and backward are planned as FSDP2's
        whole = (grad_op or strategy == "2") and not offload
        sharding = Sharding.FSDP2 if whole or (second and not offload) else Sharding.FSDP
    efficient = as_bool(read.get("cpu_ram_efficient_loading")) is True
    return Launch(
        sharding=sharding,
        loads="rank0" if efficient and sharding is not Sharding.DDP else None,
        reshard=not (grad_op or strategy == "2") or sharding is not Sharding.FSDP2,
        gpus=gpus,
        parameter_offload=offload,
        checkpointing=as_bool(read.get("activation_checkpointing")) is True,
        hybrid="HYBRID" in strategy,
        origin="fsdp_config",
    )


def _from_file(settings: Settings, name: str, base: Path | None) -> dict[str, Any]:
    """Return the section that a file named by fsdp_config holds, {} with a note where it is not here."""
    folders = (base.parent, *base.parents[1:4]) if base is not None else ()
    for place in [folder / spelling for folder in folders for spelling in (name, Path(name).name)]:
        try:
            if place.is_file():
                document = load_json(read_text(place)[0])
                return document if isinstance(document, dict) else {}
        except OSError:  # a name longer than a path may be
            break
    settings.effect(f"fsdp_config {name[:100]}: the file is not here, its settings are not planned")
    return {}


def fsdp_setting(
    settings: Settings, *, version: Any = None, base: Path | None = None
) -> Launch | None:
    """Return what `fsdp` and `fsdp_config` of TrainingArguments say, None where neither is set."""
    named_file = settings.values.get("fsdp_config")
    if isinstance(named_file, str) and named_file.endswith(".json"):
        settings.raw("fsdp_config", to="sharding")
        section = _from_file(settings, named_file, base)
    else:
        section = settings.mapping("fsdp_config") or {}
    words = settings.raw("fsdp", to="sharding")
    named = settings.raw("fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params")
    listed = (
        [word.lower() for word in as_names(words)]
        if not isinstance(words, bool)
        else ["full_shard"]
    )
    if isinstance(words, bool) and not words:
        listed = []
    if not listed and not section:
        return None
    merged = dict(section)
    if "offload" in listed:
        merged["offload_params"] = True
    for word in listed:
        if word in ("shard_grad_op", "hybrid_shard_zero2"):
            merged["sharding_strategy"] = "SHARD_GRAD_OP"
        elif word in ("hybrid_shard", "no_shard"):
            merged["sharding_strategy"] = word.upper()
    del named
    return from_fsdp_config(merged, version=version)
