"""What every in-process vLLM engine does alike: start, generate, score.

vLLM runs inside the trainer's process (no multiprocessing), so its modules and tensors are ordinary
Python objects here. Run with vllm 0.32 (CPU build, model runner V1). On CUDA the model runner is V2
(use_v2_model_runner in config/vllm.py, 0.31 to 0.33: unless there is no Triton, or the run asks for
something V2 lacks, which these engines do not). What is relied on is read in 0.32 and 0.33 (under vllm/):

* the model: LLM.apply_model -> WorkerBase.apply_model (v1/worker/worker_base.py) -> get_model of
  v1/worker/gpu/model_runner.py returns the module itself. V1 takes a graph wrapper off first.
* adapters: add_lora is the same mixin for both runners (v1/worker/lora_model_runner_mixin.py); with
  load_inplace lora/worker_manager.py reads the folder again, drops the old adapter and fills its slot.
  Slots lie in the weights pool in 0.32 (sleep level 2 drops them), in the runtime pool in 0.33 (kept).
* reload_weights: both call model_executor/model_loader/reload/inplace.py since 0.32, which loads layer
  by layer and copies into the old storage (captured graphs stay valid) and then drops all adapters.
* sleep, wake_up, release_kv_cache_memory: v1/engine/core.py, v1/executor/abstract.py and
  device_allocator/cumem.py, one path for both runners; see trainer.engines.vllm_sleep.
* log-probabilities: v1/worker/gpu/sample/sampler.py takes the processed logits for processed_logprobs,
  logprobs=0 gives the sampled token's alone; prompt_logprobs come from the raw logits (temperature 1)
  and their request never reads the prefix cache (sampling_params.py).
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from planner.errors import UsageError, VramwiseError
from planner.terms.engine import SLOT_RANKS
from planner.units import format_bytes
from trainer.engines.protocol import Completion, SamplingSettings
from trainer.engines.vllm_classes import own_classes
from trainer.engines.vllm_cpu_build import named_cpu_memory
from trainer.engines.vllm_group import TooLong
from trainer.engines.vllm_platform import importing_vllm, runs_on_cpu
from trainer.engines.vllm_settings import VllmSettings
from trainer.engines.vllm_sleep import drain
from trainer.model import Policy, eos_ids

if TYPE_CHECKING:
    from trainer.parallel.sharding import Sharded

ADAPTER_ID = 1


def start_llm(settings: VllmSettings) -> Any:
    """Start vLLM in this process and return its `LLM`.

    Raises UsageError when the sizes cannot work and VramwiseError when it runs out of memory;
    both say what to change.
    """
    on_cpu = runs_on_cpu()
    if on_cpu:
        # The CPU build reads this first and would ignore the size asked for below.
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    with importing_vllm():
        from vllm import LLM

    tokens = settings.max_num_batched_tokens or max(2048, settings.max_model_len)
    arguments: dict[str, Any] = {
        "model": settings.model,
        "revision": settings.revision,
        "dtype": settings.dtype,
        "skip_tokenizer_init": not settings.guided,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": max(tokens, settings.max_num_seqs),
        "enable_chunked_prefill": True,
        "enable_prefix_caching": settings.prefix_caching,
        "kv_cache_memory_bytes": settings.kv_bytes,
        "enforce_eager": on_cpu or not settings.cuda_graphs,
        "enable_sleep_mode": settings.sleep_level > 0,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
        "seed": settings.seed,
    }
    if settings.ranks > 1:
        arguments["distributed_executor_backend"] = "external_launcher"
        arguments["tensor_parallel_size"] = settings.tensor_parallel
    if settings.kv_dtype != "auto":
        arguments["kv_cache_dtype"] = settings.kv_dtype
    if settings.block_size is not None:
        arguments["block_size"] = settings.block_size
    if settings.memory_share is not None:
        arguments["gpu_memory_utilization"] = settings.memory_share
    if settings.lora_rank:
        arguments |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": _allowed_rank(settings.lora_rank),
        }
    try:
        shared = named_cpu_memory(settings.name if settings.tensor_parallel > 1 else "")
        with _uncompiled(), shared, own_classes() as classes:
            llm = LLM(**arguments | settings.extra)
            classes.give_back(vllm_model(llm))
            return llm
    except torch.OutOfMemoryError as error:
        raise VramwiseError(
            f"vLLM ran out of memory while starting: {_first_line(error)}",
            hint=f"lower engine.kv_bytes (now {format_bytes(settings.kv_bytes)}) or engine.max_num_seqs "
            f"(now {settings.max_num_seqs}), or use engine kind transformers",
        ) from error
    except (ValueError, RuntimeError, NotImplementedError, AssertionError) as error:
        raise UsageError(
            f"engine: vLLM cannot start: {_first_line(error)}",
            hint=f"kv_bytes {format_bytes(settings.kv_bytes)}, max_model_len {settings.max_model_len}, "
            f"max_num_seqs {settings.max_num_seqs}; or use engine kind transformers",
        ) from error


def _allowed_rank(rank: int) -> int:
    """vLLM takes only these adapter ranks: the next one up."""
    for allowed in SLOT_RANKS:
        if rank <= allowed:
            return allowed
    raise UsageError(f"lora.rank: vLLM serves adapters up to rank 512, not {rank}")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


def probe_tokens(policy: Policy, length: int) -> tuple[int, ...]:
    """Return the prompt on which engine and policy are compared: `length` tokens all over the vocabulary."""
    vocabulary = policy.base.config.get_text_config().vocab_size
    return tuple((17 + 7919 * index) % vocabulary for index in range(length))


def stop_ids(policy: Policy, sampling: SamplingSettings) -> tuple[int, ...]:
    """Return the tokens that end a completion."""
    return tuple({*eos_ids(policy), *sampling.stop_token_ids})


def vllm_model(llm: Any) -> torch.nn.Module:
    """Return the module vLLM runs: in process, apply_model hands out the object itself."""
    return llm.apply_model(lambda model: model)[0]


def generate(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingSettings,
    *,
    eos_token_ids: Sequence[int],
    timeout_s: float,
    over: Callable[[], bool] | None = None,
    lora_request: Any = None,
) -> list[Completion]:
    """Sample num_generations completions per prompt, grouped by prompt, with the sampler's log-probs.

    A rollout past `timeout_s`, as `over` says it for several ranks, or an engine that dies raises
    VramwiseError; its requests are aborted.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    engine = llm.llm_engine
    grammar = sampling.guided
    done: dict[int, Any] = {}
    waiting: dict[str, int] = {}
    deadline = time.monotonic() + timeout_s
    try:
        for index, prompt in enumerate(prompts):
            parameters = SamplingParams(
                n=sampling.num_generations,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_new_tokens,
                stop_token_ids=list(eos_token_ids),
                logprobs=0,
                min_p=sampling.min_p,
                repetition_penalty=sampling.repetition_penalty,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                structured_outputs=StructuredOutputsParams(**grammar) if grammar else None,
                seed=sampling.prompt_seed(index),
                detokenize=False,
                # with n > 1, one output per prompt that holds all its completions
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            name = f"rollout-{time.monotonic_ns()}-{index}"
            with _named_grammar(grammar):
                request = engine.add_request(
                    name,
                    TokensPrompt(prompt_token_ids=list(prompt)),
                    parameters,
                    lora_request=lora_request,
                )
            waiting[request if isinstance(request, str) else name] = index
            waiting[name] = index
        while engine.has_unfinished_requests():
            with _uncompiled():
                outputs = engine.step()
            for output in outputs:
                if output.finished:
                    done[waiting[output.request_id]] = output
            if over() if over else time.monotonic() > deadline:
                raise TooLong(
                    f"generation took longer than {timeout_s:.0f} s; {len(done)} of {len(prompts)} prompts were done",
                    hint="lower completion_length or engine.max_num_seqs, or raise engine.timeout_s",
                )
        drain(llm)  # weights may change from here on: nothing of them may still be computing
    except VramwiseError:
        engine.abort_request(list(waiting))
        raise
    except (RuntimeError, ValueError) as error:
        raise VramwiseError(
            f"vLLM stopped in the middle of a rollout: {_first_line(error)}",
            hint="the trainer's state is saved; lower engine.kv_bytes or engine.max_num_seqs and resume",
        ) from error
    return [
        _completion(index, candidate)
        for index in range(len(prompts))
        for candidate in sorted(done[index].outputs, key=lambda item: item.index)
    ]


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run vLLM's CPU build without torch.compile, here alone: the caller's own compiled models stay.

    Its sampler is compiled at the first step: half a minute of C++ for nothing on a CPU.
    """
    if not runs_on_cpu():
        yield
        return
    with torch._dynamo.config.patch(disable=True):
        yield


@contextmanager
def _named_grammar(grammar: dict[str, Any]) -> Iterator[None]:
    """Name the grammar where vLLM doesn't take it: its own errors are of many kinds."""
    try:
        yield
    except Exception as error:
        if not grammar:
            raise
        kind, text = next(iter(grammar.items()))
        raise UsageError(
            f"train.sampling.guided_{kind}: {str(text)[:80]!r} is not taken by vLLM: {_first_line(error)}",
            hint="a simpler expression or schema",
        ) from None


def _completion(index: int, candidate: Any) -> Completion:
    logprobs = tuple(
        step[token].logprob
        for token, step in zip(candidate.token_ids, candidate.logprobs, strict=True)
    )
    return Completion(
        prompt_index=index,
        token_ids=tuple(candidate.token_ids),
        logprobs=logprobs,
        finished=candidate.finish_reason == "stop",
    )


def prompt_logprobs(
    llm: Any, token_ids: Sequence[int], *, lora_request: Any = None
) -> torch.Tensor:
    """Return vLLM's log-probability of every token after the first, fp32 [len - 1], temperature 1."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    with _uncompiled():
        (output,) = llm.generate(
            [TokensPrompt(prompt_token_ids=list(token_ids))],
            SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False),
            use_tqdm=False,
            lora_request=lora_request,
        )
    drain(llm)
    pairs = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return torch.tensor([step[token].logprob for token, step in pairs], dtype=torch.float32)


OTHERS = {
    "vllm-shared": "vllm-push (a second copy, asleep while training) or transformers",
    "vllm-push": "transformers",
}
"""What to use instead of an engine; never the engine itself."""

# Largest mean |difference| of one token's log-probability between two correct implementations:
# rounding of the hidden state to the compute dtype decides it (24, 11 and 8 significant bits).
AGREEMENT = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# an fp8 cache has four significant bits of keys and values, but each output is a mean over many of them
FP8_CACHE_AGREEMENT = 1e-1


@torch.no_grad()
def check_agreement(
    llm: Any,
    policy: torch.nn.Module,
    token_ids: Sequence[int],
    *,
    engine: str,
    lora_request: Any = None,
    when: str,
    sharded: "Sharded | None" = None,
) -> float:
    """Return the mean |log-prob difference| of `engine` and policy on one prompt, or stop.

    Raises VramwiseError when it is above AGREEMENT for the policy's dtype: then the engine does not
    run the policy's weights, and every importance ratio would be wrong. All ranks of a `sharded` policy
    call it, and stop together.
    """
    device = next(policy.parameters()).device
    ids = torch.tensor([list(token_ids)], device=device)
    was_training = policy.training
    policy.eval()

    def score() -> torch.Tensor:
        logits: torch.Tensor = policy(input_ids=ids).logits[0, :-1].float()
        return logits

    logits = score() if sharded is None else sharded.run(score)
    policy.train(was_training)
    ours = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].cpu()
    theirs = prompt_logprobs(llm, token_ids, lora_request=lora_request)
    difference = (ours - theirs).abs().mean().item()
    limit = AGREEMENT[_compute_dtype(policy)]
    if llm.llm_engine.vllm_config.cache_config.cache_dtype.startswith("fp8"):
        limit = max(limit, FP8_CACHE_AGREEMENT)
    if sharded is not None:
        difference = sharded.ranks.max(difference if math.isfinite(difference) else math.inf)
    if not difference <= limit:
        raise VramwiseError(
            f"{engine}: vLLM and the policy disagree {when}: mean log-prob difference {difference:.3g} "
            f"(allowed {limit:g})",
            hint="this model's weights reach vLLM in a way vramwise does not know; use engine kind "
            f"{OTHERS[engine]}",
        )
    return difference


def _compute_dtype(policy: torch.nn.Module) -> torch.dtype:
    dtypes = [p.dtype for p in policy.parameters() if p.dtype in AGREEMENT]
    return max(set(dtypes), key=dtypes.count)


def kv_cache_bytes(llm: Any) -> int:
    """Return the bytes of the KV cache as vLLM allocated it."""
    groups = llm.llm_engine.vllm_config.cache_config
    explicit = groups.kv_cache_memory_bytes
    return int(explicit) if explicit else 0


def reported_kv_tokens(llm: Any) -> int:
    """Return the token count vLLM prints as "KV cache size"."""
    return int(llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens)


def storage_bytes(module: torch.nn.Module) -> int:
    """Return the bytes of all distinct storages of a module's parameters and buffers."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*module.parameters(), *module.buffers())
        if tensor.device.type != "meta"
    }
    return sum(storages.values())
