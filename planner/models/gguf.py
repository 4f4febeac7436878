"""GGUF repositories: which model their files were made of, and how large each file is; nothing of them is downloaded."""

import re
from dataclasses import dataclass
from typing import Any

from planner.models.hub_remote import within

SHARD = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)", re.IGNORECASE)
KIND = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d[A-Z0-9_]*|TQ\d_\d|MXFP4[A-Z0-9_]*|BF16|F16|F32))(?=[-.]|$)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """One quantisation: a file, or several that are read as one."""

    name: str
    kind: str
    """Q4_K_M, IQ2_XS, BF16 ...; empty when the name does not say."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GgufRepository:
    """What a repository of GGUF files holds."""

    repo_id: str
    base_model: str
    """As its card says, empty when it does not."""
    files: tuple[GgufFile, ...]


def look(
    repo_id: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    timeout_s: float = 10,
    endpoint: str | None = None,
) -> GgufRepository | None:
    """Return the GGUF files of a hub repository; None when it holds none. Raises as fetch_model does."""

    def fetch() -> GgufRepository | None:
        import huggingface_hub as hub

        api = hub.HfApi(endpoint=endpoint, token=token)
        info = api.model_info(repo_id, revision=revision, timeout=timeout_s, files_metadata=True)
        sizes = {each.rfilename: each.size or 0 for each in info.siblings or []}
        files = merged(sizes)
        return GgufRepository(repo_id, base_of(info.card_data), files) if files else None

    return within(timeout_s, repo_id, fetch)


def merged(sizes: dict[str, int]) -> tuple[GgufFile, ...]:
    """Return the quantisations among files, the smallest first; parts of one file are added up."""
    found: dict[str, int] = {}
    for name, size in sizes.items():
        leaf = name.rsplit("/", 1)[-1].lower()
        if leaf.endswith(".gguf") and not leaf.startswith(("mmproj", "imatrix")):
            whole = SHARD.sub("", name)
            found[whole] = found.get(whole, 0) + size
    files = (GgufFile(name, kind_of(name), size) for name, size in found.items())
    return tuple(sorted(files, key=lambda each: (each.size_bytes, each.name)))


def kind_of(name: str) -> str:
    """Return the quantisation that a file's name says."""
    kinds = KIND.findall(re.sub(r"\.gguf$", "", name, flags=re.IGNORECASE))
    return kinds[-1].upper() if kinds else ""


def base_of(card: Any) -> str:
    """Return the base model of a card; the first of several."""
    base = getattr(card, "base_model", None) or (card or {}).get("base_model")
    if isinstance(base, list):
        base = base[0] if base else ""
    return str(base or "")
