"""Which law a framework and version is planned by. `pick` is the one place that chooses.

Importers, accuracy, the live recipe, trace, doctor and the command line all come here with a name
as people write it: trl, trl-1.9, trl==1.9.0, trl@1.9.
"""

import re
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from planner.datafiles import data_dir
from planner.errors import UnknownNameError, UsageError
from planner.run.framework_files import Framework, load_frameworks
from planner.run.recipe import Task

if TYPE_CHECKING:
    from packaging.version import Version

_SPELLED = re.compile(r"(?P<name>.+?)\s*(?P<how>={1,3}|@|~=?)\s*v?(?P<version>[^\s=~@]*)")
_TRAILING = re.compile(r"(?P<name>.+?)[- ]v?(?P<version>\d[\w.+!]*)")


@cache
def frameworks() -> dict[str, Framework]:
    """Return every law by name."""
    return load_frameworks(data_dir() / "frameworks")


@cache
def _index() -> dict[str, str]:
    return {
        alias: framework.name
        for framework in frameworks().values()
        for alias in (framework.name, *framework.aliases)
    }


class Asked(NamedTuple):
    """A spelling, taken apart: `trl==1.9` is (trl, 1.9, exact), `trl~2.0` (trl, 2.0, nearest)."""

    name: str
    version: str
    nearest: bool


def spelled(text: str) -> Asked:
    """Take a spelling apart; a law's own name (trl-1.9) asks for that law and no version."""
    key = text.lower().strip()
    if key in _index():
        return Asked(key, "", nearest=False)
    match = _SPELLED.fullmatch(key)
    if match is None:
        match = _TRAILING.fullmatch(key)
        if match is None or match["name"] not in _index():
            return Asked(key, "", nearest=False)
    nearest = match.groupdict().get("how", "").startswith("~")
    return Asked(match["name"], match["version"], nearest=nearest)


@lru_cache(maxsize=256)
def pick(name: str, version: str | None = None) -> Framework:
    """Return the law of a framework and version; without a version the newest, or the law named.

    `name` may hold the version: trl==1.9.0, trl@1.9, trl-1.9; trl~2.0 takes the nearest law when
    none covers 2.0. Raises UnknownNameError with near names, UsageError when no law covers the
    version.
    """
    asked = spelled(name)
    if version is not None and asked.version and asked.version != version:
        raise UsageError(f"framework: {name} and version {version} contradict each other")
    known = _index().get(asked.name)
    if known is None:
        raise UnknownNameError("framework", asked.name, _index(), hint=", ".join(families()))
    found = frameworks()[known]
    wanted = version if version is not None else asked.version
    if not wanted:
        if asked.name != name.lower().strip():
            raise UsageError(f"framework: {name[:60]!r} names no version", hint="like trl==1.9")
        return found
    release = _release(wanted)
    laws = laws_of(found.family, found.variant)
    matching = [law for law in laws if law.matches(release)]
    if matching:
        return matching[0]
    if asked.nearest:
        return min(laws, key=lambda law: _distance(law, release))
    raise UsageError(
        f"framework: no law covers {found.family} {wanted}",
        hint="known: "
        + "; ".join(f"{law.name} ({law.range})" for law in laws)
        + f"; `{found.family}~{wanted}` takes the nearest",
    )


def spell(family: str, version: str) -> str:
    """Return family==version, or family~version (the nearest law) when no law covers it."""
    release = _release(version)
    covered = any(law.matches(release) for law in laws_of(family))
    return f"{family}{'==' if covered else '~'}{version}"


def planned_as(framework: Framework, asked: str) -> str:
    """Return `TRL 1.9 (>=1.0,<1.12)` and the version that was asked for, if one was."""
    version = spelled(asked).version
    return f"{framework.title} ({framework.range})" + (f", asked for {version}" if version else "")


def fallback_note(framework: Framework, asked: str) -> str:
    """Return what to know when the nearest law stands in for a version, or nothing."""
    if "~" not in asked:
        return ""
    wanted = spelled(asked)
    if not wanted.nearest or framework.matches(_release(wanted.version)):
        return ""
    return (
        f"no law covers {framework.family} {wanted.version}: planned as {framework.title} "
        f"({framework.range}), the nearest"
    )


def families() -> dict[str, list[Framework]]:
    """Return the laws of every family, newest first."""
    found: dict[str, list[Framework]] = {}
    for law in frameworks().values():
        found.setdefault(law.family, []).append(law)
    return {name: sorted(laws, key=_age, reverse=True) for name, laws in sorted(found.items())}


def with_task(task: Task) -> list[str]:
    """Return the families whose newest law names a task among its own."""
    return [name for name in families() if task in frameworks()[name].tasks]


def without_task(framework: Framework, task: Task) -> str:
    """Return what to know of a task that a framework does not have, or nothing."""
    if task is Task.SERVE or framework.has(task):
        return ""
    has = ", ".join(with_task(task))
    return f"{framework.title} has no {task} of its own ({has} have): planned as a loop on it"


def laws_of(family: str, variant: str = "") -> list[Framework]:
    """Return the laws that compete for a version, newest first."""
    return [law for law in families()[family] if law.variant == variant]


def _release(text: str) -> "Version":
    from packaging.version import InvalidVersion, Version

    try:
        return Version(text)
    except InvalidVersion:
        raise UsageError(
            f"framework: {text[:40]!r} is not a version", hint="like 1.9 or 0.18.2"
        ) from None


def _bounds(framework: Framework) -> list[tuple[int, ...]]:
    """Return the releases that a range names; their order and distance is all that is used."""
    return [
        tuple(int(part) for part in number.split("."))
        for number in re.findall(r"\d+(?:\.\d+)*", framework.versions)
    ]


def _age(framework: Framework) -> tuple[bool, tuple[int, ...], bool]:
    # the family's name is its newest law; of one range the plain one comes before its variants
    return (
        framework.name == framework.family,
        max(_bounds(framework), default=()),
        not framework.variant,
    )


def _distance(framework: Framework, release: "Version") -> float:
    """Return how far a release is from the nearer end of a range, in major versions."""

    def place(parts: tuple[int, ...]) -> float:
        major, minor, *_ = (*parts, 0, 0)
        return major + minor / 100

    return min(
        (abs(place(bound) - place(release.release)) for bound in _bounds(framework)), default=0.0
    )
