"""Fifty people open the app at once and change a setting: errors, waiting times, CPU and memory.

Each session is a real websocket to a server started here on 127.0.0.1: it opens a page, each
session another one, waits for the script to end, then changes the context of "Will it fit?" a few
times, to lengths that nobody else asks for. Bounded in number and time.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.browser.driving import PAGES, running_app  # noqa: E402

SESSIONS = 50
MAX_SESSIONS = 200
CHANGES = 3
LIMIT_S = 240
WARM_LIMIT_S = 400
FIT = ""


async def one_session(address: str, page: str, number: int, pause_s: float) -> dict[str, Any]:
    """Open a page, then change the context; return seconds of the first view and of each change."""
    import websockets

    url = address.replace("http", "ws") + "/_stcore/stream"
    result: dict[str, Any] = {"page": page, "first_s": None, "changes_s": [], "errors": []}
    try:
        async with websockets.connect(url, subprotocols=["streamlit"], max_size=2**25) as socket:  # type: ignore[list-item]
            tab = _Tab(socket)
            start = time.perf_counter()
            await tab.rerun(page, {})
            await tab.finished()
            result["first_s"] = time.perf_counter() - start
            if page != FIT:
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
                await tab.rerun(FIT, {})
                await tab.finished()
            for change in range(CHANGES):
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
                start = time.perf_counter()
                await tab.rerun(FIT, {"context": 2048 + 8 * number + change})
                await tab.finished()
                result["changes_s"].append(time.perf_counter() - start)
            result["errors"] = tab.errors
    except Exception as error:  # every failure of a session is a figure of the benchmark
        result["errors"].append(f"{type(error).__name__}: {error}"[:200])
    return result


class _Tab:
    """One browser tab: sends reruns with widget values, reads until the script has ended."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.widgets: dict[str, str] = {}
        self.errors: list[str] = []

    async def rerun(self, page: str, numbers: dict[str, int]) -> None:
        """Ask for a run of a page with new values of number inputs, by key."""
        from streamlit.proto.BackMsg_pb2 import BackMsg

        message = BackMsg()
        message.rerun_script.query_string = ""
        message.rerun_script.page_name = page
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


async def load(
    address: str, sessions: int, pause_s: float, *, pages: tuple[str, ...] = PAGES, first: int = 0
) -> list[dict[str, Any]]:
    """Run all sessions at once, on one page after the other."""
    jobs = [
        one_session(address, pages[number % len(pages)], first + number, pause_s)
        for number in range(sessions)
    ]
    return await asyncio.wait_for(asyncio.gather(*jobs), timeout=LIMIT_S)


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the report."""
    first = sorted(r["first_s"] for r in results if r["first_s"] is not None)
    changes = sorted(value for r in results for value in r["changes_s"])
    errors = [error for r in results for error in r["errors"]]
    by_page = {
        page or "will_it_fit": _at(
            sorted(r["first_s"] for r in results if r["page"] == page and r["first_s"]), 0.95
        )
        for page in dict.fromkeys(r["page"] for r in results)
    }
    return {
        "schema_version": 1,
        "sessions": len(results),
        "errors": len(errors),
        "changes": len(changes),
        "p50_s": _at(changes, 0.5),
        "p95_s": _at(changes, 0.95),
        "first_page_p50_s": _at(first, 0.5),
        "first_page_p95_s": _at(first, 0.95),
        "first_page_p95_s_by_page": by_page,
        "messages": errors[:5],
    }


def _at(values: list[float], share: float) -> float | None:
    return round(values[min(len(values) - 1, int(share * len(values)))], 3) if values else None


class Server:
    """CPU seconds and memory of the app's process and its workers."""

    def __init__(self, pid: int) -> None:
        import psutil

        self.process = psutil.Process(pid)

    def _all(self) -> list[Any]:
        return [self.process, *self.process.children(recursive=True)]

    def cpu_s(self) -> float:
        """Return CPU seconds so far."""
        times = [each.cpu_times() for each in self._all()]
        return float(sum(each.user + each.system for each in times))

    def memory_mib(self) -> float:
        """Return resident memory now."""
        return round(sum(each.memory_info().rss for each in self._all()) / 2**20, 1)

    def wait_until_idle(self) -> None:
        """Wait until what is made ahead is made: a second in which next to nothing is computed."""
        for _ in range(WARM_LIMIT_S):
            before = self.cpu_s()
            time.sleep(1)
            if self.cpu_s() - before < 0.05:
                return


def measure(sessions: int, pause_s: float) -> dict[str, Any]:
    """Start the app and return all figures, with what else the machine did (its load before)."""
    seen: list[int] = []
    load_before = os.getloadavg()[0]
    with running_app(warm="1", seen=seen) as address:
        server = Server(seen[0])
        cold = summary(asyncio.run(load(address, 1, 0.2, pages=(FIT,))))
        server.wait_until_idle()
        asyncio.run(load(address, len(PAGES), 0.2, first=1000))
        before = server.cpu_s()
        alone = summary(asyncio.run(load(address, 1, 0.2, pages=(FIT,), first=2000)))
        alone_cpu = server.cpu_s() - before
        before = server.cpu_s()
        found = summary(asyncio.run(load(address, sessions, pause_s)))
        views = sessions * (1 + CHANGES) + sum(1 for n in range(sessions) if PAGES[n % len(PAGES)])
        found["cpu_ms_per_view"] = round(1000 * (server.cpu_s() - before) / views, 1)
        found["memory_mib"] = server.memory_mib()
    found["load_average_before"] = round(load_before, 2)
    found["cold_first_page_s"] = cold["first_page_p50_s"]
    found["alone_p50_s"], found["alone_first_page_s"] = alone["p50_s"], alone["first_page_p50_s"]
    found["alone_cpu_ms_per_view"] = round(1000 * alone_cpu / (1 + CHANGES), 1)
    return found


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    parser.add_argument("--pause", type=float, default=5.0, help="mean seconds between changes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(max(1, min(options.sessions, MAX_SESSIONS)), options.pause)
    if options.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:24} {value}")
    return int(found["errors"] > 0)


if __name__ == "__main__":
    sys.exit(main())
