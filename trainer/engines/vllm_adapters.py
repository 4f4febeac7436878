"""How trained adapters reach vLLM: as files in RAM, or folded into the weights it serves."""

import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainer.adapters import is_pissa
from trainer.engines.vllm_llm import ADAPTER_ID
from trainer.model import Policy
from trainer.parallel.ranks import ALONE, Ranks
from trainer.parallel.saving import gathered
from trainer.parallel.together import together
from trainer.parallel.whole import whole


def base_name(name: str) -> str:
    """Strip what PEFT adds to a parameter's name."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


class AdapterFolder:
    """Hands the policy's adapter to vLLM: a folder in RAM, reloaded in place under one id.

    The ranks of a host share one, which the first of them writes.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        ram = Path("/dev/shm")
        own = tempfile.mkdtemp(prefix="vramwise-", dir=ram if ram.is_dir() else None)
        host = socket.gethostname()
        folders = [path for at, path in ranks.gather_objects((host, own)) if at == host]
        self.path = Path(folders[0])
        self._writes = folders[0] == own
        if not self._writes:
            Path(own).rmdir()
        self._saved = False

    def request(self, policy: Policy) -> Any:
        """Save the adapter and return a request that makes vLLM reload it in place; all ranks call it."""
        from vllm.lora.request import LoRARequest

        ranks = policy.ranks
        tensors = gathered(policy, here=self._writes) if ranks.several else None

        def write() -> None:
            if self._writes:
                policy.model.save_pretrained(self.path, safe_serialization=True, state_dict=tensors)

        together(ranks, write)
        self._saved = True
        return LoRARequest("policy", ADAPTER_ID, str(self.path), load_inplace=True)

    def loaded(self) -> Any:
        """Return the request for the adapter as it is loaded, or None before the first."""
        from vllm.lora.request import LoRARequest

        return LoRARequest("policy", ADAPTER_ID, str(self.path)) if self._saved else None

    def close(self) -> None:
        """Remove the folder."""
        if self._writes:
            shutil.rmtree(self.path, ignore_errors=True)


def has_adapters(policy: torch.nn.Module) -> bool:
    """True when the policy is a PEFT model."""
    return hasattr(policy, "peft_config")


def needs_merging(policy: Any, *, shared: bool = False) -> str:
    """Return why the adapter cannot be served as an adapter ("" when it can).

    `shared`: the policy's weights are vLLM's own, so that biases are trained where they are served.
    """
    if not has_adapters(policy):
        return ""
    config = policy.peft_config["default"]
    if config.use_dora:
        return "DoRA rescales the base weight"
    if config.lora_bias:
        return "the adapter has biases"
    if config.bias != "none" and not shared:
        return "the base's biases are trained"
    if config.modules_to_save:
        return "modules_to_save trains whole modules"
    if is_pissa(policy):
        return "PiSSA changed the base's weights"
    return ""


def merged_weight(layer: Any) -> torch.Tensor:
    """Return base weight + adapter update of one PEFT linear, in the base's dtype.

    DoRA: magnitude / ||W + dW|| per output row times (W + dW).
    """
    weight = layer.get_base_layer().weight.detach()
    delta = layer.get_delta_weight("default")
    total = weight + delta.to(weight.dtype)
    if not layer.use_dora["default"]:
        return total
    magnitude = layer.lora_magnitude_vector["default"]
    norm = magnitude.get_weight_norm(weight.to(delta.dtype), delta, scaling=1)
    return (total * (magnitude.weight / norm).view(-1, 1)).to(weight.dtype)


def adapted_layers(policy: torch.nn.Module) -> dict[str, Any]:
    """Return every PEFT linear of the policy by its path."""
    return {
        name: module
        for name, module in policy.named_modules()
        if hasattr(module, "get_delta_weight") and hasattr(module, "lora_A")
    }


class MergedWeights:
    """Folds adapters into the shared weights for a rollout and restores them bit for bit.

    The untouched weights wait on the host: subtracting the update again would not give the same
    bits back in half precision.
    """

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self._kept: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def merge(self) -> None:
        """Add every adapter's update to its base weight, in place."""
        for name, layer in adapted_layers(self._policy).items():
            weight = layer.get_base_layer().weight
            self._kept[name] = weight.detach().to("cpu", copy=True)
            weight.copy_(merged_weight(layer))

    @torch.no_grad()
    def restore(self) -> None:
        """Put the base weights back exactly as they were."""
        for name, kept in self._kept.items():
            self._policy.get_submodule(name).get_base_layer().weight.copy_(kept)
        self._kept.clear()


@torch.no_grad()
def merged_weights(policy: Policy, *, fold: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (transformers name, tensor), adapters folded in or left out, one parameter at a time; all ranks do.

    The largest extra allocation is one merged weight. Of a policy in parts each is made whole on every rank;
    what is outside the layers comes last: vLLM keeps the padded ones until it has all of them.
    """
    for _, name, layer, parameter in served(policy, fold=fold):
        tensor = whole(parameter) if layer is None else merged_weight(layer)
        # a unit's own weight goes when the unit is cut again
        passing = policy.ranks.several and layer is None and not isinstance(parameter, DTensor)
        yield name, tensor.clone() if passing else tensor


def served(
    policy: Policy, *, fold: bool = True
) -> Iterator[tuple[str, str, Any, torch.nn.Parameter]]:
    """Yield (PEFT's name, transformers name, PEFT layer or None, parameter) of every weight that vLLM serves.

    The layer: its adapter is to be folded in, which `fold` asks for. That needs whole ones: of a policy in parts
    a unit of FSDP2's is whole while its weights are yielded, and not longer.
    """
    sharded = policy.sharded
    if sharded is None or not fold or not has_adapters(policy.model):
        yield from _served(policy.model, fold=fold)
        return
    for _ in sharded.each_whole():
        for row in _served(policy.model, fold=fold):
            if not isinstance(row[-1], DTensor):
                yield row


def _served(model: Any, *, fold: bool) -> Iterator[tuple[str, str, Any, torch.nn.Parameter]]:
    layers = {f"{base_name(name)}.weight": layer for name, layer in adapted_layers(model).items()}
    named = sorted(model.named_parameters(), key=lambda item: ".layers." not in item[0])
    for full_name, parameter in named:
        if "lora_" in full_name or ".original_module." in full_name:
            continue
        name = base_name(full_name).replace(".modules_to_save.default.", ".")
        yield full_name, name, layers.get(name) if fold else None, parameter
