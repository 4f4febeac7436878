"""A row of decode.csv -> the engine that it describes, and tokens a second of it."""

import re
from math import log
from typing import NamedTuple

from planner.accuracy.names import machine_named, model_named
from planner.accuracy.prediction import NotCovered
from planner.accuracy.rows import Row
from planner.errors import VramwiseError
from planner.models.spec import ModelSpec
from planner.plan import Plan, plan
from planner.quant.table import canonical
from planner.run.framework import pick
from planner.run.recipe import EngineKind, EngineSection, Recipe, Task
from planner.speed.cards import GIGA, CardSpeed
from planner.speed.engine import SCHEDULES_AHEAD

SCHEMES = (
    (r"nvfp4|^fp4", "nvfp4"),
    (r"mxfp4", "mxfp4"),
    (r"fp8", "fp8"),
    (r"gptq-int8|int8", "gptq-8bit"),
    (r"nf4|bitsandbytes", "nf4"),
    (r"awq", "awq-4bit"),
    (r"gptq|int4|w4a16|autoround", "gptq-4bit"),
)
"""What a row's column calls a scheme -> the planner's word."""
PLANNED = ("vllm", "transformers")
"""Engines whose memory and time are planned; others are scored apart."""
OFFLINE = re.compile(r"offline|benchmark_(latency|throughput)|llm\.generate")
"""Notes of rows that LLM() in a script was timed for."""
SPREAD = 24
"""Quantiles of the lengths that a data set's requests have: exponential, of which the mean is known."""
PCIE_LANE = {"3": 0.985 * GIGA, "4": 1.969 * GIGA, "5": 3.938 * GIGA}
"""Bytes/s of one direction of a lane, by generation."""
RELEASED = {
    "2023-09": (0, 2), "2024-02": (0, 3), "2024-04": (0, 4), "2024-07": (0, 5), "2024-09": (0, 6),
    "2025-01": (0, 7), "2025-03": (0, 8), "2025-05": (0, 9), "2025-07": (0, 10), "2025-10": (0, 11),
    "2025-12": (0, 13), "2026-01": (0, 14),
}  # fmt: skip
"""Months in which vLLM's releases came out (their dates), for rows that say when they were measured and no more."""
SHORTEST = 16
"""Output tokens below which a row measures prompts and their transport."""
OTHER_SEQS = 2048
"""TensorRT-LLM's limit (max_batch_size of trtllm-serve); SGLang has none of its own."""


class DecodeRun(NamedTuple):
    """A generation row, planned."""

    row: Row
    plan: Plan
    concurrency: int
    """Of one engine."""
    copies: int
    """Engines side by side."""
    running: int
    """Sequences that run at once: the engine's limit, and what its cache holds."""
    steps_alone: bool
    """The figure is of decoding steps, without prompts."""
    requests: int
    """Sent to one engine."""
    prompt: float
    lengths: tuple[float, ...]
    """Of the outputs, as quantiles."""
    output: float
    """Their mean."""
    seconds: float
    """Between two tokens of one sequence, as the row says."""
    release: tuple[int, ...]
    """vLLM's, as far as the row states it; one that was told to schedule ahead counts as one that does."""


def scheme_of(text: str) -> str:
    """Return the planner's word for a row's quantisation, empty for 16 bits."""
    folded = text.lower()
    if folded.startswith(("bf16", "fp16", "fp32")):
        return ""
    return next((word for pattern, word in SCHEMES if re.search(pattern, folded)), "?")


def decode_run(row: Row) -> DecodeRun:
    """Return the plan of a generation row; raises NotCovered with the reason."""
    if row["speculative"] not in ("", "0"):
        raise NotCovered("speculative decoding")
    if row["engine"].startswith("gpt-fast") or "gguf" in row["quant"]:
        raise NotCovered(f"the engine {row['engine'][:30]!r} is not planned")
    scheme = scheme_of(row["quant"])
    if scheme == "?":
        raise NotCovered(f"the scheme {row['quant'][:30]!r} is not known")
    prompt, output = row.number("prompt_len"), row.number("output_len")
    if prompt is None or not output:
        raise NotCovered("samples without lengths: the row states no prompt or output length")
    requests = row.integer("num_prompts") or 0
    concurrency = row.integer("concurrency") or 0
    if row["concurrency"].startswith("max"):
        concurrency = requests
    if not concurrency:
        raise NotCovered("the row states a rate of requests, not how many run at once")
    tensor, stages = row.integer("tp") or 1, row.integer("pp") or 1
    gpus = row.integer("n_gpus") or tensor * stages
    stated = re.search(r"\bpp=(\d+)", row["notes"])
    stages = int(stated[1]) if stated else stages
    copies = (
        max(1, gpus // (tensor * stages))
        if "replica" in row["notes"] or "dp=" in row["notes"]
        else 1
    )
    model = model_named(row["model"])
    transformers = row["engine"].startswith("transformers")
    if transformers and gpus > 1:
        raise NotCovered("layers split over GPUs by device_map")
    published = canonical(model.checkpoint_quantization)
    # "none" would be a 16-bit copy of a checkpoint that is published in that scheme
    asked = None if scheme and published.startswith(scheme) else scheme or "none"
    length = int(prompt + output) + 1
    copies = min(copies, concurrency)
    each = -(-concurrency // copies)
    if output < SHORTEST:
        raise NotCovered(f"{output:.0f} tokens out: how fast a server reads prompts, no generation")
    section = EngineSection(
        kind=EngineKind.TRANSFORMERS if transformers else EngineKind.VLLM_SERVER,
        tensor_parallel=tensor,
        pipeline_parallel=stages,
        kv_dtype="fp8" if row["kv_dtype"].startswith("fp8") else None,
        cuda_graphs=not row["graphs"].startswith("eager"),
        max_num_batched_tokens=_flag(row, "max-num-batched-tokens"),
        max_num_seqs=_flag(row, "max-num-seqs"),
        offline=not transformers and OFFLINE.search(row["notes"]) is not None,
    )
    recipe = Recipe(
        task=Task.SERVE,
        framework="hf-trainer" if transformers else _law(row),
        quantization=asked,
        dtype="fp16" if row["gpu"] == "t4" else "bf16",
        context=max(16, length),
        micro_batch_size=min(each, 4096),
        engine=section,
    )
    gpu = re.sub(r"\(.*\)", "", row["gpu"]).strip()
    gpu = {
        "a100": "a100-80gb",
        "h100": "h100-sxm",
        "a800": "a100-80gb",
        "rtx-pro-6000": "rtx-pro-6000-server",
        "dgx-spark": "gb10-dgx-spark",
    }.get(gpu, gpu)
    machine = machine_named(gpu, tensor * stages)
    made = plan(_long_enough(model, length), recipe, machine)
    value, quantity = row.number("value"), row["quantity"]
    if not value or value <= 0:
        raise NotCovered("the row's figure is no positive number")
    between = row.number("tpot_ms") if concurrency == 1 and "wall" in row["notes"] else None
    if between:  # the rate is of the whole request, its prompt included
        quantity, value = "tpot_ms", between
    if quantity == "tpot_ms":
        rate = concurrency / value * 1000
    elif quantity == "latency_s":
        rate = concurrency * output / value
    elif quantity == "total_tok_s":
        rate = value * output / (prompt + output)
    else:
        rate = value
    return DecodeRun(
        row=row,
        plan=made,
        concurrency=each,
        copies=copies,
        # they began at different times: of what a sequence writes half is there on average
        running=_running(row, made, each, prompt + output / 2),
        steps_alone=quantity in ("tpot_ms", "decode_tok_s", "latency_s"),
        requests=max(requests // copies, each),
        prompt=prompt,
        lengths=_lengths(row, output, each),
        output=output,
        seconds=each * copies / rate,
        release=release_of(row),
    )


def _lengths(row: Row, mean: float, at_once: int) -> tuple[float, ...]:
    """Return quantiles of the outputs' lengths: of a data set's answers exponential, else all alike."""
    if "data" not in row["len_kind"] and "ShareGPT" not in row["len_kind"]:
        return (mean,)
    if "random" in row["len_kind"]:
        return (mean,)
    count = min(SPREAD, at_once)
    drawn = [-log(1 - (k + 0.5) / count) for k in range(count)]
    return tuple(mean * each * count / sum(drawn) for each in drawn)


def _running(row: Row, made: Plan, asked: int, tokens: float) -> int:
    """Return how many of `asked` sequences run at once."""
    stated = re.search(r"max_num_seqs=(\d+)", row["notes"])
    most = made.resolved.max_num_seqs if row["engine"].startswith("vllm") else OTHER_SEQS
    most = int(stated[1]) if stated else most
    limit = min(asked, most)
    if made.serving is not None and made.serving.kv_tokens:
        limit = min(limit, int(made.serving.kv_tokens / tokens))
    return max(1, limit)


def _long_enough(model: ModelSpec, length: int) -> ModelSpec:
    from dataclasses import replace

    if model.longest and length > model.longest:
        return replace(model, rope_scaled_position=length)
    return model


def release_of(row: Row) -> tuple[int, ...]:
    """Return vLLM's release of a row: its number, else the newest of the month that the row names, else ()."""
    if "--async-scheduling" in row["notes"]:
        return SCHEDULES_AHEAD
    if not row["engine"].startswith("vllm"):
        return ()
    found = re.search(r"(\d+)\.(\d+)", row["version"])
    if found:
        return int(found[1]), int(found[2])
    month = re.search(r"20\d\d-\d\d", row["version"])
    return max(
        (each for first, each in RELEASED.items() if month and first <= month[0]), default=()
    )


def _flag(row: Row, name: str) -> int | None:
    """Return a number that the row's command gives vLLM."""
    found = re.search(rf"--{name}[ =](\d+)\b", row["notes"])
    return int(found[1]) if found else None


def card_of(row: Row, card: CardSpeed) -> CardSpeed:
    """Return the row's card with the links and the power limit that it states.

    Of PCIe a generation and width, without NVLink. Under a power limit clocks fall: dynamic power goes with
    clock x voltage^2, and voltage with the clock, so the clock goes with the cube root.
    """
    found = re.search(r"PCIe (\d)\.0 x(\d+)", row["notes"])
    if found:
        card = card._replace(nvlink=0.0, pcie=PCIE_LANE[found[1]] * int(found[2]))
    elif "no NVLink" in row["notes"]:
        card = card._replace(nvlink=0.0)
    if "patched P2P" in row["notes"]:
        card = card._replace(peers=True)
    limit = re.search(r"power cap (\d+) W", row["notes"]) or re.search(r"-(\d+)w$", row["gpu"])
    if limit and 0 < int(limit[1]) < card.tdp_watts:
        clock = (int(limit[1]) / card.tdp_watts) ** (1 / 3)
        card = card._replace(
            peaks={dtype: clock * speed for dtype, speed in card.peaks.items()},
            measured={dtype: clock * speed for dtype, speed in card.measured.items()},
        )
    return card


def _law(row: Row) -> str:
    """Return the law of a row's release, the newest where none covers it."""
    found = re.search(r"(\d+)\.(\d+)(\.\d+)?", row["version"])
    version = found[0] if found else ".".join(map(str, release_of(row)))
    if not row["engine"].startswith("vllm") or not version:
        return "vllm"
    try:
        return pick("vllm", version).name
    except VramwiseError:
        return "vllm"
