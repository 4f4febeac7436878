"""Answers kept for everybody who asks for the same run; those about an upload stay in its session.

The key is the whole run, so nobody sees another run's figures. What a person uploaded or had looked
up is never in the shared caches.
"""

from collections.abc import Callable
from typing import Any

import streamlit as st

from app import finder, jobs, workers
from app.jobs import Lever, Mended
from app.runs import Run
from planner.answers.cards import Card
from planner.answers.frontier import Frontier
from planner.answers.layouts import Tried
from planner.answers.recommend import Recommendation
from planner.answers.serving import ServingView
from planner.plan import Plan

MAX_SHARED = 1000
MAX_OWN = 50


@st.cache_resource(max_entries=MAX_SHARED, show_spinner=False)
def _shared(
    name: str, key: tuple[str, ...], _job: Callable[..., Any], _asked: tuple[Any, ...], _kind: str
) -> Any:
    return workers.run(_job, *_asked, kind=_kind)


@st.cache_resource(max_entries=MAX_OWN, show_spinner=False, scope="session")
def _own(
    name: str, key: tuple[str, ...], _job: Callable[..., Any], _asked: tuple[Any, ...], _kind: str
) -> Any:
    return workers.run(_job, *_asked, kind=_kind)


def ask(job: Callable[..., Any], run: Run, *more: Any, kind: str = workers.SHORT) -> Any:
    """Return what a job says about a run: known already, or done by a worker."""
    sent = run.sent()
    kept = _shared if sent.model is None else _own
    key = (*run.key, *map(str, more))
    return kept(job.__qualname__, key, job, (sent, *more), kind)


def plan_of(run: Run) -> Plan:
    """Return a run's plan with its replay made."""
    found: Plan = ask(jobs.plan_of, run)
    return found


def levers(run: Run, *, judged: bool) -> list[Lever]:
    """Return the changes that lower a run's peak; `judged`: and whether it fits with each."""
    found: list[Lever] = ask(jobs.levers, run, judged)
    return found


def mended(run: Run) -> Mended | None:
    """Return changes after which a run fits."""
    found: Mended | None = ask(jobs.mended, run)
    return found


def limits(run: Run) -> dict[str, int]:
    """Return the largest context, batch, generations and rank of a run."""
    found: dict[str, int] = ask(jobs.limits, run, kind=workers.LONG)
    return found


def served(run: Run, shared_prefix: int) -> ServingView | None:
    """Return a server's view of its plan."""
    found: ServingView | None = ask(jobs.served, run, shared_prefix)
    return found


def curve(run: Run) -> dict[str, list[tuple[int, int]]]:
    """Return peak against context, by framework."""
    found: dict[str, list[tuple[int, int]]] = ask(jobs.curve, run)
    return found


def layouts(run: Run, *, fitting: int) -> list[Tried]:
    """Return layouts of several GPUs."""
    found: list[Tried] = ask(jobs.layouts_of, run, fitting, kind=workers.LONG)
    return found


def cards(run: Run, context: int, kinds: tuple[str, ...], limit: int | None) -> list[Card]:
    """Return the GPUs of some kinds that take a run's model, the cheapest first."""
    found: list[Card] = ask(finder.cards, run, context, kinds, limit, kind=workers.LONG)
    return found


def ways(run: Run, samples: int, epochs: float) -> Frontier:
    """Return the ways to do a run that nothing beats, by memory, hours and dollars."""
    found: Frontier = ask(jobs.ways, run, samples, epochs, kind=workers.LONG)
    return found


@st.cache_resource(max_entries=MAX_SHARED, show_spinner=False)
def recommended(
    section: str,
    task: str,
    least: int,
    framework: str,
    search: str,
    sizes: tuple[float, float],
    limit: int,
) -> list[Recommendation]:
    """Return what fits a machine (a MachineSection as JSON): the best first."""
    asked = (section, task, least, framework, search, sizes, limit)
    found: list[Recommendation] = workers.run(finder.recommended, *asked, kind=workers.LONG)
    return found
