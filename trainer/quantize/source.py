"""Where a checkpoint's files are: a folder, or the hub's snapshot of it in the local cache."""

from pathlib import Path

from planner.errors import UsageError


def local_folder(name: str) -> Path:
    """Return the folder of a checkpoint that is a folder or a hub id, which is downloaded."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    kinds = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(name, allow_patterns=kinds))
    except (OSError, HFValidationError, HfHubHTTPError) as error:
        raise UsageError(
            f"model: {name!r} is no folder, and the hub gives no files ({str(error).splitlines()[0][:160]})",
            hint="a folder with config.json, tokenizer and safetensors, or a hub id",
        ) from None
