"""vllm-server: a client of a running `vllm serve`, on this machine or another.

Of several ranks each asks for its own prompts; the first one hands over the weights.

Start it with what an update needs:

    VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL \\
        --enable-lora --max-loras 1 --max-lora-rank 16 --logprobs-mode processed_logprobs

Adapters are reloaded in place over the public API. Full weights go through the development route
(collective_rpc), from a folder the server can read. With recipe.engine.transfer nccl or ipc no folder is shared:
all weights, adapters folded in, go from GPU to GPU (trainer.engines.vllm_transfer).
"""

import json
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from planner.errors import UsageError, VramwiseError
from planner.plan import Plan
from planner.run.recipe import Method, Recipe
from trainer.engines import vllm_llm
from trainer.engines.protocol import Completion, SamplingSettings
from trainer.engines.vllm_adapters import merged_weights, needs_merging
from trainer.engines.vllm_transfer import WeightSender
from trainer.model import Policy
from trainer.parallel.saving import gathered
from trainer.parallel.together import together

ADAPTER_NAME = "vramwise-policy"
CONNECT_TIMEOUT_S = 10.0
DESCRIBE_TIMEOUT_S = 120.0
"""/server_info looks through the server's whole environment when it is first asked: 10 s and more on a busy host."""


class VllmServerEngine:
    """Generates on a vLLM server; recipe.engine.url says where."""

    name = "vllm-server"

    def __init__(self, policy: Policy, *, recipe: Recipe, plan: Plan | None = None) -> None:
        """Connect, check that the server runs the same base model, and publish the policy."""
        self._policy = policy
        self._url = recipe.engine.url.rstrip("/")
        self._timeout_s = recipe.engine.timeout_s
        served = self._get("/v1/models")["data"]
        self._base = served[0]["root"] or served[0]["id"]
        length = served[0].get("max_model_len")
        wanted = recipe.context or (recipe.prompt_length or 0) + (recipe.completion_length or 0)
        if length and wanted > length:
            raise UsageError(
                f"recipe.context: {wanted} tokens, but the server at {self._url} takes {length}",
                hint="start it with a larger --max-model-len",
            )
        self._model = served[0]["id"]
        kind = recipe.engine.transfer
        self._sender: WeightSender | None = None
        if kind != "folder":
            self._sender = WeightSender(
                policy, kind=kind, url=self._url, get=self._describe, post=self._post
            )
        alone = policy.method is not Method.FULL and not needs_merging(policy.model)
        self._adapter = alone and self._sender is None
        self._folder = Path(tempfile.mkdtemp(prefix="vramwise-server-"))
        self.update_weights()

    def generate(
        self, prompts: Sequence[Sequence[int]], settings: SamplingSettings
    ) -> list[Completion]:
        """Return num_generations completions per prompt, grouped by prompt."""
        answer = self._post(
            "/v1/completions",
            {
                "model": self._model,
                "prompt": [list(prompt) for prompt in prompts],
                "n": settings.num_generations,
                "max_tokens": settings.max_new_tokens,
                "temperature": settings.temperature,
                "top_p": settings.top_p,
                "top_k": settings.top_k or -1,
                "min_p": settings.min_p,
                "repetition_penalty": settings.repetition_penalty,
                "presence_penalty": settings.presence_penalty,
                "frequency_penalty": settings.frequency_penalty,
                **({"structured_outputs": settings.guided} if settings.guided else {}),
                "seed": settings.seed,
                "stop_token_ids": list(vllm_llm.stop_ids(self._policy, settings)),
                "logprobs": 0,
                "return_token_ids": True,
            },
        )
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if len(choices) != len(prompts) * settings.num_generations:
            raise VramwiseError(
                f"the server answered {len(choices)} completions, not {len(prompts)} x {settings.num_generations}"
            )
        return [
            Completion(
                prompt_index=place // settings.num_generations,
                token_ids=tuple(choice["token_ids"]),
                logprobs=tuple(choice["logprobs"]["token_logprobs"]),
                finished=choice["finish_reason"] == "stop",
            )
            for place, choice in enumerate(choices)
        ]

    def update_weights(self) -> None:
        """Publish the trained weights: the adapter in place, or all weights through a folder or from GPU to GPU.

        Of several ranks the first does it, with what it gathers of all; the others wait.
        """
        ranks = self._policy.ranks
        if self._sender is not None:
            self._sender.send()
            together(ranks, lambda: self._forget_prefixes() if ranks.first else None)
            return
        tensors = self._gathered() if ranks.several else None
        together(ranks, lambda: self._publish(tensors) if ranks.first else None)
        if self._adapter:
            self._model = ADAPTER_NAME

    def _gathered(self) -> dict[str, torch.Tensor]:
        """Return on the first rank what is to be handed over, whole and on the host."""
        if self._adapter or self._policy.method is Method.FULL:
            return gathered(self._policy)
        first = self._policy.ranks.first
        every = merged_weights(self._policy)
        return {name: tensor.cpu() if first else torch.empty(0) for name, tensor in every}

    def _publish(self, tensors: dict[str, torch.Tensor] | None) -> None:
        """Hand `tensors`, or the policy's own, to the server."""
        if self._adapter:
            self._policy.model.save_pretrained(
                self._folder, safe_serialization=True, state_dict=tensors
            )
            self._post(
                "/v1/load_lora_adapter",
                {
                    "lora_name": ADAPTER_NAME,
                    "lora_path": str(self._folder),
                    "load_inplace": True,
                },
            )
        else:
            self._push_all(tensors)
        self._forget_prefixes()

    def _forget_prefixes(self) -> None:
        self._post("/reset_prefix_cache", None)

    def _push_all(self, tensors: dict[str, torch.Tensor] | None) -> None:
        from safetensors.torch import save_file

        own = merged_weights(self._policy) if tensors is None else tensors.items()
        weights = {name: tensor.contiguous() for name, tensor in own}
        part = self._folder / "model.safetensors.part"
        save_file(weights, part)
        part.replace(self._folder / "model.safetensors")
        self._post(
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}},
        )

    def release(self) -> None:
        """Do nothing: the server has a GPU of its own."""

    def resume(self) -> None:
        """Do nothing."""

    def memory(self) -> dict[str, int]:
        """Nothing of it is on the trainer's GPU."""
        return {"weights": 0, "kv_cache": 0, "engine": 0}

    def close(self) -> None:
        """Remove the folder, or leave the transfer; the server keeps running."""
        import shutil

        if self._sender is not None:
            with suppress(VramwiseError):
                self._sender.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _get(self, path: str) -> Any:
        return self._send(urllib.request.Request(self._url + path), timeout_s=CONNECT_TIMEOUT_S)

    def _describe(self, path: str) -> Any:
        return self._send(urllib.request.Request(self._url + path), timeout_s=DESCRIBE_TIMEOUT_S)

    def _post(self, path: str, body: dict[str, Any] | None) -> Any:
        data = b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._url + path, data=data, headers={"Content-Type": "application/json"}, method="POST"
        )
        return self._send(request, timeout_s=self._timeout_s)

    def _send(self, request: urllib.request.Request, *, timeout_s: float) -> Any:
        started = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            detail = error.read(400).decode(errors="replace").replace("\n", " ")
            raise VramwiseError(
                f"the vLLM server refused {request.selector}: {error.code} {detail[:200]}",
                hint="start it as trainer/engines/vllm_server.py says: development mode, runtime adapters",
            ) from None
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            waited = time.monotonic() - started
            raise VramwiseError(
                f"no answer from the vLLM server at {self._url} after {waited:.0f} s ({error})",
                hint="is `vllm serve` running there? set recipe.engine.url",
            ) from None
        try:
            return json.loads(text)
        except ValueError:
            return text.decode(errors="replace")
