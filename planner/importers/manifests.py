"""Kubernetes manifests and docker-compose files -> the server command of their container."""

import re
import shlex
from typing import Any

from planner.errors import UnsupportedError, UsageError
from planner.importers.context import Context
from planner.importers.loading import load_yaml, load_yaml_all
from planner.importers.settings import Imported, as_int
from planner.importers.shell import Script, expand, parse_shell

_SERVER = re.compile(r"vllm|sglang", re.IGNORECASE)
_ENTRY = {"vllm": "vllm serve", "sglang": "python3 -m sglang.launch_server"}
"""What an image starts where the manifest only gives arguments."""
_TEMPLATE = re.compile(
    r"\{\{-?\s*(?:\.Values|\.Release|include|toYaml|if|range|with|template|end)\b"
)


def is_manifest(text: str) -> bool:
    """Return whether a YAML text is a manifest or a compose file, or a template of one."""
    return bool(
        re.search(r"^apiVersion:\s*\S", text, re.MULTILINE)
        or (
            re.search(r"^services:\s*$", text, re.MULTILINE)
            and re.search(r"^\s+image:", text, re.MULTILINE)
        )
    )


def refuse_template(text: str) -> None:
    """Raise for a Helm template: its values are in another file."""
    if _TEMPLATE.search(text):
        raise UnsupportedError(
            "config: this is a Helm template, whose values are elsewhere",
            hint="render it first: helm template CHART -f values.yaml > rendered.yaml",
        )


def read(text: str, context: Context) -> tuple[Script, dict[str, Any], int] | None:
    """Return the server's command as a script, its container, and the GPUs that it asks for; None if none serves."""
    refuse_template(text)
    found = []
    for document in load_yaml_all(text):
        found += _containers(document) if isinstance(document, dict) else []
        found += _kserve(document)
    servers = [each for each in found if _SERVER.search(_words_of(each))]
    if not servers:
        return None
    container = servers[0]
    script = parse_shell(_command(container))
    script.not_understood += [_note(len(servers))] if len(servers) > 1 else []
    return script, container, _gpus(container)


def ray_serve(text: str) -> dict[str, Any] | None:
    """Return vLLM's arguments in a RayService's serveConfigV2 (ray.serve.llm), or None."""
    for document in load_yaml_all(text):
        inner = _under(document, "spec").get("serveConfigV2")
        config = load_yaml(inner) if isinstance(inner, str) else inner
        for application in _rows(config, "applications"):
            for one in _rows(_under(application, "args"), "llm_configs"):
                loading, engine = _under(one, "model_loading_config"), _under(one, "engine_kwargs")
                name = loading.get("model_source") or loading.get("model_id")
                return {**engine, "model": name} if isinstance(name, str) else None
    return None


def _kserve(document: Any) -> list[dict[str, Any]]:
    """Return an InferenceService's model as a container: KServe's Hugging Face runtime starts vLLM."""
    model = _under(_under(_under(document, "spec"), "predictor"), "model")
    form = _under(model, "modelFormat").get("name")
    if str(form).lower() not in ("huggingface", "vllm"):
        return []
    words = [
        re.sub(
            r"^--model_id(?=$|=)",
            "--model",
            re.sub(r"^--model_name(?=$|=)", "--served-model-name", word),
        )
        for word in _listed(model.get("args"))
        if not word.startswith(("--backend", "--task"))
    ]
    place = str(model.get("storageUri") or "")
    if place.startswith("hf://") and not any(word.startswith("--model") for word in words):
        words += ["--model", place.removeprefix("hf://")]
    return [{**model, "image": "vllm", "args": words}]


def _under(value: Any, key: str) -> dict[str, Any]:
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def _rows(value: Any, key: str) -> list[Any]:
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, list) else []


def _note(count: int) -> str:
    return f"{count} containers start a server: the first is planned"


def _containers(value: Any, depth: int = 0) -> list[dict[str, Any]]:
    """Return every mapping with an image and a command or arguments, in order."""
    if depth > 20:
        return []
    if isinstance(value, list):
        return [each for item in value for each in _containers(item, depth + 1)]
    if not isinstance(value, dict):
        return []
    own = [value] if "image" in value and isinstance(value["image"], str) else []
    if not own and isinstance(value.get("image"), dict) and {"args", "command"} & set(value):
        own = [value]  # values.yaml keeps repository and tag apart
    return own + [each for item in value.values() for each in _containers(item, depth + 1)]


def _listed(value: Any) -> list[str]:
    if isinstance(value, list):
        return [str(item) for item in value]
    return shlex.split(str(value)) if value not in (None, "") else []


def _words_of(container: dict[str, Any]) -> str:
    parts = [str(container.get("image", ""))]
    for key in ("command", "args", "entrypoint"):
        parts += [str(container.get(key, ""))]
    return " ".join(parts)


def _command(container: dict[str, Any]) -> str:
    """Return the container's command line, with its environment before it."""
    entry, command, args = (container.get(key) for key in ("entrypoint", "command", "args"))
    try:
        words = [*_listed(entry), *_listed(command), *_listed(args)]
    except ValueError:
        raise UsageError("config: the container's command has an open quote") from None
    assigned = _environment(container)
    lines = [f"export {key}={shlex.quote(value)}" for key, value in assigned.items()]
    joined = " ".join(words)
    if words[:1] and words[0].rsplit("/", 1)[-1] in ("sh", "bash") and len(words) > 2:
        body = " ".join(words[2:]) if words[1].startswith("-") else joined
        return "\n".join([*lines, body])
    if not re.search(r"\b(?:vllm\s+serve|api_server|launch_server|sglang\s+serve)\b", joined):
        image = str(container.get("image", "")).lower()
        entry_words = _ENTRY["sglang" if "sglang" in image else "vllm"]
        return "\n".join([*lines, f"{entry_words} {' '.join(map(shlex.quote, words))}"])
    plain = [word if re.search(r"\$[({]?\w", word) else shlex.quote(word) for word in words]
    return "\n".join([*lines, re.sub(r"\$\((\w+)\)", r"${\1}", " ".join(plain))])


def _environment(container: dict[str, Any]) -> dict[str, str]:
    """Return the container's own values; secrets and references to other objects are left out."""
    given = container.get("env") or container.get("environment") or {}
    if isinstance(given, list):
        pairs = [
            (item.get("name"), item.get("value"))
            if isinstance(item, dict)
            else tuple(str(item).partition("=")[::2])
            for item in given
        ]
    else:
        pairs = list(given.items()) if isinstance(given, dict) else []
    found: dict[str, str] = {}
    for name, value in pairs:
        if (
            name
            and value is not None
            and not re.search(r"TOKEN|KEY|SECRET|PASSWORD", str(name), re.IGNORECASE)
        ):
            found[str(name)] = expand(str(value), found, {})
    return {key: value for key, value in found.items() if re.fullmatch(r"[A-Za-z_]\w*", key)}


def _gpus(container: dict[str, Any]) -> int:
    """Return the GPUs that the container asks for, 0 if it doesn't say."""
    limits = (
        ((container.get("resources") or {}).get("limits") or {})
        if isinstance(container.get("resources"), dict)
        else {}
    )
    for key, value in limits.items():
        if str(key).endswith("/gpu"):
            return as_int(value) or 0
    reserved = (
        ((container.get("deploy") or {}).get("resources") or {}).get("reservations") or {}
    ).get("devices") or []
    for device in reserved if isinstance(reserved, list) else []:
        if isinstance(device, dict) and "gpu" in str(device.get("capabilities", "")):
            ids = device.get("device_ids")
            return len(ids) if isinstance(ids, list) else as_int(device.get("count")) or 0
    return 0


def image_version(container: dict[str, Any]) -> str | None:
    """Return the release that an image's tag names: vllm/vllm-openai:v0.11.1, lmsysorg/sglang:v0.5.3-cu126."""
    image = container.get("image")
    tag = str(image.get("tag", "")) if isinstance(image, dict) else str(image).rpartition(":")[2]
    match = re.match(r"v?(\d+\.\d+(?:\.\d+)?)", tag)
    return match.group(1) if match else None


def note_gpus(found: Imported, gpus: int) -> None:
    """Say where the container asks for more GPUs than its command uses."""
    used = found.run.machine.gpus
    if gpus and gpus != used:
        found.report.effects.append(
            f"the container asks for {gpus} GPU{'s' if gpus > 1 else ''}, its command uses {used}"
        )
