"""Files people bring: taken when good, one clear sentence when not, never executed or kept."""

import json
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

import app.runs
from planner.models.catalogue import load_catalogue
from planner.plan import plan
from planner.units import format_bytes

MAIN = Path(app.runs.__file__).with_name("main.py")
AXOLOTL = b"""base_model: NousResearch/Meta-Llama-3-8B
load_in_4bit: true
adapter: qlora
sequence_len: 4096
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
lora_r: 32
lora_target_linear: true
optimizer: paged_adamw_32bit
bf16: auto
gradient_checkpointing: true
"""
RUN = b"""schema_version: 1
model: qwen2.5-3b
recipe:
  task: grpo
  method: lora
  prompt_length: 300
  completion_length: 700
  lora: {rank: 8, targets: [q_proj, v_proj]}
machine: {vram: 12GiB, host_ram: 32GiB}
"""


def upload(name: str, content: bytes) -> AppTest:
    at = AppTest.from_file(str(MAIN), default_timeout=60).run()
    at.file_uploader(key="config_file").upload(name, content)
    at.run()
    assert not at.exception
    return at


def test_a_models_config_becomes_the_model() -> None:
    config = load_catalogue()["qwen2.5-0.5b"]["config"]
    at = upload("config.json", json.dumps(config).encode())
    expected = app.runs.run_of({**app.runs.DEFAULTS, "model": "qwen2.5-0.5b"}).model.parameters
    assert f"{expected:,}" in at.info[0].value
    run = app.runs.run_of({**app.runs.DEFAULTS, "model": "qwen2.5-0.5b"})
    peak = plan(run.model, run.recipe, run.machine).peak_bytes
    assert at.metric[0].value == format_bytes(peak)
    at.button(key="forget_model").click().run()
    assert at.selectbox(key="model").value == app.runs.DEFAULT_MODEL


def test_a_run_file_fills_everything_in() -> None:
    at = upload("run.yaml", RUN)
    state = at.session_state
    assert (state["model"], state["method"], state["rank"]) == ("qwen2.5-3b", "lora", 8)
    assert (state["context"], state["prompt"], state["targets"]) == (1000, 300, "q_proj,v_proj")
    assert (state["gpu"], state["vram"], state["ram"]) == ("own size", 12.0, 32.0)


def test_another_tools_config_fills_everything_in_and_says_how() -> None:
    at = upload("config.yml", AXOLOTL)
    state = at.session_state
    assert "axolotl" in at.info[0].value
    assert (state["framework"], state["task"], state["method"]) == ("axolotl", "sft", "qlora")
    assert (state["context"], state["batch"], state["rank"]) == (4096, 2, 32)
    assert state["model"] == "llama-3-8b"
    assert any("sequence_len" in text.value for text in at.text)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"[1, 2]"),
        ("config.json", b'{"architectures": ["X"], "model_type": "nope"}'),
        ("config.json", b'{"a":' * 20_000),
        ("run.yaml", b"schema_version: 1\nmodel: x\nrecipe: {task: dance}\n"),
        ("run.yaml", b"a: &a [1]\nb: [*a, *a]\nrecipe: *a\n"),
        (
            "bomb.yaml",
            b"a: &a [x]\n" + b"".join(b"b%d: &b%d [*a, *a]\n" % (i, i) for i in range(99)),
        ),
        ("x.py", b"import os\nos.system('touch /tmp/vramwise-was-here')\n"),
        ("x.ipynb", b"not json"),
        ("x.txt", b"/etc/passwd"),
        ("x.txt", b"\x80\x04\x95"),
        ("x.sh", b"rm -rf / # vllm"),
        ("empty.yaml", b""),
    ],
)
def test_bad_files_are_one_sentence(name: str, content: bytes) -> None:
    at = upload(name, content)
    assert at.error, name
    assert "Traceback" not in at.error[0].value
    assert not Path("/tmp/vramwise-was-here").exists()
    assert at.metric[0].label == "Peak"
