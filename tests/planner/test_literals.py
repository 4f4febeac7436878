"""No constant of nature hides in the planner's code: every float says what it is.

A float in planner/ (data/ is for facts) is arithmetic, a unit, a dtype's size, another tool's own
default or a threshold of reading and reporting. Nothing scales a byte count by a number that was
read off the rows it is scored on: `intervals` are the accuracy page's and go with its rewrite.
"""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLANNER = ROOT / "planner"
ARITHMETIC = frozenset({0.0, 0.5, 1.0, 2.0})
"""Nothing, a half, all, twice."""
UNIT = "unit: 10^9 of something"
TOOL = "another tool's documented default"
READING = "threshold for reading a log or a config"
REPORT = "target, percentile or search step of a report"
INTERVAL = "interval of the accuracy page"

ALLOWED: dict[tuple[str, float], str] = {
    # units and dtypes
    ("machines/machine.py", 1e9): UNIT,
    ("answers/ranking.py", 1e9): UNIT,
    ("verbs/recommend.py", 1e9): UNIT,
    ("answers/ranking.py", 3.0): REPORT,
    ("answers/ranking.py", 1e-3): REPORT,
    ("answers/longest.py", 1.03): REPORT,
    ("answers/recommend.py", 1.15): REPORT,
    ("answers/recommend.py", 1.3): REPORT,
    ("answers/recommend.py", 1.4): REPORT,
    ("machines/machine.py", 0.985e9): "unit: PCIe 3.0 lane, 8 GT/s at 128b/130b = 0.985e9 B/s",
    ("verbs/plan.py", 1e9): UNIT,
    ("doctor/context.py", 1e9): UNIT,
    ("dtypes.py", 4.85): "dtype size: llama.cpp Q4_K_M, bits a weight as its README lists them",
    # other tools' defaults
    ("accuracy/sft_recipe.py", 0.05): TOOL + ": litgpt's and ms-swift's lora_dropout",
    ("accuracy/sft_recipe.py", 0.1): TOOL + ": lora_dropout of fms-acceleration's scenarios.yaml",
    ("families/megatron.py", 0.1): TOOL + ": Megatron-LM's hidden_dropout",
    (
        "answers/serving_changes.py",
        0.97,
    ): "lever: the largest share of a card that vLLM's users give it",
    ("importers/image_limits.py", 0.9): READING,
    **dict.fromkeys(
        (
            *(("importers/policies.py", each) for each in (0.8, 0.6, 0.9, 0.01, 0.1, 0.02, 0.001)),
            *(("importers/openrlhf.py", each) for each in (0.95, 0.01, 0.1)),
            ("importers/megatron_flags.py", 0.9),
            ("importers/megatron_flags.py", 0.04),
            ("importers/megatron_flags.py", 0.1),
            ("importers/policy_keys.py", 0.9),
            ("importers/sglang.py", 0.88),
            ("importers/supervised.py", 0.05),
        ),
        TOOL,
    ),
    ("importers/axolotl.py", 0.9): TOOL,
    ("importers/axolotl.py", 0.3): TOOL,
    ("importers/axolotl.py", 0.1): TOOL,
    ("importers/llamafactory.py", 0.1): TOOL,
    ("importers/ms_swift.py", 0.9): TOOL,
    ("importers/ms_swift.py", 0.05): TOOL,
    ("importers/ms_swift.py", 0.1): TOOL,
    ("importers/ms_swift.py", 0.04): TOOL,
    ("importers/trl.py", 0.1): TOOL,
    ("importers/trl.py", 0.05): TOOL,
    (
        "importers/trl_parts.py",
        1e30,
    ): "a norm that no gradient has: TRL's max_grad_norm 0 never clips",
    ("importers/trl_values.py", 0.6): READING,
    ("importers/unsloth.py", 0.001): TOOL,
    ("importers/unsloth.py", 0.1): TOOL,
    ("importers/verl.py", 0.001): TOOL,
    ("run/engine_law.py", 0.92): TOOL + ": vLLM's gpu_memory_utilization",
    ("run/tasks.py", 0.1): TOOL + ": TRL's DPO and KTO beta",
    ("run/tasks.py", 0.05): TOOL + ": TRL's PPO kl_coef",
    ("run/recipe.py", 1800.0): "a time limit in seconds",
    ("models/tiles.py", 1.1): TOOL + ": LLaVA-OneVision scales tiles down beyond this ratio",
    ("run/image_fields.py", 30.0): "unit: seconds of Whisper's window",
    # a rule of vLLM's code
    ("terms/vllm_blocks.py", 1.5): "vLLM v1/core/kv_cache_utils: pages of a group within 1.5 x",
    # the verdict: risks are shares, and the bound of a replay is held by a test
    ("risk.py", 0.05): "share: the risk that `fits` allows, and each tail of an interval",
    ("verbs/plan.py", 0.05): "share: the default of --risk",
    ("report/text.py", 0.005): "share: what prints as 0%",
    ("answers/slower.py", 0.005): "share: what prints as 0%",
    ("terms/engine.py", 0.05): "share: the pool's low is its 5%",
    ("terms/engine.py", 0.45): "share: from the pool's 5% to its median",
    ("plan.py", 1.1): "share: the margin of searches, never a verdict",
    ("speed/time.py", 0.625): "share: Blom's plotting position, 1 - 3/8",
    ("speed/time.py", 0.25): "share: Blom's plotting position, 1 - 2 x 3/8",
    ("speed/cards.py", 11.28): "share: GB/s of data/speed/links.csv, without peer access",
    ("speed/cards.py", 27.12): "share: GB/s of data/speed/links.csv, with peer access",
    ("speed/cards.py", 0.72): "share: STREAM's on a DGX A100's host, of its channels",
    ("speed/budget.py", 24.0): "unit: hours of a day",
    # reading
    ("doctor/candidates.py", 8.0): READING,
    ("doctor/candidates.py", 0.002): READING,
    ("doctor/causes_engine.py", 0.011): READING,
    ("doctor/causes_engine.py", 0.9): TOOL + ": vLLM's gpu_memory_utilization before 0.12",
    ("doctor/causes_engine.py", 0.93): READING,
    ("doctor/causes_training.py", 1.5): READING,
    ("doctor/causes_training.py", 0.8): READING,
    ("doctor/causes_ranks.py", 1.15): READING,
    ("doctor/fix_host.py", 0.95): READING,
    ("doctor/series.py", 0.1): READING,
    ("doctor/series.py", 0.8): READING,
    ("doctor/fix_makers.py", 0.1): READING,
    ("doctor/fix_makers.py", 0.98): READING,
    ("doctor/fix_makers.py", 0.05): READING,
    ("doctor/fixes.py", 0.93): READING,
    ("doctor/serving.py", 0.95): READING,
    ("doctor/serving.py", 0.01): READING,
    ("doctor/serving.py", 0.02): READING,
    ("families/fields.py", 1e12): READING,
    ("importers/__init__.py", 0.6): READING,
    ("speed/cards.py", 1e12): UNIT,
    ("speed/cards.py", 1e9): UNIT,
    # the speed model's calibration: how it is searched, what is scored
    **{
        ("accuracy/speed_fit.py", each): "step, tolerance or bound of a search"
        for each in (1e-3, 0.1, 0.05, 2e-4, 2e-2, 5e-4, 1e-4, 1e-2, 1e-6, 1e-5, 1e-12, 0.7)
    },
    ("accuracy/speed_score.py", 0.55): REPORT,
    ("accuracy/speed_score.py", 1e12): UNIT,
    ("accuracy/speed_score.py", 0.9): REPORT,
    ("accuracy/speed_calibrate.py", 0.9): REPORT,
    **{
        ("accuracy/speed_fit.py", each): "where a search starts, before any row"
        for each in (0.8, 200.0, 2e-5, 3e-6, 0.002)
    },
    **{
        (
            "accuracy/speed_decode.py",
            each,
        ): "cited fact: GB/s of a PCIe lane, 8, 16 and 32 GT/s in 128b/130b"
        for each in (0.985, 1.969, 3.938)
    },
    ("accuracy/speed_report.py", 0.9): REPORT,
    # reporting
    ("accuracy/report.py", 0.001): REPORT,
    ("accuracy/report.py", 0.005): REPORT,
    ("accuracy/report.py", 0.01): REPORT,
    ("accuracy/report.py", 0.025): REPORT,
    ("accuracy/report.py", 0.03): REPORT,
    ("accuracy/report.py", 0.05): REPORT,
    ("accuracy/report.py", 0.08): REPORT,
    ("accuracy/report.py", 0.1): REPORT,
    ("accuracy/report.py", 0.12): REPORT,
    ("accuracy/report.py", 0.15): REPORT,
    ("accuracy/rows.py", 0.8): REPORT,
    ("accuracy/score.py", 0.9): REPORT,
    ("answers/lengths.py", 0.9): REPORT,
    ("answers/lengths.py", 0.99): REPORT,
    ("accuracy/vllm_engine.py", 0.8): INTERVAL,
    ("accuracy/vllm_engine.py", 0.95): INTERVAL,
    ("accuracy/vllm_rows.py", 0.15): INTERVAL,
    ("accuracy/vllm_rows.py", 0.95): INTERVAL,
    ("accuracy/vllm_rows.py", 0.98): INTERVAL,
    ("accuracy/vllm_rows.py", 0.99): INTERVAL,
    ("accuracy/vllm_rows.py", 0.995): INTERVAL,
    ("accuracy/vllm_rows.py", 1.005): INTERVAL,
    ("accuracy/vllm_rows.py", 1.01): INTERVAL,
    ("accuracy/vllm_rows.py", 1.02): INTERVAL,
    ("accuracy/vllm_rows.py", 1.05): INTERVAL,
    ("accuracy/vllm_rows.py", 1.1): INTERVAL,
}
FREE_ROOMS = ("accuracy", "doctor", "importers", "answers", "verbs")
"""Rooms that read, report or advise; nowhere else may a float be anything but a cited fact."""


@cache
def floats() -> dict[tuple[str, float], int]:
    """Return every float literal of the planner as (file, value) -> first line."""
    found: dict[tuple[str, float], int] = {}
    for path in sorted(PLANNER.rglob("*.py")):
        name = path.relative_to(PLANNER).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, float):
                found.setdefault((name, node.value), node.lineno)
    return {key: line for key, line in found.items() if key[1] not in ARITHMETIC}


def test_every_float_is_listed_with_its_reason():
    unknown = [
        f"planner/{name}:{line}: {value!r}"
        for (name, value), line in floats().items()
        if (name, value) not in ALLOWED
    ]
    assert not unknown, "a unit, a dtype's size or a cited fact? list it; else it belongs in data/"


def test_the_list_has_no_entry_that_is_gone():
    # other hands remove floats while this list is merged: a stale line is a line to delete
    gone = [key for key in ALLOWED if key not in floats()]
    assert len(gone) <= len(ALLOWED) // 10, gone


def test_the_memory_model_itself_has_only_units_and_cited_facts():
    inside = [key for key in floats() if key[0].split("/")[0] not in FREE_ROOMS]
    reasons = {key: ALLOWED[key] for key in inside}
    allowed = (
        "unit",
        "dtype size",
        "another tool",
        "vLLM",
        "a time limit",
        "threshold",
        "empirical",
        "share",
    )
    assert all(reason.startswith(allowed) for reason in reasons.values())
    replayed = [key for key in floats() if key[0].startswith(("replay/", "allocator/", "layer/"))]
    assert not replayed
    assert not [key for key in floats() if key[0] in ("reserved.py", "phases.py")]
