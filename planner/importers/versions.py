"""Which version of a tool a config was written for, where the file states it or its keys decide."""

import re
from pathlib import Path
from typing import NamedTuple

_NUMBER = r"v?(?P<version>\d+(?:\.\d+)+(?:\.?(?:post|rc|dev)\d+)?)"

_ALONE = r"(?![\d+]|\.\d|\s*(?:\+|or\b|and\b|to\b|-))"
"""In prose: one version, not "1.0 or newer"."""


LOCKS = (
    "uv.lock",
    "poetry.lock",
    "pdm.lock",
    "Pipfile.lock",
    "requirements*.lock",
    "*freeze*.txt",
    "pip[-_]list*.txt",
    "requirements*.txt",
    "constraints*.txt",
    "environment*.y*ml",
    "conda*.y*ml",
    "pyproject.toml",
    "Dockerfile*",
)
"""Files beside a config that pin what it runs with, the strictest first."""
MAX_LOCK = 8 * 1024 * 1024


class Locked(NamedTuple):
    """A release, and the file that pins it."""

    version: str
    file: str


def locked(folder: Path, *packages: str) -> Locked | None:
    """Return the release of the first of `packages` that a lock file in `folder` pins, or None."""
    for pattern in LOCKS:
        for path in sorted(folder.glob(pattern)):
            try:
                if not path.is_file() or path.stat().st_size > MAX_LOCK:
                    continue
                text = path.read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            if found := stated(text, *packages):
                return Locked(found, path.name)
    return None


def stated(text: str, *packages: str) -> str | None:
    """Return the version of the first of `packages` that a text pins, or None (see `stated_as`)."""
    found = stated_as(text, *packages)
    return found[0] if found else None


def stated_as(text: str, *packages: str) -> tuple[str, str] | None:
    """Return the version of the first of `packages` that a text pins and the words that do, or None.

    Read are requirement and pip lines (trl==1.9.2, trl[vllm]~=1.9, trl @ git+...@v1.9.0, conda's trl=1.9.2,
    the rows of pip list), keys (trl_version: 1.9), lock files (name = "trl", version = ...; "trl": {"version":
    "==..."}), image tags (vllm-openai:v0.11.1), and words in comments and printed banners (# TRL 1.9, Unsloth
    2025.3.19:, vLLM API server version 0.9.1). A lower bound (trl>=0.14) pins nothing.
    """
    plain = text.lower().replace("_", "-")
    for package in packages:
        if package.lower() not in plain:  # ten patterns over a whole log would take seconds
            continue
        name = re.escape(package).replace(r"\-", "[-_]")
        for pattern in (
            rf"(?<![\w-]){name}(?:\[[\w,-]+\])?\s*(?:===?|~=)\s*{_NUMBER}",
            rf"{name}(?:\[[\w,-]+\])?\s*@\s*git\+\S+?@{_NUMBER}",
            rf"{name}(?:\.git)?@{_NUMBER}",
            rf"(?<![\w-])[\"']?{name}[-_]version[\"']?\s*[:=]\s*[\"']?{_NUMBER}",
            rf"{name}\.__version__\s*==\s*[\"']{_NUMBER}",
            rf"^\s*(?:#|//).*?(?<![\w-]){name}\s*:?\s+{_NUMBER}{_ALONE}",
            rf"(?<![\w-]){name}\s+{_NUMBER}:",
            rf"(?<![\w-]){name}(?:[ \t]+[a-z]+){{0,3}}[ \t]+version[ \t]*[:=]?[ \t]*\(?{_NUMBER}",
            rf"\bname\s*=\s*[\"']{name}[\"']\s*\n\s*version\s*=\s*[\"']{_NUMBER}",
            rf"(?<![\w-]){name}[\w-]*:{_NUMBER}",
            rf"^\s*-\s*{name}={_NUMBER}",
            rf"^{name}[ \t]+{_NUMBER}[ \t]*(?:pypi\S*|/\S+)?$",
            rf"\"{name}\":\s*\{{[^{{}}]*\"version\":\s*\"=={_NUMBER}",
        ):
            found = re.search(pattern, text, re.IGNORECASE | re.MULTILINE)
            if found is not None:
                return found["version"], " ".join(found.group().split())[-60:]
    return None
