"""An adapter that exists already: what its adapter_config.json says, from a folder or the hub.

Only what a plan and a run can go on with is taken; what PEFT can and this project cannot is refused.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from planner.errors import UnsupportedError, UsageError
from planner.models.config_file import parse_config, read_config
from planner.models.hub_remote import fetch_file

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_UNPLANNED = (
    "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern", "layer_replication",
    "trainable_token_indices", "exclude_modules", "lora_bias", "use_qalora", "alora_invocation_tokens",
    "arrow_config", "kasa_config", "monteclora_config", "velora_config", "use_bdlora", "megatron_config",
)  # fmt: skip
"""What changes an adapter's shape or arithmetic beyond what is planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFile:
    """An adapter on disk or on the hub, by its config."""

    where: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    target_parameters: tuple[str, ...]
    modules_to_save: tuple[str, ...]
    dora: bool
    use_rslora: bool
    bias: str
    base: str
    """The model it says it was made for; "" = it doesn't."""


def is_folder(where: str) -> bool:
    """Say whether an adapter is named by a path, not by a hub id."""
    return where.startswith((".", "/", "~")) or Path(where).expanduser().exists()


def read_adapter(where: str) -> AdapterFile:
    """Return the adapter in the folder or hub repository `where`; raises UsageError in one line."""
    if not is_folder(where):
        return _from_hub(where)
    folder = Path(where).expanduser()
    file = folder / CONFIG_FILE
    if not file.is_file():
        inside = sorted(path.parent.name for path in folder.glob(f"checkpoints/*/{CONFIG_FILE}"))
        raise UsageError(
            f"lora.from: {where} holds no {CONFIG_FILE}",
            hint=f"a run's adapter is in its checkpoint: {folder}/checkpoints/{inside[-1]}"
            if inside
            else "a folder that PEFT saved an adapter to, or a hub id",
        )
    return _from_file(str(file), file.stat().st_mtime_ns, where)


@lru_cache(maxsize=64)
def _from_file(file: str, changed_ns: int, where: str) -> AdapterFile:
    return _read(read_config(Path(file)), where)


@lru_cache(maxsize=64)
def _from_hub(where: str) -> AdapterFile:
    file = fetch_file(where, CONFIG_FILE)
    return _read(parse_config(file.read_bytes(), label=f"{where}/{CONFIG_FILE}"), where)


def _read(config: dict[str, Any], where: str) -> AdapterFile:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(
            f"lora.from: the adapter in {where} is {str(kind)[:40]!r}, not LORA",
            hint="LoRA, rsLoRA and DoRA adapters can be gone on with",
        )
    for name in _UNPLANNED:
        if config.get(name):
            raise UnsupportedError(
                f"lora.from: the adapter in {where} has {name}, which is not planned",
                hint="merge it into its base first, and train a new adapter on that",
            )
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init not in ("gaussian", "orthogonal"):
        raise UnsupportedError(
            f"lora.from: the adapter in {where} was begun as {init!r}, which changed its base's weights",
            hint="convert it to plain LoRA (PEFT: path_initial_model_for_weight_conversion); the "
            "checkpoints of vramwise's own PiSSA runs are plain LoRA",
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not (isinstance(rank, int) and rank > 0 and isinstance(alpha, int | float) and alpha > 0):
        raise UsageError(
            f"lora.from: {where}/{CONFIG_FILE} has r {rank!r} and lora_alpha {alpha!r}",
            hint="both are positive numbers",
        )
    return AdapterFile(
        where=where,
        rank=rank,
        alpha=float(alpha),
        targets=_targets(config.get("target_modules"), where),
        target_parameters=_names(config.get("target_parameters"), "target_parameters", where),
        modules_to_save=_names(config.get("modules_to_save"), "modules_to_save", where),
        dora=bool(config.get("use_dora")),
        use_rslora=bool(config.get("use_rslora")),
        bias=str(config.get("bias") or "none"),
        base=str(config.get("base_model_name_or_path") or ""),
    )


def _targets(value: Any, where: str) -> tuple[str, ...]:
    """Return the modules' names inside a layer."""
    if isinstance(value, str) and value != "all-linear":
        raise UnsupportedError(
            f"lora.from: the adapter in {where} names its modules by a pattern, {value[:60]!r}",
            hint="list them in its target_modules: q_proj, k_proj ...",
        )
    if isinstance(value, str):
        return (value,)
    names = _names(value, "target_modules", where)
    return tuple(sorted({_in_layer(name) for name in names}))


def _in_layer(name: str) -> str:
    """Return a full path without the layer's number: `model.layers.3.mlp.up_proj` -> `mlp.up_proj`."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[0] + 1 :]) if numbers and numbers[0] + 1 < len(parts) else name


def _names(value: Any, field: str, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise UsageError(
            f"lora.from: {where}/{CONFIG_FILE} has {field} {str(value)[:60]!r}",
            hint="a list of names",
        )
    return tuple(sorted(value))
