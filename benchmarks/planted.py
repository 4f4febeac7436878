"""Errors that earlier tests let pass, and mutants that no test should notice; mutants.py reads both."""

PLANTED: tuple[tuple[str, str, str, str], ...] = (
    (
        "DDP has no buckets",
        "planner/run/placement.py",
        "buckets=replicated and not by_fsdp2",
        "buckets=False",
    ),
    (
        "Adafactor is free",
        "planner/terms/optimizer.py",
        "size = _factored(model, r)",
        "size = 0",
    ),
    (
        "no scratch in the embedding's backward",
        "planner/terms/backward.py",
        "scratch = sum(backward_blocks(r.tokens, model.vocab, model.hidden))",
        "scratch = 0",
    ),
    (
        "sampler's bytes x1.5",
        "planner/terms/vllm_profile.py",
        "sampler = rows * model.vocab * logit +",
        "sampler = rows * model.vocab * logit * 3 // 2 +",
    ),
    (
        "CUDA graphs x3",
        "planner/terms/engine.py",
        "pieces=pieces)",
        "pieces=3 * pieces)",
    ),
    (
        "memory outside torch x10",
        "planner/terms/engine.py",
        "return Measured(*(sum(sizes) for sizes in zip(*parts, strict=True)))",
        "return Measured(*(10 * sum(sizes) for sizes in zip(*parts, strict=True)))",
    ),
    (
        "embedded adapters are divided among ranks",
        "planner/terms/vllm_weights.py",
        "width += copies * (rows + model.hidden)",
        "width += copies * (rows + model.hidden) // r.tensor_parallel",
    ),
    (
        "another default of max_num_seqs",
        "planner/run/engine_law.py",
        "return tokens, min(found.sequences, tokens)",
        "return tokens, min(256, tokens)",
    ),
    (
        "the doctor's KV bytes a token x7",
        "planner/doctor/serving.py",
        "per_token = log.kv_bytes // tokens",
        "per_token = 7 * log.kv_bytes // tokens",
    ),
    (
        "the doctor takes a stored checkpoint for 16-bit weights",
        "planner/doctor/state.py",
        "found = _held(context, ranks=1, task=Task.SERVE, method=Method.FULL, **wide)",
        "found = _held(context, ranks=1, method=Method.FULL, **wide)",
    ),
    (
        "cuBLAS workspace x1.5",
        "planner/terms/overhead.py",
        "BLAS_WORKSPACE_BYTES = 2 * 4096 * KiB + 8 * 16 * KiB",
        "BLAS_WORKSPACE_BYTES = 3 * 4096 * KiB + 12 * 16 * KiB",
    ),
)
"""(name, file, text, replacement)."""

EXPLAINED: dict[str, str] = {
    "planner/doctor/state.py: WHOLE = Machine(vram_bytes=80 * GiB): 80 x1.5": (
        "any card will do: what a run holds before its first batch does not depend on it"
    ),
    "planner/doctor/state.py: found = _held(context, ranks=1, task=Task.SERVE, method=Method.FULL, "
    "**wide): 1 x0": "0 or 1 ranks without sharding are one whole copy",
    "planner/doctor/state.py: _held(context, ranks=1, method=Method.QLORA, framework=name, "
    "double_quant=False): 1 x0": "the same",
    'planner/doctor/state.py: context, ranks=1, task=Task.SERVE, method=Method.FULL, framework="vllm", '
    "engine=engine: 1 x0": "the same",
    "planner/layer/costs.py: _CACHE_LIMIT = 20_000: 20000 x1.5": "decides speed, no byte",
    "planner/layer/costs.py: _CACHE_LIMIT = 20_000: 20000 x0": "decides speed, no byte",
    "planner/replay/player.py: @lru_cache(maxsize=4096): 4096 x1.5": "decides speed, no byte",
    "planner/replay/player.py: @lru_cache(maxsize=4096): 4096 x0": "decides speed, no byte",
    "planner/replay/tensors.py: times = max(1, module.count // model.layers[module.layer].count): 1 x0": (
        "an adapted module is in each of its layers at least once: the quotient is 1 or more"
    ),
    "planner/replay/steps.py: for number in range(min(2, self.r.grad_accum)):: 2 x1.5": (
        "a third micro-batch meets what the second one met and left: it moves no peak"
    ),
    "planner/layer/costs.py: value = (what, replace(layer, count=1), hidden, settings): 1 x0": (
        "equal layers have one key whatever count stands in it"
    ),
    "planner/doctor/state.py: found = _held(context, ranks=1, **wide): 1 x0": "the same",
    "planner/replay/norm.py: @lru_cache(maxsize=1024): 1024 x0": "decides speed, no byte",
    "planner/replay/norm.py: @lru_cache(maxsize=1024): 1024 x1.5": "decides speed, no byte",
    "planner/replay/steps.py: STEPS = 2: 2 x1.5": "a third step meets what the second one met",
    "planner/reserved.py: _KEPT = 4096: 4096 x0": "decides speed, no byte",
    "planner/reserved.py: _KEPT = 4096: 4096 x1.5": "decides speed, no byte",
}
"""Mutant's key -> why no test can or should notice it."""
