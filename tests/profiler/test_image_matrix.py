"""Plan against trace of a step with an image, at the checkpoints' own sizes: every phase within 5%."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from profiler.image_matrix import RUNS, TOLERANCE, TOWERS, ImageCase, run_image_case


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", TOWERS)
def test_every_phase_with_an_image(name: str, run: str) -> None:
    found = run_image_case(ImageCase(name, run))
    errors = {cell.phase: cell.error for cell in found.totals if cell.phase != "load"}
    assert {"forward", "loss", "backward", "step"} <= set(errors)
    assert all(abs(error or 0.0) < TOLERANCE for error in errors.values()), errors
