"""The server of the app: Streamlit, and beside it what needs no browser: previews, badges, pictures, reports.

`streamlit run app/web.py` finds `app` here; app/main.py alone is the same app without them.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from streamlit import file_util
from streamlit.starlette import App

from app import previews
from planner.errors import VramwiseError

HOUR = {"cache-control": "public, max-age=3600"}
UNKEPT = {"cache-control": "no-cache"}


@cache
def index_html() -> str:
    """Return the page that Streamlit answers every address with."""
    return (Path(file_util.get_static_dir()) / "index.html").read_text(encoding="utf-8")


def base_of(request: Request) -> str:
    """Return the address of the app as the reader has it, behind a proxy too; it ends in a slash."""
    headers = request.headers
    scheme = headers.get("x-forwarded-proto", request.url.scheme).split(",")[0].strip()
    host = headers.get("x-forwarded-host", headers.get("host", "")).split(",")[0].strip()
    return f"{'https' if scheme == 'https' else 'http'}://{host}/"


class LinkPreviews:
    """Answers the pages' addresses with Streamlit's own HTML and the tags of the link's run in it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a page, pass on everything else."""
        path = scope.get("path", "").rstrip("/") or "/"
        asked = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        if not asked or path not in previews.PAGES:
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        parameters = dict(request.query_params)
        found = await run_in_threadpool(previews.preview, path, parameters)
        base = base_of(request)
        query = f"?{request.url.query}" if request.url.query else ""
        address = base + path.lstrip("/") + query
        html = previews.with_preview(index_html(), found, base=base, address=address)
        await HTMLResponse(html, headers=UNKEPT)(scope, receive, send)


def _answer(
    make: Callable[[previews.Key], str | bytes], kind: str
) -> Callable[[Request], Response]:
    def endpoint(request: Request) -> Response:  # Starlette runs it in a thread
        key = previews.key_of("/", dict(request.query_params))
        try:
            return Response(make(key), media_type=kind, headers=HOUR)
        except VramwiseError as error:
            return PlainTextResponse(f"{error.message}\n", status_code=400)

    return endpoint


def _table(name: str) -> Callable[[previews.Key], str]:
    return lambda key: previews.TABLES[name](previews.planned(key)[1])


ROUTES = [
    Route("/preview.png", _answer(previews.png, "image/png")),
    Route("/badge.svg", _answer(previews.badge, "image/svg+xml")),
    Route("/report.html", _answer(previews.report, "text/html")),
    Route("/plan.csv", _answer(_table("plan.csv"), "text/csv")),
    Route("/plan.md", _answer(_table("plan.md"), "text/markdown")),
]
app = App(
    Path(__file__).with_name("main.py").resolve(),
    routes=ROUTES,
    middleware=[Middleware(LinkPreviews)],
)
