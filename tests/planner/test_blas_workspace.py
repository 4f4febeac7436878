"""The BLAS workspaces in torch's pool: one size a GPU generation, one a thread that multiplies."""

import pytest

from planner.machines.machine import gpu_catalogue, make_machine
from planner.models.hub import find_model
from planner.plan import Plan, plan
from planner.run.recipe import Recipe
from planner.terms.overhead import blas_workspace_bytes
from planner.units import KiB, MiB

SMALL = 2 * 4096 * KiB + 8 * 16 * KiB


def overheads(planned: Plan) -> dict[str, int]:
    return {
        phase.name: sum(term.bytes for term in phase.terms if term.name == "overhead")
        for phase in planned.phases
    }


@pytest.mark.parametrize(
    ("gpu", "size"),
    [
        ("t4", SMALL),
        ("a100-sxm4-80gb", SMALL),
        ("rtx-3090", SMALL),
        ("rtx-4090", SMALL),
        ("h100-sxm", 32 * MiB),
        ("b200", 32 * MiB),
        ("b300", 32 * MiB),
        ("jetson-agx-thor-128gb", 32 * MiB),
        ("rtx-5090", 32 * MiB),
        ("gb10-dgx-spark", 32 * MiB),
        ("mi300x", 76 * MiB),
        ("rx-7900-xtx", 32 * MiB),
        ("arc-a770-16gb", 0),
        ("apple-m1-max-64gb", 0),
    ],
)
def test_the_size_follows_the_compute_capability(gpu: str, size: int) -> None:
    assert blas_workspace_bytes(gpu_catalogue()[gpu]) == size


def test_every_card_of_the_catalogue_has_a_known_size() -> None:
    found = {gpu.vendor: set[int]() for gpu in gpu_catalogue().values()}
    for gpu in gpu_catalogue().values():
        found[gpu.vendor].add(blas_workspace_bytes(gpu))
    assert found == {
        "nvidia": {SMALL, 32 * MiB},
        "amd": {32 * MiB, 76 * MiB},
        "intel": {0},
        "apple": {0},
    }


@pytest.mark.parametrize(("gpu", "size"), [("rtx-4090", SMALL), ("h100-sxm", 32 * MiB)])
def test_training_has_one_for_forward_and_one_for_backward(gpu: str, size: int) -> None:
    recipe = Recipe(task="grpo", method="lora", context=1024, num_generations=4)
    found = overheads(plan(find_model("qwen3-0.6b"), recipe, make_machine(gpu)))
    assert found.pop("load") == 0  # nothing is multiplied yet
    assert set(found) == {"rollout", "score", "forward", "loss", "backward", "step"}
    assert set(found.values()) == {2 * size}


def test_serving_has_one() -> None:
    recipe = Recipe(task="serve", context=1024)
    found = overheads(plan(find_model("qwen3-0.6b"), recipe, make_machine("h100-sxm")))
    assert found == {"load": 0, "rollout": 32 * MiB}


def test_the_formula_is_in_words() -> None:
    recipe = Recipe(task="sft", method="full", context=512)
    planned = plan(find_model("qwen3-0.6b"), recipe, make_machine("a100-sxm4-80gb"))
    (term,) = [t for t in planned.phases[-1].terms if t.name == "overhead"]
    assert term.formula == "2 cuBLAS workspaces x 8,519,680 B"
    assert "parseChosenWorkspaceSize" in term.source
