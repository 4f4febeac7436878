"""Finding models: local folders and files, and a hub that answers, is gated, down, slow or offline.

The hub is a real HTTP server on 127.0.0.1 that speaks as much of the hub's protocol as it takes.
"""

import json
import os
import re
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from planner.errors import UnknownNameError, UsageError, VramwiseError
from planner.models.catalogue import load_catalogue
from planner.models.hub import find_model
from planner.models.hub_remote import fetch_model
from planner.models.safetensors_header import checkpoint_dtype, read_header

CONFIG = dict(load_catalogue()["qwen2.5-0.5b"]["config"])
COMMIT = "a" * 40


def safetensors_bytes(dtype: str = "BF16") -> bytes:
    header = {"w": {"dtype": dtype, "shape": [4, 2], "data_offsets": [0, 16]}}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(16)


class Hub(BaseHTTPRequestHandler):
    """A stand-in hub: the repository's name says how it behaves."""

    seen: list[tuple[str, str]] = []

    def log_message(self, *args: Any) -> None:
        """Stay silent."""

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        Hub.seen.append((self.path, self.headers.get("authorization", "")))
        repo = self.path.split("?")[0].removeprefix("/api/models").strip("/").split("/resolve/")[0]
        name = repo.split("/")[1] if "/" in repo else repo
        if name == "gated" and "good-token" not in self.headers.get("authorization", ""):
            return self.fail(403, "GatedRepo")
        if name == "absent":
            return self.fail(404, "RepoNotFound")
        if name == "broken":
            return self.fail(500, "")
        if name == "crowded":
            return self.fail(429, "")
        if "bad-token" in self.headers.get("authorization", ""):
            return self.fail(401, "", "Invalid credentials in Authorization header")
        if name == "no-config":
            return self.fail(404, "EntryNotFound")
        if name == "slow":
            time.sleep(4)
        if "/resolve/nowhere/" in self.path:
            return self.fail(404, "RevisionNotFound")
        if self.path.startswith("/api/models"):
            return self.send(self.listing(repo), with_body, "application/json")
        if "model.safetensors" in self.path:
            if "index.json" in self.path:
                return self.fail(404, "EntryNotFound")
            return self.send(safetensors_bytes(), with_body, "application/octet-stream")
        config = dict(CONFIG)
        if name == "no-dtype":
            config.pop("torch_dtype")
        body = {"truncated": b'{"model_type": "qw', "list": b"[1]"}.get(
            name, json.dumps(config).encode()
        )
        if name == "huge":
            return self.send(b"", with_body, "application/json", length=100_000_000)
        return self.send(body, with_body, "application/json")

    def listing(self, repo: str) -> bytes:
        files = [{"rfilename": name} for name in ("config.json", "model.safetensors")]
        return json.dumps({"id": repo, "sha": COMMIT, "siblings": files}).encode()

    def send(self, body: bytes, with_body: bool, kind: str, length: int | None = None) -> None:
        wanted = self.headers.get("range")
        status = 200
        if wanted and with_body:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            body, status = body[int(first) : int(last) + 1 if last else None], 206
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body) if length is None else length))
        self.send_header("etag", f'"{COMMIT}"')
        self.send_header("x-repo-commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def fail(self, status: int, code: str, message: str = "") -> None:
        self.send_response(status)
        if message:
            self.send_header("x-error-message", message)
        if code:
            self.send_header("x-error-code", code)
        self.send_header("content-length", "0")
        self.end_headers()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    Hub.seen.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_model_of_the_hub(hub: str) -> None:
    spec = fetch_model("org/plain", endpoint=hub)
    assert spec.parameters == 494032768
    assert (spec.hub_id, spec.source) == ("org/plain", "hub org/plain")
    assert spec.checkpoint_dtype == "bf16"
    assert not any("safetensors" in path for path, _ in Hub.seen), "the config names the dtype"


def test_the_dtype_comes_from_the_safetensors_header(hub: str) -> None:
    assert fetch_model("org/no-dtype", endpoint=hub).checkpoint_dtype == "bf16"


def test_revision_and_token_are_sent(hub: str) -> None:
    spec = fetch_model("org/gated", revision="v2", token="good-token", endpoint=hub)
    assert spec.source == "hub org/gated@v2"
    assert any("/resolve/v2/config.json" in path for path, _ in Hub.seen)
    assert any(token == "Bearer good-token" for _, token in Hub.seen)


@pytest.mark.parametrize(
    ("repo", "kind", "said"),
    [
        ("org/gated", UsageError, "gated"),
        ("org/absent", UnknownNameError, "unknown model"),
        ("org/broken", VramwiseError, "answered 500"),
        ("org/no-config", UsageError, r"has no config\.json"),
        ("org/truncated", UsageError, "not valid JSON"),
        ("org/list", UsageError, "expected an object"),
        ("org/huge", UsageError, "100000000 bytes is too large"),
    ],
)
def test_every_failure_is_one_line(hub: str, repo: str, kind: type, said: str) -> None:
    with pytest.raises(kind, match=said) as caught:
        fetch_model(repo, endpoint=hub)
    assert "\n" not in str(caught.value)
    assert caught.value.hint


CALLS = """
import json, os, sys
from app.cli import main
for repo, *token in json.loads(sys.argv[1]):
    code = main(["plan", repo, "--gpu", "rtx-4090", *(["--token", *token] if token else [])])
    print(f"exit {code}", file=sys.stderr, flush=True)
"""


def test_the_command_line_says_what_to_do_in_one_line(hub: str, tmp_path: Path) -> None:
    """The whole way, as a user goes it: HF_ENDPOINT names the stand-in."""
    calls = [["org/gated"], ["org/gated", "good-token"], ["org/plain", "bad-token"], ["org/crowded"],
             ["org/broken"], ["org/absent"]]  # fmt: skip
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CALLS, json.dumps(calls)],
        env=env, cwd=Path(__file__).parents[2], check=True, capture_output=True, text=True,
    )  # fmt: skip
    said = re.split(r"exit (\d+)\n", done.stderr)
    errors, codes = said[:-1:2], [int(code) for code in said[1::2]]
    assert codes == [2, 0, 1, 1, 1, 2]
    for text, wanted in zip(
        errors,
        [
            "accept the licence on the model's page, then pass --token or set HF_TOKEN",
            "",
            "another token by --token or HF_TOKEN",
            "with --token or HF_TOKEN more are allowed",
            "answered 500",
            "private and needs --token",
        ],
        strict=True,
    ):
        assert wanted in text
        assert len(text.strip().splitlines()) <= 2, text  # the error and its hint
        assert "Traceback" not in text


def test_an_unknown_revision(hub: str) -> None:
    with pytest.raises(UsageError, match="no such revision"):
        fetch_model("org/plain", revision="nowhere", endpoint=hub)


def test_a_slow_hub_is_given_up(hub: str) -> None:
    with pytest.raises(VramwiseError, match=r"did not answer.*within 0\.5 s"):
        fetch_model("org/slow", endpoint=hub, timeout_s=0.5)


def test_a_hub_that_is_down() -> None:
    with pytest.raises(VramwiseError, match="cannot be") as caught:
        fetch_model("org/plain", endpoint="http://127.0.0.1:9", offline=False, timeout_s=5)
    assert caught.value.exit_code == 1


def test_offline_uses_the_cache(hub: str) -> None:
    with pytest.raises(VramwiseError, match="not in the local cache"):
        fetch_model("org/plain", endpoint=hub, offline=True)
    fetch_model("org/plain", endpoint=hub)
    asked = len(Hub.seen)
    assert fetch_model("org/plain", endpoint=hub, offline=True).parameters == 494032768
    assert len(Hub.seen) == asked, "offline asks nobody"


def test_offline_from_the_front_door() -> None:
    with pytest.raises(VramwiseError, match="not in the local cache"):
        find_model("someone/not-in-any-cache", offline=True)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_a_bad_timeout(timeout_s: float) -> None:
    with pytest.raises(UsageError, match="timeout"):
        fetch_model("org/plain", timeout_s=timeout_s)


def test_a_local_folder(tmp_path: Path) -> None:
    config = {**CONFIG}
    config.pop("torch_dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = find_model(str(tmp_path))
    assert (spec.parameters, spec.checkpoint_dtype) == (494032768, "fp32")
    assert spec.name == tmp_path.name
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes("F16"))
    assert find_model(str(tmp_path)).checkpoint_dtype == "fp16"
    assert find_model(str(tmp_path / "config.json")).checkpoint_dtype == "fp16"


def test_a_safetensors_header(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    file.write_bytes(safetensors_bytes("F32"))
    assert checkpoint_dtype(read_header(file)) == "fp32"
    for content in (
        b"",
        b"\xff" * 40,
        struct.pack("<Q", 5) + b"{{{{{",
        struct.pack("<Q", 2) + b"[]",
    ):
        file.write_bytes(content)
        with pytest.raises(UsageError, match="safetensors"):
            read_header(file)
