"""Starts Streamlit on app/web.py in a process of its own, with everything imported before anybody comes.

    python -m app.serve run app/web.py --server.port=8501

is `streamlit run` after that.
"""

import gc
import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

from app.palette import DARK, LIGHT
from planner.errors import MissingExtraError

MAX_UPLOAD_MIB = 200
OPTIONS: dict[str, str | int] = {
    "server.maxUploadSize": MAX_UPLOAD_MIB,
    "server.fileWatcherType": "none",
    "runner.postScriptGC": "false",  # of a heap that is all catalogue: 0.2 s after every answer
    "browser.gatherUsageStats": "false",
    "client.toolbarMode": "viewer",
    "client.showErrorDetails": "none",
    "theme.baseRadius": "medium",
    "theme.headingFontSizes": '["1.9rem", "1.3rem", "1.1rem", "1rem", "0.9rem", "0.9rem"]',
    "theme.metricValueFontSize": "1.35rem",
    "theme.paddingTop": "1rem",
    "theme.sidebar.paddingTop": "1rem",
    "theme.showWidgetBorder": "true",
    **{f"theme.light.{name}": value for name, value in LIGHT.items()},
    **{f"theme.dark.{name}": value for name, value in DARK.items()},
}
"""Streamlit settings of the app. `config_toml` is the same for who starts Streamlit without us."""
SELDOM = (20_000, 50, 100)
"""Collections of garbage: an answer makes thousands of objects that go by themselves."""
EVERYWHERE = ("0.0.0.0", "::")
"""Addresses for which Streamlit would ask another host what ours is called, unless somebody says."""


def config_toml() -> str:
    """Return .streamlit/config.toml: of the checkout, and of the package (app/.streamlit)."""
    sections: dict[str, list[str]] = {}
    for path, value in OPTIONS.items():
        section, _, name = path.rpartition(".")
        plain = isinstance(value, int) or value in ("true", "false") or value.startswith("[")
        sections.setdefault(section, []).append(f"{name} = {value if plain else json.dumps(value)}")
    parts = [f"[{section}]\n" + "\n".join(lines) for section, lines in sections.items()]
    return "# Made from app/serve.py; tests/app/test_app_config.py holds them together.\n" + (
        "\n\n".join(parts) + "\n"
    )


def serve(*, port: int, address: str, headless: bool) -> int:
    """Run the app until it is stopped; return Streamlit's exit code."""
    for package in ("streamlit", "plotly", "pandas"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError("the app", "app")
    command = [
        *(sys.executable, "-m", "app.serve", "run", str(Path(__file__).with_name("web.py"))),
        f"--server.port={port}",
        f"--server.address={address}",
        f"--server.headless={'true' if headless else 'false'}",
        *(["--browser.serverAddress=localhost"] if address in EVERYWHERE else []),
        *(f"--{name}={value}" for name, value in OPTIONS.items()),
    ]
    if os.name == "posix":  # one process: whoever stops us stops the server
        os.execv(sys.executable, command)
    try:
        return subprocess.call(command)
    except KeyboardInterrupt:
        return 0


def main() -> None:
    """Import what pages need, have the first answers made, and be `streamlit`."""
    from streamlit.web import cli

    from app import warm

    warm.first()
    gc.collect()
    gc.freeze()  # what is imported stays: no collection needs to look at it again
    gc.set_threshold(*SELDOM)
    threading.Thread(target=warm.others, daemon=True).start()
    cli.main(prog_name="streamlit")


if __name__ == "__main__":
    main()
