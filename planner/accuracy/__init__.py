"""Published measurements against the planner: rows -> runs -> figures of plans -> errors; no formula of its own.

rows.py        a CSV row, whichever of the three column sets it has
prediction.py  what the planner says about a row, or why it cannot say
sft_*.py       fine-tuning rows -> (model, recipe, machine, quantity)
rl_rows.py     GRPO and preference rows
vllm_rows.py   vLLM start-up logs
score.py       statistics per quantity and source; report.py prints them
"""

from planner.accuracy.score import Accuracy, score_files

__all__ = ["Accuracy", "score_files"]
