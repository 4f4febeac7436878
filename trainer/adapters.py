"""Adapters on a base model: new ones of every kind, or one that exists already; PiSSA's start and its end.

PEFT makes and computes them. Here is what it leaves open: dtypes, bases whose weights come later
(vllm-shared), and a PiSSA whose checkpoints any tool loads.
"""

import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from planner.errors import UnsupportedError, UsageError
from planner.families import model_spec_from_config
from planner.models.adapter_file import read_adapter
from planner.models.lora_rest import EMBEDDINGS
from planner.models.lora_targets import peft_targets
from planner.run.recipe import LoraSection

SCALE = 2.0
"""How strongly adapters act when no alpha is given."""
LORA_PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


def add_adapters(
    model: Any,
    lora: LoraSection,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    alpha: float | None,
) -> Any:
    """Return PEFT's wrapper: adapters in `dtype`, copies of modules in the base's own.

    Raises UsageError or UnsupportedError for what doesn't go with this model.
    """
    config = _config(model, lora, alpha)
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        wrapped = _wrap(model, config)
        _materialise(wrapped, lora, device=device)
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad and _is_adapter(name):
                parameter.data = parameter.data.to(dtype)
        if lora.init.startswith("pissa"):
            start_pissa(wrapped, lora.init)
    if lora.start_from is not None:
        load_start(wrapped, lora.start_from)
    return wrapped


def _config(model: Any, lora: LoraSection, alpha: float | None) -> Any:
    """Return PEFT's config; an adapter to start from brings its own targets and alpha."""
    from peft import LoraConfig

    spec = model_spec_from_config(_published(model.config))
    targets: Any = peft_targets(spec, lora.targets, lora.target_parameters)
    if lora.start_from is not None:
        alpha = read_adapter(lora.start_from).alpha
    scale = math.sqrt(lora.rank) if lora.use_rslora else lora.rank
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=SCALE * scale if alpha is None else alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=targets,
        target_parameters=list(lora.target_parameters) or None,
        modules_to_save=list(lora.modules_to_save) or None,
        # a copy of a tied embedding alone would leave the head where it was
        ensure_weight_tying=tied and _saves_embedding(lora),
        use_dora=lora.dora,
        use_rslora=lora.use_rslora,
        init_lora_weights="gaussian" if lora.init == "gaussian" else True,
        bias=lora.bias,
    )


def _saves_embedding(lora: LoraSection) -> bool:
    ends = (*EMBEDDINGS, "lm_head")
    return any(name.endswith(ends) for name in lora.modules_to_save)


def _wrap(model: Any, config: Any) -> Any:
    from peft import get_peft_model

    _refuse_packed(model, config)
    try:
        # autocast_adapter_dtype would make the adapters fp32 and cast x to fp32 in each of them:
        # 73 H instead of 45.8 H bytes per token and layer (measured); the optimizer holds fp32
        wrapped: Any = get_peft_model(model, config, autocast_adapter_dtype=False)
    except (ValueError, TypeError, RuntimeError) as error:
        field = "modules_to_save" if "modules_to_save" in str(error) else "targets"
        raise UsageError(f"recipe.lora.{field}: {str(error).splitlines()[0][:200]}") from None
    head = wrapped.get_base_model().get_output_embeddings()
    if hasattr(head, "lora_A"):
        raise UnsupportedError(
            "recipe.lora.targets: lm_head cannot be adapted: the loss reads its weight, never its output",
            hint="train it whole: modules_to_save: [lm_head]",
        )
    return wrapped


def _refuse_packed(model: Any, config: Any) -> None:
    """Refuse to train a copy of quantised weights."""
    for name, module in model.named_modules():
        packed = type(module).__name__ in ("Linear4bit", "Linear8bitLt")
        if packed and name.endswith(tuple(config.modules_to_save or ())):
            raise UnsupportedError(
                f"recipe.lora.modules_to_save: {name.rsplit('.', 1)[-1]} is quantised, and packed weights "
                "cannot be trained",
                hint="embed_tokens, lm_head and norms are not quantised; or method: lora",
            )


def _published(config: Any) -> dict[str, Any]:
    """Return the config.json of a loaded model, without what quantised it on the way in."""
    return {
        name: value for name, value in config.to_dict().items() if name != "quantization_config"
    }


def _is_adapter(name: str) -> bool:
    return any(part in name for part in LORA_PARTS)


def _materialise(wrapped: Any, lora: LoraSection, *, device: torch.device) -> None:
    """Give adapters that PEFT put beside meta weights real ones, initialised as PEFT does."""
    for module in wrapped.modules():
        adapters = getattr(module, "lora_A", None)
        if not adapters or not next(adapters.parameters()).is_meta:
            continue
        if module.use_dora["default"] and lora.start_from is None:
            raise UnsupportedError(
                "recipe.lora.dora: its magnitudes are norms of weights that vllm-shared loads later",
                hint="use --engine vllm-push, or dora: false",
            )
        for part in (module.lora_A, module.lora_B, module.lora_magnitude_vector):
            part.to_empty(device=device)
        module.reset_lora_parameters("default", "gaussian" if lora.init == "gaussian" else True)


def load_start(wrapped: Any, where: str) -> None:
    """Put the weights of the adapter at `where` into the fresh adapters; raises UsageError if they don't fit."""
    from peft import load_peft_weights, set_peft_model_state_dict

    try:
        tensors = load_peft_weights(where, device="cpu")
        result: Any = set_peft_model_state_dict(wrapped, tensors)
    except Exception as error:  # PEFT, safetensors and the hub each have their own
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = next((line for line in lines if "size mismatch" in line), (lines or [""])[0])
        raise UsageError(
            f"lora.from: the adapter in {where} cannot be loaded into this model: "
            f"{told[:200] or type(error).__name__}",
            hint="is it an adapter of this base model?",
        ) from None
    missing = [key for key in result.missing_keys if _is_adapter(key) or "modules_to_save" in key]
    for problem, keys in (("has no weights of", missing), ("has", result.unexpected_keys)):
        if keys:
            raise UsageError(
                f"lora.from: the adapter in {where} {problem} {keys[0]}"
                + ("" if problem != "has" else ", which this model has not"),
                hint="is it an adapter of this base model?",
            )


def adapted_linears(wrapped: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and the PEFT layer of every adapted linear."""
    for name, module in wrapped.named_modules():
        if "default" in getattr(module, "lora_A", ()):
            yield name, module


@torch.no_grad()
def start_pissa(wrapped: Any, init: str) -> None:
    """Begin as PiSSA does: adapters hold the base's first singular vectors, the base what is left.

    The factors are rounded to the adapters' dtype first, so that the policy is the base but for one
    rounding of what is left (PEFT's own start rounds them after it).
    """
    for name, layer in adapted_linears(wrapped):
        weight = layer.get_base_layer().weight
        if weight.dim() != 2 or not hasattr(layer, "fan_in_fan_out"):
            raise UnsupportedError(f"recipe.lora.init: {name} is no linear layer", hint="default")
        matrix = weight.detach().to(torch.float32)
        matrix = matrix.T if layer.fan_in_fan_out else matrix
        rank, scale = layer.r["default"], layer.scaling["default"]
        if "niter" in init:
            left, values, right = torch.svd_lowrank(
                matrix, q=rank, niter=int(init.rsplit("_", 1)[-1])
            )
            right = right.T
        else:
            left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        if len(values) < rank:
            raise UsageError(
                f"recipe.lora.rank: {rank} is more than {name} has singular values, {len(values)}",
                hint=f"at most {len(values)} with init {init}",
            )
        root = (values[:rank] / scale).sqrt()
        down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        down.copy_(root[:, None] * right[:rank])
        up.copy_(left[:, :rank] * root)
        del left, values, right
        rest = matrix - scale * (up.float() @ down.float())
        weight.copy_(rest.T if layer.fan_in_fan_out else rest)
    wrapped.peft_config["default"].init_lora_weights = init


def is_pissa(wrapped: Any) -> bool:
    """Say whether a PEFT model began as PiSSA: its base is what is left of the model's weights."""
    config = getattr(wrapped, "peft_config", {}).get("default")
    return str(getattr(config, "init_lora_weights", "")).startswith("pissa")


def factors(wrapped: Any) -> dict[str, Tensor]:
    """Return copies, on the host, of every adapter's A and B."""
    return {
        f"{name}.{part}": getattr(layer, part)["default"].weight.detach().to("cpu", copy=True)
        for name, layer in adapted_linears(wrapped)
        for part in ("lora_A", "lora_B")
    }


def pissa_as_lora(
    wrapped: Any, tensors: dict[str, Tensor], start: dict[str, Tensor]
) -> tuple[Any, dict[str, Tensor]]:
    """Return (config, tensors) of a plain LoRA on the untouched base: BA - B0 A0, of twice the rank."""
    from copy import copy

    config = copy(wrapped.peft_config["default"])
    growth = math.sqrt(2) if config.use_rslora else 2
    config.r, config.lora_alpha = 2 * config.r, config.lora_alpha * growth
    config.init_lora_weights = True
    made = dict(tensors)
    for name, first in start.items():
        key = f"{name}.weight"
        now = tensors[key].cpu()
        down = name.endswith("lora_A")
        made[key] = torch.cat([now, first] if down else [now, -first], dim=0 if down else 1)
    return config, made


@torch.no_grad()
def split_pissa(
    wrapped: Any, tensors: dict[str, Tensor], start: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the adapters' own part of what pissa_as_lora made.

    Where this machine decomposed the base otherwise than the one that saved, the base is set right.
    """
    own = dict(tensors)
    for name, layer in adapted_linears(wrapped):
        rank, scale = layer.r["default"], layer.scaling["default"]
        down, up = (tensors[f"{name}.{part}.weight"] for part in ("lora_A", "lora_B"))
        first_down, first_up = down[rank:], -up[:, rank:]
        mine_down, mine_up = start[f"{name}.lora_A"], start[f"{name}.lora_B"]
        if not (torch.equal(first_down, mine_down) and torch.equal(first_up, mine_up)):
            moved = mine_up.float() @ mine_down.float() - first_up.float() @ first_down.float()
            weight = layer.get_base_layer().weight
            moved = scale * (moved.T if layer.fan_in_fan_out else moved)
            weight.copy_(weight.float() + moved.to(weight.device))
            start[f"{name}.lora_A"], start[f"{name}.lora_B"] = first_down, first_up
        own[f"{name}.lora_A.weight"] = down[:rank].contiguous()
        own[f"{name}.lora_B.weight"] = up[:, :rank].contiguous()
    return own
