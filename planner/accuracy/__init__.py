"""Published measurements against the planner: parse rows, express them, score the errors.

rows.py        a CSV row, whichever of the three column sets it has
prediction.py  what the planner says about a row, or why it cannot say
sft_*.py       fine-tuning rows -> (model, recipe, machine, quantity)
rl_rows.py     GRPO, preference and loss-head rows
vllm_rows.py   vLLM start-up logs
kernels.py     kernel and loss-head micro-benchmarks, buffer by buffer
score.py       statistics per quantity and source; report.py prints them
"""

from planner.accuracy.score import Accuracy, score_files

__all__ = ["Accuracy", "score_files"]
