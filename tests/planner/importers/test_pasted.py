"""Text as people paste it, manifests, and what must be refused, hidden or asked for."""

import json
from pathlib import Path

import pytest

from planner.errors import UnsupportedError, UsageError, VramwiseError
from planner.importers import import_config, import_subject, looks_foreign
from planner.importers.pasted import decode, unwrap
from planner.importers.report import report_text

YAML = "model_name_or_path: Qwen/Qwen3-4B\nstage: sft\nfinetuning_type: lora\ncutoff_len: 333\n"
LINE = "trl sft --model_name_or_path Qwen/Qwen3-4B --max_length 333 --use_peft"


@pytest.mark.parametrize(
    "text",
    [
        f"```yaml\n{YAML}```\n",
        f"Here is my config:\n\n~~~\n{YAML}~~~\nIt fails.\n",
        f"```\n{YAML}",
        f"%%writefile /kaggle/working/c.yaml\n{YAML}",
        f"%%writefile -a c.yaml\n\n{YAML}",
        f"%%bash\n{LINE}\n",
        f"$ {LINE}\nsome output: 3\n",
        f"(venv) me@host:~/x$ {LINE}\n",
        "$ trl sft --model_name_or_path Qwen/Qwen3-4B \\\n>   --max_length 333 --use_peft\noutput\n",
        f"```bash\n{LINE}\n```\n\nand\n\n```text\nlog\n```\n",
        YAML.replace("\n", "\r\n"),
        "\ufeff" + YAML,
        ">>> from trl import SFTConfig, SFTTrainer\n>>> a = SFTConfig(max_length=333)\n>>> t = SFTTrainer(model='Qwen/Qwen3-4B', args=a)\n",
    ],
)
def test_what_is_pasted_is_read(text: str) -> None:
    assert import_config(text).run.recipe.context == 333


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"])
def test_encodings(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(YAML.replace("\n", "\r\n").encode(encoding))
    assert looks_foreign(path)
    assert import_config(path).run.recipe.context == 333
    assert decode("é\r\n".encode()) == "é\n"


def test_a_file_that_is_none_of_it_stays_as_it_is() -> None:
    for text in (YAML, "#!/bin/bash\nX=$1\necho $X\n", "a = 1\n"):
        assert unwrap(text) == text


POD = """apiVersion: v1
kind: Pod
spec:
  containers:
  - name: side
    image: busybox
  - name: server
    image: vllm/vllm-openai:v0.11.1
{0}
    env:
    - {{name: MODEL, value: Qwen/Qwen3-8B}}
    - {{name: HF_TOKEN, value: hf_abcdefghijklmnop}}
    resources:
      limits:
        nvidia.com/gpu: "2"
"""


@pytest.mark.parametrize(
    "command",
    [
        '    args: ["--model", "Qwen/Qwen3-8B", "--max-model-len", "333", "-tp", "2"]',
        '    command: ["vllm", "serve"]\n    args: ["$(MODEL)", "--max-model-len=333", "--tensor-parallel-size=2"]',
        '    command: ["sh", "-c"]\n    args:\n    - |\n      export X=1\n      vllm serve $MODEL --max-model-len 333 \\\n        --tensor-parallel-size 2',
        '    command: ["/bin/bash", "-c", "python3 -m vllm.entrypoints.openai.api_server --model ${MODEL} --max-model-len 333 -tp 2"]',
    ],
)
def test_a_pods_server(command: str, tmp_path: Path) -> None:
    path = tmp_path / "pod.yaml"
    path.write_text(POD.format(command), encoding="utf-8")
    found = import_subject(str(path))
    assert found is not None
    run = found.run
    assert (found.tool, found.version, run.model) == ("vllm", "0.11.1", "Qwen/Qwen3-8B")
    assert (run.recipe.context, run.machine.gpus) == (333, 2)
    assert "hf_abc" not in report_text(found) + str(found.to_dict())


def test_a_compose_file_with_variables() -> None:
    text = "services:\n  web:\n    image: nginx\n  llm:\n    image: vllm/vllm-openai:v0.9.2\n    command: --model ${MODEL:-Qwen/Qwen3-8B} --max-model-len ${LEN:-333}\n    deploy:\n      resources:\n        reservations:\n          devices:\n          - {driver: nvidia, count: 2, capabilities: [gpu]}\n"
    found = import_config(text)
    assert (found.run.model, found.run.recipe.context, found.version) == (
        "Qwen/Qwen3-8B",
        333,
        "0.9.2",
    )
    assert any("asks for 2 GPUs" in said for said in found.report.effects)


def test_an_unset_variable_of_a_compose_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "compose.yml"
    path.write_text(
        "services:\n  llm:\n    image: vllm/vllm-openai\n    command: [--model, '${MODEL_NAME}']\n",
        encoding="utf-8",
    )
    with pytest.raises(UsageError, match="variable MODEL_NAME is not set"):
        import_subject(str(path))


def test_sglang_behind_a_manifest_and_alone() -> None:
    line = "python3 -m sglang.launch_server --model-path Qwen/Qwen3-8B --context-length 333 --tp 2 --mem-fraction-static 0.7 --disable-cuda-graph"
    found = import_config(line + "\n")
    engine = found.run.recipe.engine
    assert (found.tool, found.run.recipe.context, engine.tensor_parallel) == ("sglang", 333, 2)
    assert (engine.gpu_memory_utilization, engine.cuda_graphs) == (0.7, False)
    text = f"apiVersion: v1\nkind: Pod\nspec:\n  containers:\n  - image: lmsysorg/sglang:v0.5.3-cu126\n    command: [{', '.join(line.split())}]\n"
    assert import_config(text).version == "0.5.3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("apiVersion: v1\nspec:\n  x: {{ .Values.model }}\n", "Helm template"),
        ("{{- if .Values.on }}\nimage: vllm\n{{- end }}\n", "Helm template"),
        ("apiVersion: v1\nkind: Pod\nspec:\n  containers:\n  - image: nginx\n", "no container"),
        ("base_model: x\nproject_name: y\nparams: {lr: 1}\n", "AutoTrain"),
        ("[a]\nb = 1979-05-27T07:32:00Z\n[c]\nd = 2\n", "TOML file is of no tool"),
    ],
)
def test_what_is_refused_says_why(text: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        import_config(text)


def test_a_helm_template_in_a_file_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text("apiVersion: v1\nspec:\n  x: {{ .Values.model }}\n", encoding="utf-8")
    with pytest.raises(UnsupportedError, match="Helm") as caught:
        import_subject(str(path))
    assert "helm template" in (caught.value.hint or "")


def test_an_alias_bomb_in_a_manifest_is_refused() -> None:
    lines = ["apiVersion: v1", "a0: &a0 [z, z, z, z, z, z, z, z, z]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    with pytest.raises(VramwiseError, match="aliases"):
        import_config("\n".join(lines))


def test_toml_with_dates_and_a_broken_one(tmp_path: Path) -> None:
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 64\nwhen = 2024-01-01\n'
    assert import_config(text).run.recipe.context == 64
    path = tmp_path / "t.toml"
    path.write_text("[model\nx = 1\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"toml: .*line 1"):
        import_config(path)


def test_two_documents_are_said() -> None:
    found = import_config(f"{YAML}---\n{YAML.replace('333', '444')}")
    assert found.run.recipe.context == 333
    assert any("2 documents" in said for said in found.report.effects)


@pytest.mark.parametrize(
    "line",
    [
        "hub_token: hf_abcdefghijklmnopqrst",
        "some_odd_key: hf_abcdefghijklmnopqrst",
        "wandb_api_key: 0123456789abcdef0123456789abcdef01234567",
        "my_password: abcdefghijklm",
        "odd_url: https://me:abcdefghijklm@host/x",
    ],
)
def test_secrets_are_never_printed(line: str) -> None:
    found = import_config(f"{YAML}{line}\n")
    printed = report_text(found) + str(found.to_dict())
    assert "abcdefghijkl" not in printed
    assert "0123456789abcdef0" not in printed


def test_an_unknown_key_is_reported_and_marked_if_it_speaks_of_memory() -> None:
    found = import_config(f"{YAML}fancy_new_offload: true\nodd_word: 3\nlearning_rate: 1.0\n")
    rows = {row.key: row.effect for row in found.report.not_understood}
    assert set(rows) == {"fancy_new_offload", "odd_word"}
    assert "may move memory" in rows["fancy_new_offload"]
    assert rows["odd_word"] == "unknown"


LF_DICT = "import json\nargs = dict(stage='sft', model_name_or_path='Qwen/Qwen3-4B', finetuning_type='lora', cutoff_len=333)\njson.dump(args, open('t.json', 'w'))\n!llamafactory-cli train t.json"


@pytest.mark.parametrize(
    "cells",
    [
        [f"%%bash\n{LINE}"],
        ["%%bash\ntrl sft --model_name_or_path Qwen/Qwen3-4B \\\n --max_length 333 --use_peft"],
        ["!trl sft --model_name_or_path Qwen/Qwen3-4B \\\n  --max_length 333 --use_peft"],
        [f"%%writefile c.yaml\n{YAML}", "!llamafactory-cli train c.yaml"],
        ["%pip install x", LF_DICT],
    ],
)
def test_cells_of_a_notebook(cells: list[str]) -> None:
    document = {"cells": [{"cell_type": "code", "source": cell} for cell in cells]}
    assert import_config(json.dumps(document) + "\n").run.recipe.context == 333


def test_a_ray_services_engine() -> None:
    text = "apiVersion: ray.io/v1\nkind: RayService\nspec:\n  serveConfigV2: |\n    applications:\n    - args:\n        llm_configs:\n        - model_loading_config: {model_id: q, model_source: Qwen/Qwen3-8B}\n          engine_kwargs: {tensor_parallel_size: 2, max_model_len: 333}\n"
    run = import_config(text).run
    assert (run.model, run.recipe.context, run.machine.gpus) == ("Qwen/Qwen3-8B", 333, 2)
