"""Starts Streamlit on app/main.py in a process of its own."""

import importlib.util
import subprocess
import sys
from pathlib import Path

from planner.errors import MissingExtraError

MAX_UPLOAD_MIB = 200


def serve(*, port: int, address: str, headless: bool) -> int:
    """Run the app until it is stopped; return Streamlit's exit code."""
    for package in ("streamlit", "plotly", "pandas"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError("the app", "app")
    command = [
        *(sys.executable, "-m", "streamlit", "run", str(Path(__file__).with_name("main.py"))),
        f"--server.port={port}",
        f"--server.address={address}",
        f"--server.headless={'true' if headless else 'false'}",
        f"--server.maxUploadSize={MAX_UPLOAD_MIB}",
        "--browser.gatherUsageStats=false",
    ]
    try:
        return subprocess.call(command)
    except KeyboardInterrupt:
        return 0
