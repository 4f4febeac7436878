"""vllm-push: vLLM holds a copy of its own; trained weights are pushed, one parameter at a time.

Into vLLM's memory where it keeps a weight as it is, and else through its own loader (MoE, MLA, tensor-parallel
groups).
While training the engine sleeps: level 1 keeps the copy in host memory, level 2 drops it. What was
dropped comes back with the next update_weights, once: a rollout that nobody updated pushes first.
On several ranks each has its engine, or a group has one; a push makes one tensor after the other whole.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from planner.errors import VramwiseError
from planner.plan import Plan
from planner.run.recipe import EngineKind, Recipe
from trainer.engines import vllm_cpu_build, vllm_llm, vllm_sleep
from trainer.engines.protocol import Completion, SamplingSettings
from trainer.engines.vllm_adapters import (
    AdapterFolder,
    has_adapters,
    merged_weights,
    needs_merging,
)
from trainer.engines.vllm_group import Group
from trainer.engines.vllm_in_place import InPlace, in_place
from trainer.engines.vllm_settings import settings_for
from trainer.engines.vllm_shared import FIRST_TRAINED_UPDATE
from trainer.model import Policy


class VllmPushEngine:
    """Generates with a second copy of the weights that sleeps while training."""

    name = "vllm-push"

    def __init__(
        self, policy: Policy, *, recipe: Recipe, plan: Plan | None = None, guided: bool = False
    ) -> None:
        """Start vLLM on the same base model, push the policy, check that both compute the same."""
        self._policy = policy
        self._settings = settings_for(
            policy, recipe=recipe, plan=plan, kind=EngineKind.VLLM_PUSH, guided=guided
        )
        self._group = Group(self._settings.tensor_parallel, self._settings.generation_timeout_s)
        self._adapters_alone = has_adapters(policy.model) and not needs_merging(policy.model)
        if not self._adapters_alone:
            self._settings = replace(self._settings, lora_rank=0)
        self._lora: Any = None
        self._asleep = False
        self._dropped = False
        self._updates = 0
        self._probe = vllm_llm.probe_tokens(policy, min(32, self._settings.max_model_len - 1))
        # one whose packed weights could not be written
        self._plain = not self._adapters_alone and self._settings.tensor_parallel == 1
        self._in_place: InPlace | None = None
        with vllm_cpu_build.unpacked_cpu_linears(self._plain):
            self.llm = vllm_llm.start_llm(self._settings)
        self._folder = AdapterFolder(policy.ranks)
        try:
            self.update_weights()
            if self._plain:
                self._in_place = in_place(policy, vllm_llm.vllm_model(self.llm))
            self.check("after building")
        except BaseException:
            self.close()
            raise

    def check(self, when: str) -> float:
        """Compare log-probs of engine and policy on the probe prompt; stop when they differ."""
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
        """Return num_generations completions per prompt, grouped by prompt.

        All ranks of a group call it, each with its own prompts.
        """
        if self._dropped:
            self.update_weights()
        return self._group.generate(prompts, settings, self._generate)

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: SamplingSettings,
        over: Callable[[], bool],
    ) -> list[Completion]:
        return vllm_llm.generate(
            self.llm,
            prompts,
            settings,
            eos_token_ids=vllm_llm.stop_ids(self._policy, settings),
            timeout_s=self._settings.generation_timeout_s,
            over=over,
            lora_request=self._lora,
        )

    def update_weights(self) -> None:
        """Push what was trained: the adapter alone where vLLM serves it, else every weight merged.

        A base that the sleep dropped comes back first; that also clears vLLM's adapters.
        """
        if self._in_place is not None:
            self._in_place.write(self._policy)
        elif self._dropped or not self._adapters_alone:
            weights = merged_weights(self._policy, fold=not self._adapters_alone)
            with vllm_cpu_build.unpacked_cpu_linears(self._plain):
                self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            if not self._plain:
                vllm_cpu_build.repack_tied_head(self.llm)
        self._dropped = False
        if self._adapters_alone:
            self.llm.llm_engine.add_lora(self._folder.request(self._policy))
            self._lora = self._folder.loaded()
        vllm_sleep.forget_prefixes(self.llm)
        self._updates += 1
        if self._updates == FIRST_TRAINED_UPDATE:
            self.check("after the first trained update")

    def release(self) -> None:
        """Put vLLM to sleep: KV memory goes, weights move to the host (level 1) or are dropped (2)."""
        if self._settings.sleep_level and not self._asleep:
            vllm_sleep.sleep(self.llm, level=self._settings.sleep_level)
            self._asleep = True

    def resume(self) -> None:
        """Wake vLLM; what was dropped comes back with the next update_weights."""
        if self._asleep:
            vllm_sleep.wake(self.llm)
            self._asleep = False
            self._dropped = self._settings.sleep_level == 2

    def memory(self) -> dict[str, int]:
        """Bytes the engine holds on the device now."""
        if self._asleep:
            return {"weights": 0, "kv_cache": 0, "engine": 0}
        weights = vllm_llm.storage_bytes(vllm_llm.vllm_model(self.llm))
        return {"weights": weights, "kv_cache": vllm_llm.kv_cache_bytes(self.llm), "engine": 0}

    def close(self) -> None:
        """Shut vLLM down."""
        self._folder.close()
        with suppress(VramwiseError):  # what is unmapped cannot be unmapped again to free it
            self.resume()
        vllm_sleep.shutdown(self.llm, ranks=self._settings.ranks)
