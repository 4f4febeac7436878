"""However Streamlit is started, the app looks the same and sends no statistics."""

import tomllib
from pathlib import Path

import pytest
from streamlit import config

from app.serve import OPTIONS, config_toml

ROOT = Path(__file__).parents[2]
FILES = (".streamlit/config.toml", "app/.streamlit/config.toml")


@pytest.mark.parametrize("name", FILES)
def test_the_files_are_what_the_command_sets(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == config_toml(), "run: make docs"


def test_every_setting_is_one_that_streamlit_knows() -> None:
    flat: dict[str, object] = {}

    def walk(prefix: str, section: dict[str, object]) -> None:
        for name, value in section.items():
            path = f"{prefix}{name}"
            if isinstance(value, dict):
                walk(f"{path}.", value)
            else:
                flat[path] = value

    walk("", tomllib.loads(config_toml()))
    assert set(flat) == set(OPTIONS)
    assert set(flat) <= set(config._config_options_template)
    assert flat["browser.gatherUsageStats"] is False
    assert flat["theme.dark.backgroundColor"] == OPTIONS["theme.dark.backgroundColor"]
