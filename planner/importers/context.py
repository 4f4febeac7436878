"""What goes with a config while it is read: where it lies, what was said beside it, files it names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.errors import UsageError
from planner.importers.loading import flatten, load_json, load_yaml, read_text
from planner.importers.spread import Launch
from planner.importers.versions import Locked, locked, stated, stated_as

PACKAGES = {
    "axolotl": ("axolotl",),
    "llamafactory": ("llamafactory", "llama-factory"),
    "torchtune": ("torchtune",),
    "ms-swift": ("ms-swift", "swift"),
    "verl": ("verl",),
    "openrlhf": ("openrlhf",),
    "unsloth": ("unsloth",),
    "vllm": ("vllm",),
    "sglang": ("sglang",),
    "megatron": ("megatron-core", "megatron-lm"),
    "skyrl": ("skyrl", "skyrl-train"),
    "hf-trainer": ("transformers",),
    **dict.fromkeys(("trl", "alignment-handbook", "open-r1"), ("trl",)),
}
"""What a file calls the package whose version decides."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """Everything beside a config's own text."""

    text: str = ""
    path: Path | None = None
    tool: str | None = None
    version: str | None = None
    launch: Launch | None = None
    variant: str | None = None
    model: str | None = None
    """Wins over the file's, which may be a variable or a folder of another machine."""
    gpus: int | None = None
    written: Mapping[str, str] = field(default_factory=dict)
    """Files that the script writes itself (cat > NAME <<EOF)."""

    def version_of(self, tool: str) -> str | None:
        """Return the version that was given, or that the text states for a tool's package."""
        found = self.version or stated(self.text, *PACKAGES.get(tool, (tool,)))
        if found is None and (pinned := self.locked(tool)) is not None:
            return pinned.version
        return found

    def why(self, tool: str, version: str) -> str:
        """Return what states the version that was taken, where something other than its user does, else ""."""
        if self.version is not None:
            return ""
        packages = PACKAGES.get(tool, (tool,))
        said = stated_as(self.text, *packages)
        if said is not None and said[0] == version:
            return f"the file says {said[1]!r}"
        pinned = self.locked(tool)
        return f"{pinned.file} beside it pins it" if pinned and pinned.version == version else ""

    def locked(self, tool: str) -> Locked | None:
        """Return what a lock file beside the config pins of a tool's package."""
        if self.path is None:
            return None
        return locked(self.path.parent, *PACKAGES.get(tool, (tool,)))

    def find(self, name: str) -> tuple[str, Path | None] | None:
        """Return text and path of a file that the config names: written by it, beside it, or above."""
        leaf = Path(name).name
        for spelling in (name, leaf):
            if spelling in self.written:
                return self.written[spelling], self.path
        if self.path is None or not leaf:
            return None
        folders = (self.path.parent, *self.path.parents[1:4])
        for place in (*(folder / name for folder in folders), self.path.parent / leaf):
            try:
                if place.is_file():
                    return read_text(place)
            except OSError:  # a name longer than a path may be
                return None
        return None

    def mapping(self, name: str) -> tuple[dict[str, Any], str, Path | None] | None:
        """Return a named YAML or JSON file as flat keys, with its text and path; None if not here."""
        found = self.find(name)
        if found is None:
            return None
        text, path = found
        document = load_json(text) if text.lstrip().startswith("{") else load_yaml(text)
        return (flatten(document), text, path) if isinstance(document, dict) else ({}, text, path)


def absent(name: str, *, what: str = "") -> UsageError:
    """Return the error for a file that a command names and that is not here."""
    if "$" in name:
        return UsageError(
            f"config: {name[:200]}, which this line names, is not here: a variable in it is not set in this file",
            hint="give the config itself: vramwise plan CONFIG",
        )
    return UsageError(
        f"config: {name[:200]}, which this line names, is not here{what}",
        hint=f"put {Path(name).name[:100]} beside this file, or give it alone: vramwise plan {Path(name).name[:100]}",
    )
