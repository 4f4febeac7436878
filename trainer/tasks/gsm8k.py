"""GSM8K (grade-school word problems) from the hub: question, and the number after ####."""

import re
from typing import Any

HUB_ID = "openai/gsm8k"
HUB_CONFIG = "main"
SYSTEM_PROMPT = (
    "Solve the problem step by step, then give the final number on the last line after '####'."
)


def to_sample(row: dict[str, Any]) -> dict[str, Any]:
    """Return {"prompt": messages, "answer"} of one GSM8K row {"question", "answer"}.

    Published answers end in '#### 1,234': the number after the mark is what is checked.
    """
    _, _, final = row["answer"].rpartition("####")
    return {
        "prompt": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": row["question"].strip()},
        ],
        "answer": re.sub(r"[,$\s]", "", final),
    }
