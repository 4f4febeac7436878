"""Fifty people open the app at once and change a setting: errors and waiting times.

Each session is a real websocket to a server started here on 127.0.0.1: it opens page 1, waits
for the script to end, then changes the context a few times. Bounded in number and time.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.browser.driving import running_app  # noqa: E402

SESSIONS = 50
MAX_SESSIONS = 200
CHANGES = 3
LIMIT_S = 240


async def one_session(address: str, number: int, pause_s: float) -> dict[str, Any]:
    """Open the page and change the context; return seconds of the first page and of each change."""
    import websockets

    url = address.replace("http", "ws") + "/_stcore/stream"
    result: dict[str, Any] = {"first_s": None, "changes_s": [], "errors": []}
    try:
        async with websockets.connect(url, subprotocols=["streamlit"], max_size=2**25) as socket:  # type: ignore[list-item]
            page = _Page(socket)
            start = time.perf_counter()
            await page.rerun({})
            await page.finished()
            result["first_s"] = time.perf_counter() - start
            for change in range(CHANGES):
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
                start = time.perf_counter()
                await page.rerun({"context": 2048 + 8 * number + change})
                await page.finished()
                result["changes_s"].append(time.perf_counter() - start)
            result["errors"] = page.errors
    except Exception as error:  # every failure of a session is a figure of the benchmark
        result["errors"].append(f"{type(error).__name__}: {error}"[:200])
    return result


class _Page:
    """One browser tab: sends reruns with widget values, reads until the script has ended."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.widgets: dict[str, str] = {}
        self.errors: list[str] = []

    async def rerun(self, numbers: dict[str, int]) -> None:
        """Ask for a run with new values of number inputs, by key."""
        from streamlit.proto.BackMsg_pb2 import BackMsg

        message = BackMsg()
        message.rerun_script.query_string = ""
        for key, value in numbers.items():
            state = message.rerun_script.widget_states.widgets.add()
            state.id, state.double_value = self.widgets[key], value
        await self.socket.send(message.SerializeToString())

    async def finished(self) -> None:
        """Read until the script has ended; remember number inputs and errors on the way."""
        from streamlit.proto.ForwardMsg_pb2 import ForwardMsg

        while True:
            message = ForwardMsg()
            message.ParseFromString(await self.socket.recv())
            kind = message.WhichOneof("type")
            if kind == "delta":
                self._element(message.delta.new_element)
            elif kind == "script_finished":
                return

    def _element(self, element: Any) -> None:
        kind = element.WhichOneof("type")
        if kind == "number_input":
            key = element.number_input.id.rsplit("-", 1)[-1]
            self.widgets[key] = element.number_input.id
        elif kind == "exception":
            self.errors.append(element.exception.message[:200])


async def load(address: str, sessions: int, pause_s: float) -> list[dict[str, Any]]:
    """Run all sessions at once."""
    jobs = [one_session(address, number, pause_s) for number in range(sessions)]
    return await asyncio.wait_for(asyncio.gather(*jobs), timeout=LIMIT_S)


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the report."""
    first = sorted(r["first_s"] for r in results if r["first_s"] is not None)
    changes = sorted(value for r in results for value in r["changes_s"])
    errors = [error for r in results for error in r["errors"]]
    return {
        "schema_version": 1,
        "sessions": len(results),
        "errors": len(errors),
        "changes": len(changes),
        "p50_s": _at(changes, 0.5),
        "p95_s": _at(changes, 0.95),
        "first_page_p50_s": _at(first, 0.5),
        "first_page_p95_s": _at(first, 0.95),
        "messages": errors[:5],
    }


def _at(values: list[float], share: float) -> float | None:
    return round(values[min(len(values) - 1, int(share * len(values)))], 3) if values else None


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    parser.add_argument("--pause", type=float, default=5.0, help="mean seconds between changes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sessions = max(1, min(options.sessions, MAX_SESSIONS))
    with running_app() as address:
        alone = summary(asyncio.run(load(address, 1, 0.2)))
        alone = summary(asyncio.run(load(address, 1, 0.2)))
        found = summary(asyncio.run(load(address, sessions, options.pause)))
    found["alone_p50_s"], found["alone_first_page_s"] = alone["p50_s"], alone["first_page_p50_s"]
    if options.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:20} {value}")
    return int(found["errors"] > 0)


if __name__ == "__main__":
    sys.exit(main())
