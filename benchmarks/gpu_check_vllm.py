"""`make gpu-check-vllm`: the trainer with vLLM inside it, on this machine's GPU, in 8 minutes.

    python benchmarks/gpu_check_vllm.py [--only NAME]... [--json FILE] [--cpu]

For a machine with vLLM. Each engine by itself: started beside or under a policy, its log-probs against
the policy's before and after weights have changed, tokens a second, what is free of the card before it
starts, while it runs, while it gives its memory back for a training step, and after it has closed. Then
whole GRPO runs, planned and recorded. Options and exit codes as of gpu_check.py; `--cpu` runs the same at
toy size on vLLM's CPU build, which is real but gives no memory back.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.gpu_check import main  # noqa: E402
from benchmarks.gpu_check_jobs import VLLM_JOBS  # noqa: E402

if __name__ == "__main__":
    ABOUT = (__doc__ or "").splitlines()[0]
    sys.exit(main(jobs=VLLM_JOBS, about=ABOUT, out="gpu-check-vllm.json"))
