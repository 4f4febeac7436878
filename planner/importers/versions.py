"""Which version of a tool a config was written for, where the file states it or its keys decide."""

import re

_NUMBER = r"v?(?P<version>\d+(?:\.\d+)+(?:\.?(?:post|rc|dev)\d+)?)"

_ALONE = r"(?![\d+]|\.\d|\s*(?:\+|or\b|and\b|to\b|-))"
"""In prose: one version, not "1.0 or newer"."""


def stated(text: str, *packages: str) -> str | None:
    """Return the version of the first of `packages` that a text pins, or None.

    Read are requirement and pip lines (trl==1.9.2, trl[vllm]~=1.9, trl @ git+...@v1.9.0), keys
    (trl_version: 1.9), and words in comments and printed banners (# TRL 1.9, Unsloth 2025.3.19:).
    A lower bound (trl>=0.14) pins nothing.
    """
    for package in packages:
        name = re.escape(package).replace(r"\-", "[-_]")
        for pattern in (
            rf"(?<![\w-]){name}(?:\[[\w,-]+\])?\s*(?:===?|~=)\s*{_NUMBER}",
            rf"{name}(?:\[[\w,-]+\])?\s*@\s*git\+\S+?@{_NUMBER}",
            rf"{name}(?:\.git)?@{_NUMBER}",
            rf"(?<![\w-])[\"']?{name}[-_]version[\"']?\s*[:=]\s*[\"']?{_NUMBER}",
            rf"{name}\.__version__\s*==\s*[\"']{_NUMBER}",
            rf"^\s*(?:#|//).*?(?<![\w-]){name}\s*:?\s+{_NUMBER}{_ALONE}",
            rf"(?<![\w-]){name}\s+{_NUMBER}:",
        ):
            found = re.search(pattern, text, re.IGNORECASE | re.MULTILINE)
            if found is not None:
                return found["version"]
    return None
