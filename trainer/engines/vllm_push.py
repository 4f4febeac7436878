"""vllm-push: vLLM holds a copy of its own; trained weights are pushed, one parameter at a time.

For models whose weights vLLM lays out its own way (MoE, MLA, quantised, the packed CPU build).
While training the engine sleeps: level 1 keeps the copy in host memory, level 2 drops it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from planner.plan import Plan
from planner.run.recipe import Method, Recipe
from trainer.engines import vllm_llm
from trainer.engines.protocol import Completion, SamplingSettings
from trainer.engines.vllm_settings import settings_for
from trainer.engines.vllm_shared import (
    FIRST_TRAINED_UPDATE,
    AdapterFolder,
    adapted_layers,
    base_name,
    has_adapters,
    merged_weight,
    needs_merging,
    shutdown,
)
from trainer.model import Policy


@torch.no_grad()
def merged_weights(policy: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (transformers name, tensor) with adapters folded in, one parameter at a time.

    The largest extra allocation is one merged weight.
    """
    layers = {f"{base_name(name)}.weight": layer for name, layer in adapted_layers(policy).items()}
    for full_name, parameter in policy.named_parameters():
        if "lora_" in full_name or ".original_module." in full_name:
            continue
        name = base_name(full_name).replace(".modules_to_save.default.", ".")
        layer = layers.get(name)
        yield name, parameter.detach() if layer is None else merged_weight(layer)


class VllmPushEngine:
    """Generates with a second copy of the weights that sleeps while training."""

    name = "vllm-push"

    def __init__(self, policy: Policy, *, recipe: Recipe, plan: Plan | None = None) -> None:
        """Start vLLM on the same base model, push the policy, check that both compute the same."""
        self._policy = policy
        self._settings = settings_for(policy, recipe=recipe, plan=plan)
        level = recipe.engine.sleep_level
        # adapters alone are pushed, so the copy must outlive the sleep; full weights come anew
        self._sleep_level = level if level is not None else 2 if policy.method is Method.FULL else 1
        self._adapters_alone = has_adapters(policy.model) and not needs_merging(policy.model)
        if not self._adapters_alone:
            self._settings = replace(self._settings, lora_rank=0)
        self._folder = AdapterFolder()
        self._lora: Any = None
        self._asleep = False
        self._updates = 0
        self._probe = vllm_llm.probe_tokens(policy, min(32, self._settings.max_model_len - 1))
        self.llm = vllm_llm.start_llm(self._settings)
        try:
            self.update_weights()
            self.check("after building")
        except BaseException:
            self.close()
            raise

    def check(self, when: str) -> float:
        """Compare log-probs of engine and policy on the probe prompt; stop when they differ."""
        return vllm_llm.check_agreement(
            self.llm, self._policy.model, self._probe, lora_request=self._lora, when=when
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], settings: SamplingSettings
    ) -> list[Completion]:
        """Return num_generations completions per prompt, grouped by prompt."""
        return vllm_llm.generate(
            self.llm,
            prompts,
            settings,
            eos_token_ids=vllm_llm.stop_ids(self._policy, settings),
            timeout_s=self._settings.generation_timeout_s,
            lora_request=self._lora,
        )

    def update_weights(self) -> None:
        """Push what was trained: the adapter alone where vLLM serves it, else every weight merged."""
        if self._adapters_alone:
            self.llm.llm_engine.add_lora(self._folder.request(self._policy.model))
            self._lora = self._folder.loaded()
        else:
            self._push_all()
        self.llm.reset_prefix_cache()
        self._updates += 1
        if self._updates == FIRST_TRAINED_UPDATE:
            self.check("after the first trained update")

    def release(self) -> None:
        """Put vLLM to sleep (CUDA): KV memory goes, weights move to the host (1) or are dropped (2)."""
        if torch.cuda.is_available() and not self._asleep:
            self.llm.llm_engine.step()
            self.llm.sleep(level=self._sleep_level)
            self._asleep = True

    def resume(self) -> None:
        """Wake vLLM; after level 2 the weights must come back from the policy."""
        if self._asleep:
            self.llm.wake_up()
            self._asleep = False
            if self._sleep_level == 2:
                self._push_all()

    def _push_all(self) -> None:
        weights = merged_weights(self._policy.model)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        vllm_llm.repack_tied_head(self.llm)

    def memory(self) -> dict[str, int]:
        """Bytes the engine holds on the device now."""
        if self._asleep:
            return {"weights": 0, "kv_cache": 0, "engine": 0}
        weights = vllm_llm.storage_bytes(vllm_llm.vllm_model(self.llm))
        return {"weights": weights, "kv_cache": vllm_llm.kv_cache_bytes(self.llm), "engine": 0}

    def close(self) -> None:
        """Shut vLLM down."""
        self._folder.close()
        shutdown(self.llm)
