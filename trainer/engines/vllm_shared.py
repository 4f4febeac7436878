"""vllm-shared: one copy of the weights. The policy's base parameters are views of vLLM's.

vLLM fuses q, k, v and gate, up into one weight each, stacked on dim 0, so a transformers parameter
is a contiguous slice of it; embeddings are padded at the end. The engine starts first, the policy is
built on the meta device, and each of its parameters is pointed at the slice. Adapters stay outside:
they reach vLLM as files in RAM, loaded in place, or folded into the shared weights and restored
bit for bit afterwards. With full fine-tuning the optimizer writes into the shared weights themselves.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from planner.errors import UsageError, VramwiseError
from planner.plan import Plan
from planner.run.recipe import EngineKind, Recipe
from trainer.engines import vllm_cpu_build, vllm_llm, vllm_sleep
from trainer.engines.protocol import Completion, SamplingSettings
from trainer.engines.vllm_adapters import (
    AdapterFolder,
    MergedWeights,
    base_name,
    has_adapters,
    needs_merging,
)
from trainer.engines.vllm_settings import settings_for
from trainer.model import Policy
from trainer.parallel.ranks import ALONE, Ranks

FIRST_TRAINED_UPDATE = 3
"""The first publishes the weights as built, the second those of step 0 (the same); the third is the
first whose weights differ, so a path that loses updates shows there."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows [start, start + rows) of the parameter `source` of vLLM's model."""

    source: str
    start: int
    rows: int


def refuse(reason: str) -> UsageError:
    """Return the error that says why views are not safe here, and what is."""
    return UsageError(
        f"engine.kind: vllm-shared cannot share this model's weights: {reason}",
        hint=f"use engine kind {vllm_llm.OTHERS['vllm-shared']}",
    )


def map_parameters(policy: torch.nn.Module, model: torch.nn.Module) -> dict[str, Slice]:
    """Map every non-adapter parameter of `policy` to its rows in vLLM's `model`.

    Raises UsageError with the reason when any of them has no plain counterpart: MoE and MLA kernels
    reshuffle, quantised layers hold packed codes, the CPU build drops what it packed.
    """
    _refuse_unsafe_modules(model)
    theirs = {name.replace(".base_layer.", "."): name for name, _ in model.named_parameters()}
    packed = getattr(model, "packed_modules_mapping", {}) or {}
    parameters = dict(model.named_parameters())
    modules = dict(model.named_modules())
    plan: dict[str, Slice] = {}
    for full_name, parameter in policy.named_parameters(remove_duplicate=False):
        if "lora_" in full_name or "modules_to_save" in full_name:
            continue
        name = base_name(full_name)
        if name == "lm_head.weight" and name not in theirs:
            name = "model.embed_tokens.weight"  # tied: vLLM keeps the embedding alone
        source = _find(name, theirs, packed, modules, parameters)
        if source is None:
            raise refuse(f"{name} has no counterpart in vLLM")
        candidate = parameters[source.source]
        if candidate.numel() == 0:
            raise refuse(f"vLLM packed {name} and dropped the plain weight")
        if candidate.dtype != parameter.dtype:
            raise refuse(f"{name} is {candidate.dtype} in vLLM and {parameter.dtype} here")
        rows = parameter.shape[0]
        if candidate.shape[1:] != parameter.shape[1:] or source.start + rows > candidate.shape[0]:
            raise refuse(
                f"{name} is {tuple(candidate.shape)} in vLLM and {tuple(parameter.shape)} here"
            )
        plan[full_name] = Slice(source.source, source.start, rows)
    return plan


def _find(
    name: str,
    theirs: dict[str, str],
    packed: dict[str, list[str]],
    modules: dict[str, torch.nn.Module],
    parameters: dict[str, torch.nn.Parameter],
) -> Slice | None:
    if name in theirs:
        return Slice(theirs[name], 0, parameters[theirs[name]].shape[0])
    module_path, _, tensor = name.rpartition(".")
    parent, _, leaf = module_path.rpartition(".")
    for fused, parts in packed.items():
        candidate = f"{parent}.{fused}.{tensor}"
        if leaf not in parts or candidate not in theirs:
            continue
        layer = modules.get(f"{parent}.{fused}")
        layer = getattr(layer, "base_layer", layer)
        sizes = getattr(layer, "output_sizes", None)
        if sizes is None or len(sizes) != len(parts):
            return None
        index = parts.index(leaf)
        return Slice(theirs[candidate], sum(sizes[:index]), sizes[index])
    return None


def _refuse_unsafe_modules(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if _is_a(module, "RoutedExperts") or _is_a(
            getattr(module, "quant_method", None), "FusedMoEMethodBase"
        ):
            raise refuse(f"{name} is a mixture of experts, whose kernels reorder the weights")
        if "MLA" in type(module).__name__:
            raise refuse(f"{name} is latent attention, which keeps derived copies of kv_b_proj")
        method = getattr(module, "quant_method", None)
        if _is_a(method, "LinearMethodBase") and not _is_a(method, "UnquantizedLinearMethod"):
            raise refuse(f"{name} is quantised ({type(method).__name__})")


def _is_a(thing: object, class_name: str) -> bool:
    """True when a class of that name is among the bases: vLLM's modules move between releases."""
    return any(base.__name__ == class_name for base in type(thing).__mro__)


def adopt(policy: torch.nn.Module, model: torch.nn.Module) -> dict[str, Slice]:
    """Point the policy's base parameters at vLLM's storage; return where each of them is.

    Buffers left on the meta device (rotary tables) are rebuilt. Tied parameters stay tied.
    """
    mapping = map_parameters(policy, model)
    parameters = dict(model.named_parameters())
    views: dict[Slice, torch.nn.Parameter] = {}
    for name, place in mapping.items():
        module_path, _, leaf = name.rpartition(".")
        module = policy.get_submodule(module_path)
        old = getattr(module, leaf)
        rows = old.shape[0]
        if place not in views:  # tied parameters map to one place and stay one Parameter
            view = parameters[place.source].data[place.start : place.start + rows]
            views[place] = torch.nn.Parameter(view, requires_grad=old.requires_grad)
        setattr(module, leaf, views[place])
    _rebuild_meta_buffers(policy, device=next(iter(parameters.values())).device)
    assert_shared(policy, model, mapping)
    return mapping


def assert_shared(
    policy: torch.nn.Module, model: torch.nn.Module, mapping: dict[str, Slice]
) -> None:
    """Compare addresses: the policy's parameter must start exactly at its rows of vLLM's storage."""
    theirs = dict(model.named_parameters())
    ours = dict(policy.named_parameters(remove_duplicate=False))
    for name, place in mapping.items():
        source, own = theirs[place.source], ours[name]
        offset = place.start * source.stride(0) * source.element_size()
        local = own.to_local() if isinstance(own, DTensor) else own
        if local.data_ptr() != source.data_ptr() + offset:
            raise refuse(f"{name} did not keep vLLM's storage")


def _rebuild_meta_buffers(policy: torch.nn.Module, *, device: torch.device) -> None:
    """Recompute rotary tables that were built on the meta device."""
    for name, module in policy.named_modules():
        on_meta = [key for key, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        if not on_meta:
            continue
        config = getattr(module, "config", None)
        if config is None:
            raise refuse(f"buffer {name}.{on_meta[0]} cannot be rebuilt")
        fresh = type(module)(config)
        for key in on_meta:
            setattr(module, key, getattr(fresh, key).to(device))


class VllmSharedEngine:
    """Generates with the policy's own weights through vLLM."""

    name = "vllm-shared"

    def __init__(
        self,
        policy: Policy,
        *,
        recipe: Recipe,
        plan: Plan | None = None,
        guided: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        """Start vLLM, give the policy its weights, and check that both compute the same.

        The policy's base may be on the meta device: it then never had weights of its own. Of several `ranks`
        each starts an engine that its own policy shares; they are checked when the policy is laid out over the
        ranks, by `follow`.
        """
        if has_adapters(policy.model) and policy.model.peft_config["default"].modules_to_save:
            raise refuse("modules_to_save trains whole modules beside the shared ones")
        self._policy = policy
        merging = needs_merging(policy.model, shared=True)
        if merging and ranks.several:
            raise refuse(f"{merging}, which is folded into whole weights, and ranks hold parts")
        self._settings = settings_for(
            policy,
            recipe=recipe,
            plan=plan,
            kind=EngineKind.VLLM_SHARED,
            guided=guided,
            ranks=ranks,
        )
        self._lora: Any = None
        self._released = False
        self._updates = 0
        self._probe = vllm_llm.probe_tokens(policy, min(32, self._settings.max_model_len - 1))
        self._merged = None
        if merging:
            self._merged = MergedWeights(policy.model)
            self._settings = replace(self._settings, lora_rank=0)
        with vllm_cpu_build.unpacked_cpu_linears():
            self.llm = vllm_llm.start_llm(self._settings)
        self._folder = AdapterFolder(ranks)
        try:
            self.shared = adopt(policy.model, vllm_llm.vllm_model(self.llm))
            if not ranks.several:
                self.follow(policy)
        except BaseException:
            self.close()
            raise

    @property
    def shared_bytes(self) -> int:
        """Bytes that are the policy's and vLLM's."""
        parameters = dict(vllm_llm.vllm_model(self.llm).named_parameters())
        return sum(
            parameters[place.source][: place.rows].nbytes for place in set(self.shared.values())
        )

    def follow(self, policy: Policy) -> None:
        """Serve `policy`, whose weights are the shared ones still, and check that both compute the same."""
        self._policy = policy
        assert_shared(policy.model, vllm_llm.vllm_model(self.llm), self.shared)
        self.update_weights()
        self.check("after building")

    def check(self, when: str) -> float:
        """Compare log-probs of engine and policy on the probe prompt; stop when they differ."""
        if self._merged is not None:
            # merged: the base weights hold the update, so the policy is scored without adapters
            self._merged.merge()
            try:
                vllm_sleep.forget_prefixes(self.llm)
                with self._policy.model.disable_adapter():
                    return vllm_llm.check_agreement(
                        self.llm, self._policy.model, self._probe, engine=self.name, when=when
                    )
            finally:
                self._merged.restore()
        return vllm_llm.check_agreement(
            self.llm,
            self._policy.model,
            self._probe,
            engine=self.name,
            lora_request=self._lora,
            when=when,
            sharded=self._policy.sharded,
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], settings: SamplingSettings
    ) -> list[Completion]:
        """Return num_generations completions per prompt, grouped by prompt."""
        if self._merged is not None:
            self._merged.merge()
            vllm_sleep.forget_prefixes(self.llm)
        try:
            return vllm_llm.generate(
                self.llm,
                prompts,
                settings,
                eos_token_ids=vllm_llm.stop_ids(self._policy, settings),
                timeout_s=self._settings.generation_timeout_s,
                lora_request=self._lora,
            )
        finally:
            if self._merged is not None:
                self._merged.restore()

    def update_weights(self) -> None:
        """Make the next generate use the weights as trained: adapters reload, shared weights are there."""
        if has_adapters(self._policy.model) and self._merged is None:
            self.llm.llm_engine.add_lora(self._folder.request(self._policy))
            self._lora = self._folder.loaded()
        vllm_sleep.forget_prefixes(self.llm)
        self._updates += 1
        if self._updates == FIRST_TRAINED_UPDATE:
            self.check("after the first trained update")

    def release(self) -> None:
        """Unmap the KV cache while training; weights stay, they are the policy's."""
        if self._settings.sleep_level and not self._released:
            vllm_sleep.release_kv(self.llm)
            self._released = True

    def resume(self) -> None:
        """Map the KV cache again."""
        if self._released:
            vllm_sleep.resume_kv(self.llm)
            self._released = False

    def memory(self) -> dict[str, int]:
        """Bytes the engine holds beyond the policy: no weights, KV cache, adapter slots and buffers."""
        own = vllm_llm.storage_bytes(vllm_llm.vllm_model(self.llm)) - self.shared_bytes
        kv_bytes = 0 if self._released else vllm_llm.kv_cache_bytes(self.llm)
        return {"weights": 0, "kv_cache": kv_bytes, "engine": max(own, 0)}

    def close(self) -> None:
        """Shut vLLM down. The policy keeps the shared weights alive."""
        self._folder.close()
        with suppress(VramwiseError):  # what is unmapped cannot be unmapped again to free it
            self.resume()
        vllm_sleep.keep_allocators()
        vllm_sleep.shutdown(self.llm, ranks=self._settings.ranks)
