"""Sharding and GPU counts: DeepSpeed JSON, accelerate YAML, launch words and environment."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.errors import UsageError
from planner.importers.deepspeed import buckets, refuse_contradictions, stage_of
from planner.importers.fsdp_config import from_fsdp_config
from planner.importers.loading import MAX_BYTES, load_json, load_yaml
from planner.importers.pasted import decode
from planner.importers.settings import Settings, as_bool, as_int
from planner.importers.spread import Launch
from planner.run.framework import pick
from planner.run.recipe import Method, Sharding, Task

_SHORT_STAGE = re.compile(r"(?:^|[_/.-])[sz]([0-3])(?=[_.-]|$)", re.IGNORECASE)
"""ds_config_s2.json, z3_offload.json"""
_STAGE = re.compile(r"(?:zero|ds_z|stage)[-_ ]?([0123])", re.IGNORECASE)


def from_deepspeed(document: dict[str, Any], *, origin: str = "DeepSpeed JSON") -> Launch:
    """Return what a DeepSpeed config says; "auto" values come from the trainer."""
    zero = document.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    stage = stage_of(zero)
    refuse_contradictions(document, zero, stage)

    def offloads(key: str) -> bool:
        section = zero.get(key)
        return isinstance(section, dict) and str(section.get("device", "none")).lower() not in (
            "none",
            "",
        )

    sections = [zero.get(key) for key in ("offload_optimizer", "offload_param")]
    asked = [section for section in sections if isinstance(section, dict)]
    precision = None
    for name in ("bf16", "fp16"):
        section = document.get(name)
        if isinstance(section, dict) and as_bool(section.get("enabled")):
            precision = name
    return Launch(
        sharding=_stage(stage),
        optimizer_offload=offloads("offload_optimizer") or as_bool(zero.get("cpu_offload")) is True,
        parameter_offload=offloads("offload_param"),
        offload_device=_device(*(section.get("device") for section in asked)),
        pinned=any(as_bool(section.get("pin_memory")) for section in asked) if asked else None,
        buckets=buckets(document, zero, stage),
        mixed_precision=precision,
        origin=origin,
    )


def _device(*named: Any) -> str:
    """Return nvme if one of the devices is."""
    return "nvme" if "nvme" in [str(name).lower() for name in named] else "cpu"


def _stage(stage: int) -> Sharding:
    return {1: Sharding.ZERO1, 2: Sharding.ZERO2, 3: Sharding.ZERO3}.get(stage, Sharding.DDP)


def from_accelerate(document: dict[str, Any]) -> Launch:
    """Return what an accelerate config file says."""
    kind = str(document.get("distributed_type", "NO")).upper()
    gpus = as_int(document.get("num_processes"))
    precision = document.get("mixed_precision")
    common = Launch(
        gpus=gpus,
        mixed_precision=str(precision) if precision not in (None, "no") else None,
        origin="accelerate config",
    )
    if kind == "DEEPSPEED":
        section = document.get("deepspeed_config") or {}
        if named := section.get("deepspeed_config_file"):
            words = from_words(str(named))
            return replace(words, gpus=gpus, mixed_precision=words.mixed_precision)
        return replace(
            common,
            sharding=_stage(as_int(section.get("zero_stage")) or 0),
            optimizer_offload=str(section.get("offload_optimizer_device", "none")).lower()
            != "none",
            parameter_offload=str(section.get("offload_param_device", "none")).lower() != "none",
            loads="full" if as_bool(section.get("zero3_init_flag")) is False else None,
            offload_device=_device(
                section.get("offload_optimizer_device"), section.get("offload_param_device")
            ),
        )
    if kind == "FSDP":
        found = from_fsdp_config(document.get("fsdp_config") or {}, gpus=gpus)
        return replace(found, mixed_precision=common.mixed_precision, origin=common.origin)
    return replace(
        common,
        sharding=Sharding.DDP if (gpus or 1) > 1 or kind.startswith("MULTI") else Sharding.NONE,
    )


def from_words(text: str) -> Launch:
    """Return what a launch line, a preset's name or a file's name says."""
    gpus = None
    if match := re.search(
        r"num[_-]processes[= ]+(\d+)|nproc[_-]per[_-]node[= ]+(\d+)", text, re.IGNORECASE
    ):
        gpus = int(match.group(1) or match.group(2))
    sharding = None
    if match := _STAGE.search(text):
        sharding = _stage(int(match.group(1)))
    elif match := re.search(r"\bfsdp(\d?)(?:\b|_)", text, re.IGNORECASE):
        sharding = Sharding.FSDP2 if match[1] == "2" else Sharding.FSDP
    elif re.search(r"\bddp\b|multi_gpu", text, re.IGNORECASE):
        sharding = Sharding.DDP
    offload = bool(re.search(r"offload", text, re.IGNORECASE)) and sharding is not None
    return Launch(
        sharding=sharding,
        gpus=gpus,
        optimizer_offload=offload,
        parameter_offload=offload and sharding is Sharding.ZERO3,
        origin=text.strip()[:80],
    )


def launched(
    settings: Settings, recipe: dict[str, Any], launch: Launch | None, base: Path | None
) -> int | None:
    """Apply a launcher's words, then the Trainer's `deepspeed` field; return the GPUs that they say."""
    gpus = apply_launch(settings, recipe, launch) if launch else None
    if value := settings.mapping("deepspeed") or settings.raw("deepspeed", to="sharding"):
        gpus = apply_launch(settings, recipe, deepspeed_setting(settings, value, base)) or gpus
    return gpus


def deepspeed_setting(settings: Settings, value: Any, base: Path | None) -> Launch:
    """Return a tool's `deepspeed` value: a mapping, a file beside the config, or a preset's name."""
    if isinstance(value, dict):
        return from_deepspeed(value)
    if isinstance(value, str) and value.lstrip().startswith("{"):
        document = load_json(value)
        return from_deepspeed(document if isinstance(document, dict) else {}, origin="inline JSON")
    name = str(value)
    if base is not None and name.endswith(".json"):
        for folder in (base.parent, *base.parents[1:4]):
            path = folder / name
            if path.is_file() and path.stat().st_size < MAX_BYTES:
                document = load_json(decode(path.read_bytes()))
                return from_deepspeed(document if isinstance(document, dict) else {}, origin=name)
    launch = from_words(name)
    if launch.sharding is None and (match := _SHORT_STAGE.search(name)):
        launch = from_words(f"zero{match.group(1)} {name}")
    if launch.sharding is None:
        settings.unread(
            "deepspeed",
            name,
            "the file is not here: stage and offload are not known; planned without sharding",
        )
    else:
        settings.effect(
            f"deepspeed {name}: the stage was read from the name, the file itself is not here"
        )
    return launch


def read_launch_file(path: Path) -> Launch:
    """Return an accelerate YAML or a DeepSpeed JSON as a launch."""
    text = decode(path.read_bytes())
    document = load_json(text) if text.lstrip().startswith("{") else load_yaml(text)
    if not isinstance(document, dict):
        raise UsageError(f"config: {path.name} is neither an accelerate nor a DeepSpeed config")
    if "distributed_type" not in document:
        return from_deepspeed(document)
    section = document.get("deepspeed_config")
    named = section.get("deepspeed_config_file") if isinstance(section, dict) else None
    if named and (inner := path.parent / Path(str(named)).name).is_file():
        found = read_launch_file(inner)
        return replace(found, gpus=as_int(document.get("num_processes")))
    return from_accelerate(document)


def apply_launch(settings: Settings, recipe: dict[str, Any], launch: Launch) -> int | None:
    """Write a launch into a recipe; return the GPU count if it is known."""
    if launch.hybrid:
        settings.effect("hybrid sharding: weights are divided inside a node and copied over nodes")
    if launch.sharding is not None:
        recipe["sharding"] = launch.sharding
    zero = launch.sharding in (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)
    if zero and recipe.get("dtype") in ("bf16", "fp16") and recipe.get("method") is Method.FULL:
        recipe["master_weights"] = True
        settings.effect(
            "DeepSpeed keeps an fp32 master and fp32 Adam states beside 16-bit weights: 16 B/parameter, sharded"
        )
    if launch.optimizer_offload:
        recipe["optimizer_offload"] = True
        settings.effect("the optimizer is offloaded to host memory")
    if launch.buckets:
        recipe["buckets"] = launch.buckets
    if launch.loads and launch.sharding in (Sharding.ZERO3, Sharding.FSDP, Sharding.FSDP2):
        recipe["loads"] = launch.loads
    if not launch.reshard:
        recipe["reshard_after_forward"] = False
    recipe.update(offload_fields(launch))
    if recipe.get("offload"):
        settings.effect("weights, or what the config names, are offloaded between uses")
    if launch.mixed_precision and not recipe.get("mixed_precision"):
        recipe["mixed_precision"] = launch.mixed_precision
    if launch.checkpointing:
        recipe["checkpointing"] = "full"
    return launch.gpus


def offload_fields(launch: Launch) -> dict[str, Any]:
    """Return the recipe's `offload` section, empty where nothing is offloaded."""
    moved = launch.parameter_offload and launch.sharding in (Sharding.ZERO3, Sharding.FSDP)
    if not moved and not launch.optimizer_offload:
        return {}
    fields = {
        "parameters": moved,
        "device": launch.offload_device if launch.sharding is Sharding.ZERO3 else "cpu",
        "pinned": launch.pinned,
    }
    told = {key: value for key, value in fields.items() if value not in (False, None, "cpu")}
    return {"offload": told} if told else {}


def visible_devices(environment: dict[str, str]) -> int | None:
    """Return how many GPUs CUDA_VISIBLE_DEVICES shows, or None."""
    shown = environment.get("CUDA_VISIBLE_DEVICES")
    if not shown or not re.fullmatch(r"[\d, ]+", shown):
        return None
    return len([part for part in shown.split(",") if part.strip()])


def finish_sharding(settings: Settings, recipe: dict[str, Any], gpus: int | None) -> int | None:
    """Return the GPUs; sharding without a count is planned on 1 GPU and said."""
    sharded = recipe.get("sharding") in (
        Sharding.ZERO1,
        Sharding.ZERO2,
        Sharding.ZERO3,
        Sharding.FSDP,
        Sharding.FSDP2,
    )
    if sharded and not gpus:
        settings.effect(
            "the number of GPUs is not in this file (the launcher gives it): planned on 1, say --gpus N"
        )
    if gpus and gpus > 1 and recipe.get("sharding") in (None, Sharding.NONE):
        recipe["sharding"] = Sharding.DDP
    return gpus


def set_degrees(
    settings: Settings, recipe: dict[str, Any], gpus: int | None, **degrees: Any
) -> int | None:
    """Write how the GPUs divide the work into `parallel`; return the GPUs, at least the degrees' product.

    A degree that the framework's law, or the task, has no plan of is named. Context parallelism is then planned as
    the tokens of one rank, the others as sharding over all GPUs.
    """
    words = {key: degrees.pop(key) for key in ("context_kind", "schedule") if key in degrees}
    asked = {
        name: value
        for name, value in degrees.items()
        if value is True or value not in (None, False, 1)
    }
    product = math.prod(
        int(asked.get(name, 1)) for name in ("tensor", "pipeline", "context", "data_replicate")
    )
    planned = _planned(recipe, words.get("context_kind", "ring"))
    if _holds_together(settings, recipe, max(gpus or 1, product), asked, planned):
        asked = {name: value for name, value in asked.items() if name == "context"}
        kept = dict(recipe.pop("parallel"))
        asked |= kept
    for name in [name for name in asked if name in _PLANS and name not in planned]:
        if name == "context":
            _share_tokens(settings, recipe, int(asked[name]))
        else:
            settings.unread(
                f"{name} parallelism",
                asked[name],
                "not planned with this framework and task: its ranks are planned as data-parallel ones, whose "
                "weights and activations are not divided so",
            )
        del asked[name]
    if "tensor" not in asked:
        asked.pop("sequence", None)
    if "pipeline" not in asked:
        asked.pop("virtual_stages", None)
    if "expert" not in asked:
        asked.pop("expert_tensor", None)
    if "context" not in asked:
        words.pop("context_kind", None)
    if "pipeline" not in asked:
        words.pop("schedule", None)
    if asked:
        recipe["parallel"] = {**asked, **words}
    return product if product > 1 and (gpus or 1) < product else gpus


def _holds_together(
    settings: Settings, recipe: dict[str, Any], gpus: int, asked: dict[str, Any], planned: set[str]
) -> bool:
    """Plan a Megatron run that no law covers as FSDP over the ranks that hold one model together."""
    divided = [
        name for name in ("tensor", "pipeline", "expert") if name in asked and name not in planned
    ]
    if not divided or recipe.get("sharding") not in (Sharding.ZERO1, Sharding.MEGATRON):
        return False
    ranks = int(asked.get("pipeline", 1)) * max(
        int(asked.get("tensor", 1)), int(asked.get("expert", 1))
    )
    ranks = min(ranks, gpus)
    if gpus % ranks:
        return False
    recipe["sharding"] = Sharding.FSDP
    recipe["parallel"] = {"data_shard": ranks, "data_replicate": gpus // ranks}
    said = ", ".join(f"{name} {asked[name]}" for name in divided)
    settings.effect(
        f"{said}: the {ranks} ranks that hold a model together are planned as FSDP's, which divides weights "
        "and gradients as they do; activations, and states over the other ranks, are not divided: an upper bound"
    )
    return True


_PLANS = ("tensor", "pipeline", "context", "expert")


def _planned(recipe: dict[str, Any], context_kind: str) -> set[str]:
    """Return the degrees that the planner knows for the recipe's framework and task."""
    if recipe.get("task") is not Task.SFT:
        return set()
    switches = pick(str(recipe["framework"])).switches
    known = {
        "tensor": switches.tensor_plan != "none",
        "pipeline": switches.pipelines,
        "context": context_kind in switches.contexts,
        "expert": switches.expert_parallel,
    }
    return {name for name, yes in known.items() if yes}


def _share_tokens(settings: Settings, recipe: dict[str, Any], ranks: int) -> None:
    for name in ("context", "prompt_length", "completion_length"):
        if recipe.get(name):
            recipe[name] = max(1, -(-int(recipe[name]) // ranks))
    settings.effect(
        f"{ranks} GPUs share the tokens of a sequence: lengths are planned as one rank's, divided by {ranks}"
    )
