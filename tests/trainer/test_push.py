"""Pushing to the hub: huggingface_hub against a server of the hub's own addresses; a run never ends from it."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from planner.errors import UsageError
from trainer.config import parse_run


class Hub(BaseHTTPRequestHandler):
    """Repositories in memory, over the calls that huggingface_hub makes without its Xet client."""

    def log_message(self, *args): ...

    def answer(self, document, status=200):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        hub = self.server
        hub.calls.append(self.path)
        status = next((code for part, code in hub.refuse.items() if part in self.path), None)
        if status is None and self.headers.get("Authorization") != "Bearer hf_good":
            status = 401
        if status is not None:
            self.answer({"error": "no"}, status)
        elif self.path == "/api/repos/create":
            asked = json.loads(data)
            hub.made.append(asked)
            name = f"{asked['organization'] or 'somebody'}/{asked['name']}"
            self.answer({"url": f"{hub.url}/{name}", "name": name})
        elif "/preupload/" in self.path:
            files = json.loads(data)["files"]
            modes = {True: "lfs", False: "regular"}
            self.answer(
                {"files": [
                    {"path": f["path"], "uploadMode": modes["safetensors" in f["path"]], "shouldIgnore": False}
                    for f in files
                ]}
            )  # fmt: skip
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{hub.url}/blob/{each['oid']}"}}}
                for each in json.loads(data)["objects"]
            ]
            self.answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            lines = [json.loads(line) for line in data.splitlines()]
            hub.commits.append(lines)
            name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            self.answer({"commitUrl": f"{hub.url}/{name}/commit/1", "commitOid": "1"})
        else:
            self.answer({"errors": [], "warnings": []})

    def do_PUT(self):
        self.server.blobs[self.path.rpartition("/")[2]] = self.rfile.read(
            int(self.headers["Content-Length"])
        )
        self.answer({})

    def do_GET(self):
        self.server.calls.append(self.path)
        self.answer({"error": "no"}, 404)


@pytest.fixture
def hub(monkeypatch):
    """Serve a hub, and have huggingface_hub use it with a good token."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.made, server.commits, server.calls = [], [], []
    server.blobs, server.refuse = {}, {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)  # between its attempts
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def sft(document, tmp_path):
    """Return a function that makes an SFT run document."""
    rows = [{"prompt": f"{n}+{n}=", "completion": f"{2 * n:>4}"} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows[:16])), encoding="utf-8")
    (tmp_path / "held.jsonl").write_text("\n".join(map(json.dumps, rows[16:])), encoding="utf-8")

    def make(**train):
        made = document(
            recipe={"task": "sft", "context": 24, "micro_batch_size": 4},
            train={"rewards": [], "save_every": 0, **train},
        )
        for key in ("num_generations", "prompt_length", "completion_length"):
            del made["recipe"][key]
        made["train"]["dataset"] = {"name": str(tmp_path / "rows.jsonl")}
        return made

    return make


def committed(lines):
    """Return path -> content of a commit's regular files, and path -> oid of its large ones."""
    regular = {
        line["value"]["path"]: base64.b64decode(line["value"]["content"]).decode()
        for line in lines
        if line["key"] == "file"
    }
    large = {
        line["value"]["path"]: line["value"]["oid"] for line in lines if line["key"] == "lfsFile"
    }
    return regular, large


def test_a_run_is_pushed_with_a_card(hub, sft, train_run_of, tmp_path):
    said = []
    made = sft(push_to_hub={"repo": "me/sums", "private": True}, validation="held.jsonl")
    train_run_of(made, say=said.append)
    assert [(m["name"], m["organization"], m["visibility"]) for m in hub.made] == [
        ("sums", "me", "private")
    ]
    (lines,) = hub.commits
    assert lines[0]["value"]["summary"] == "Step 2"
    regular, large = committed(lines)
    assert set(regular) == {"README.md", "adapter_config.json"}
    saved = tmp_path / "out" / "checkpoints" / "step-00000002" / "adapter_model.safetensors"
    assert hub.blobs[large["adapter_model.safetensors"]] == saved.read_bytes()
    matter = yaml.safe_load(regular["README.md"].split("---")[1])
    assert (matter["library_name"], matter["tags"]) == ("peft", ["vramwise", "sft", "lora"])
    card = regular["README.md"]
    assert "trained by SFT on rows.jsonl for 2 steps" in card
    assert "lr: 0.001" in card
    assert "| phase | planned | resident |" in card
    assert "| backward | " in card
    assert "| perplexity | " in card
    assert str(tmp_path) not in card, "where files lie on this machine is nobody's business"
    assert said[-1] == f"pushed to {hub.url}/me/sums"
    assert not (tmp_path / "out" / ".push").exists()


def test_every_save_pushes_while_the_run_goes_on(hub, sft, train_run_of):
    made = sft(push_to_hub={"repo": "sums", "strategy": "every_save"}, steps=3, save_every=2)
    train_run_of(made)
    assert [lines[0]["value"]["summary"] for lines in hub.commits] == ["Step 2", "Step 3"]


@pytest.mark.parametrize(
    ("refuse", "said"),
    [
        ({"/repos/create": 401}, "the token is not accepted (HTTP 401)"),
        ({"/repos/create": 403}, "the token may not write there (HTTP 403)"),
        ({"/commit/": 500}, "the hub failed (HTTP 500)"),
        ("no server", "no connection: "),
        ("no token", "no token: set HF_TOKEN, give --token, or log in with hf auth login"),
        ("offline", "HF_HUB_OFFLINE is set"),
    ],
)
def test_what_fails_is_one_line_and_can_be_pushed_later(
    refuse, said, hub, sft, train_run_of, tmp_path, monkeypatch
):
    if refuse == "no server":
        hub.shutdown()
        hub.server_close()
    elif refuse == "no token":
        monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    elif refuse == "offline":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    else:
        hub.refuse.update(refuse)
    lines = []
    result = train_run_of(sft(push_to_hub="me/sums", steps=1), say=lines.append)
    assert result.steps == 1
    told = [line for line in lines if line.startswith("push_to_hub: not pushed")]
    assert len(told) == 1
    assert said in told[0]
    assert told[0].endswith(f"later: vramwise push {tmp_path / 'out'}")
    assert "\n" not in told[0]


def test_push_later_merged_to_another_repository(hub, sft, train_run_of, tmp_path):
    from typer.testing import CliRunner

    from app.cli import app

    train_run_of(sft(steps=1))
    out = tmp_path / "out"
    asked = ["push", str(out), "--repo", "me/whole", "--merged", "--public", "--json"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {
        "schema_version": 1, "repo": "me/whole", "url": f"{hub.url}/me/whole"
    }  # fmt: skip
    regular, large = committed(hub.commits[0])
    assert "tokenizer_config.json" in regular
    assert list(large) == ["model.safetensors"]
    assert "library_name: transformers" in regular["README.md"]
    from trainer.push import push_again

    with pytest.raises(UsageError, match="no repository"):
        push_again(out, repo=None, private=None, merged=None)


@pytest.mark.parametrize(
    ("section", "recipe", "message"),
    [
        ({"repo": "me/sums/x"}, {}, "push_to_hub.repo"),
        ({"repo": "me/sums", "merged": True, "strategy": "every_save"}, {}, "merge at every"),
        ({"repo": "me/sums", "merged": True}, {"method": "full"}, "no effect with method full"),
        ({"repo": "me/sums", "token": "hf_x"}, {}, "token"),
        ({"repo": "me/sums", "strategy": "all"}, {}, "push_to_hub.strategy"),
    ],
)
def test_sections_are_refused_by_name(section, recipe, message, sft, tmp_path):
    made = sft(push_to_hub=section)
    made["recipe"] |= recipe
    if recipe:
        del made["recipe"]["lora"]
    with pytest.raises(UsageError, match=message):
        parse_run(made, root=tmp_path)
