"""A Llama of twelve layers, quantised once for all tests that read what was written."""

from pathlib import Path

import pytest

from trainer.config import DatasetSection
from trainer.quantize.job import Job, quantize
from trainer.small_model import make_small_model


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """Return the folder of the 16-bit model: layers 1 and 10 to 11 share a prefix, q, k and v have biases."""
    folder = tmp_path_factory.mktemp("quantize") / "source"
    return make_small_model(
        folder,
        hidden=128,
        intermediate=192,
        layers=12,
        chat=True,
        initializer_range=0.1,
        attention_bias=True,
        tie_word_embeddings=False,
    )


@pytest.fixture(scope="session")
def asked(source):
    """Return a function that makes a Job; keyword arguments change it."""

    def make(out, **changed):
        usual = {
            "model": source,
            "out": Path(out),
            "budget": 1_100_000,
            "fits": None,
            "data": DatasetSection(name="arithmetic"),
            "root": Path.cwd(),
            "tokens": 1024,
        }
        return Job(**(usual | changed))

    return make


@pytest.fixture(scope="session")
def written(asked, tmp_path_factory):
    """Return the folder with both formats, and the report."""
    out = tmp_path_factory.mktemp("quantize") / "both"
    return out, quantize(asked(out, format="both"), quiet=True)
