"""The answers that every visitor asks for first, made before anybody comes: each page as it opens."""

import importlib
import logging
import os

from app import budgets, cached, comparing, finder, finding, jobs, runs, scoring, serving
from app.runs import DEFAULTS
from planner.answers.serving import PREFIX
from planner.errors import VramwiseError
from planner.run.recipe import MachineSection

PAGES = (
    "answer",
    "budgets",
    "details",
    "explaining",
    "finding",
    "measuring",
    "serving",
    "shared",
    "sharing",
    "spread",
    "uploads",
)
LEAST_CONTEXT = 2048
WANTED = "VRAMWISE_APP_WARM"
"""Environment: 0 = nothing but the first page is made ahead."""


def first() -> None:
    """Import every page's parts and plan the run that "Will it fit?" opens with."""
    for name in PAGES:
        importlib.import_module(f"app.{name}")
    quiet = logging.getLogger("streamlit.runtime.scriptrunner_utils.script_run_context")
    quiet.disabled = True  # caches are filled before there is a session
    cached.plan_of(runs.run_of(DEFAULTS))


def others() -> None:
    """Make what the other pages show first; what fails here fails again where a person sees it."""
    if os.environ.get(WANTED) == "0":
        return
    run = runs.run_of(DEFAULTS)
    try:
        cached.levers(run, judged=not cached.plan_of(run).fits)
        for framework in jobs.side_by_side(DEFAULTS["task"]):
            recipe = run.recipe.model_copy(update={"framework": framework})
            cached.plan_of(runs.run_of(DEFAULTS, recipe=recipe))
        server = runs.run_of(DEFAULTS | serving.FIXED)
        cached.plan_of(server)
        cached.served(server, PREFIX)
        comparing.real_steps()
        cached.ways(run, budgets.SAMPLES, budgets.EPOCHS)
        scoring.accuracy()
        section = MachineSection(gpu=DEFAULTS["gpu"]).model_dump_json()
        task, framework = DEFAULTS["task"], DEFAULTS["framework"]
        sizes = (finder.SIZES[0], finder.SIZES[-1])
        cached.recommended(section, task, LEAST_CONTEXT, framework, "", sizes, finding.FEW)
    except VramwiseError as error:
        logging.getLogger(__name__).warning("not made ahead: %s", error.message)
