"""Pushes a run's checkpoint to the hub, with a model card; a run never ends from a push that fails.

A checkpoint is staged first (hard links), so that the run may delete it while it is on its way.
"""

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from planner.errors import UsageError, VramwiseError
from planner.run.runfile import load_run_file, validate
from trainer import checkpoint as checkpoints
from trainer.config import PushSection
from trainer.model_card import model_card, read_step
from trainer.reporters.courier import one_line
from trainer.say import Say

STAY = ("training.pt", "state.json", "evaluation.json")
"""Files of a checkpoint that a resume needs and a reader does not."""
STAGING = ".push"
JOIN_LIMIT_S = 600.0
NO_TOKEN = "no token: set HF_TOKEN, give --token, or log in with hf auth login"
REASONS = {
    401: "the token is not accepted",
    403: "the token may not write there",
    404: "there is no such user or organisation",
    429: "too many requests",
}


def push(source: Path, section: PushSection, *, token: str | None = None) -> str:
    """Push the newest checkpoint of the run in `source` (or that checkpoint); return its address.

    Raises UsageError where there is nothing to push, VramwiseError in one line where the hub refuses.
    """
    checkpoint, output = _checkpoint(source)
    with staged(checkpoint, output, merged=section.merged) as folder:
        return upload(folder, section, token=token, message=f"Step {read_step(checkpoint)}")


def push_again(
    source: Path,
    *,
    repo: str | None,
    private: bool | None,
    merged: bool | None,
    token: str | None = None,
) -> dict[str, Any]:
    """Push as the run file says, or as asked for here; return what `vramwise push --json` prints."""
    _, output = _checkpoint(source)
    given = (load_run_file(output / "run.yaml").train or {}).get("push_to_hub") or {}
    given = {"repo": given} if isinstance(given, str) else dict(given)
    asked = {"repo": repo, "private": private, "merged": merged}
    given |= {key: value for key, value in asked.items() if value is not None}
    if "repo" not in given:
        raise UsageError("push: no repository", hint="--repo USER/NAME, or train.push_to_hub")
    section = validate(PushSection, given, label="push")
    address = push(source, section, token=token)
    return {"schema_version": 1, "repo": section.repo, "url": address}


@contextmanager
def staged(checkpoint: Path, output: Path, *, merged: bool = False) -> Iterator[Path]:
    """Yield a folder with what is to be pushed; it is gone afterwards."""
    folder = _stage(checkpoint, output, merged=merged)
    try:
        yield folder
    finally:
        clear(folder)


def clear(folder: Path) -> None:
    """Delete a staged folder, and the one around it if nothing else is on its way."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()


def upload(folder: Path, section: PushSection, *, token: str | None, message: str) -> str:
    """Make the repository if need be and commit the folder. Raises VramwiseError."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.utils import disable_progress_bars

    found = token or get_token()
    if found is None:
        raise VramwiseError(NO_TOKEN)
    disable_progress_bars()
    try:
        # the address as it is now: huggingface_hub reads it when it is imported
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=found)
        repo = api.create_repo(section.repo, private=section.private, exist_ok=True)
        api.upload_folder(repo_id=repo.repo_id, folder_path=folder, commit_message=message)
    except Exception as error:  # whatever a network, a server or a library does
        raise VramwiseError(f"{section.repo}: {reason(error)}") from None
    return str(repo)


def reason(error: BaseException) -> str:
    """Return why the hub did not take it, in a few words."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        said = REASONS.get(status) or ("the hub failed" if status >= 500 else one_line(error))
        return f"{said} (HTTP {status})"
    if isinstance(error, OSError) or "Connect" in type(error).__name__ or "Timeout" in str(error):
        return f"no connection: {one_line(error)}"
    return one_line(error)


def push_after(output: Path, section: PushSection, *, stopped: bool, say: Say) -> None:
    """Push a run that has ended; say in one line how that went."""
    later = f"later: vramwise push {output}"
    if stopped:
        say(f"push_to_hub: the run was stopped, nothing is pushed now; {later}")
        return
    try:
        say(f"pushed to {push(output, section)}")
    except Exception as error:
        said = error.message if isinstance(error, VramwiseError) else one_line(error)
        say(f"push_to_hub: not pushed: {said}; {later}")


def note_before() -> str:
    """Return what is already known to stand in the way of a push; "" if nothing does."""
    from huggingface_hub import get_token

    return "" if get_token() else f"push_to_hub: {NO_TOKEN}; the run goes on"


class EverySave:
    """A callback that pushes each checkpoint, on a thread of its own, while the run goes on.

    A checkpoint that is saved while the one before is still on its way is left out; the last one is
    pushed when the run is over.
    """

    def __init__(self, section: PushSection, *, say: Say) -> None:
        self._section = section
        self._say = say
        self._thread: threading.Thread | None = None
        self._told = ""

    def on_save(self, run: Any, step: int, path: Path) -> None:
        """Push the checkpoint, unless one is on its way."""
        if step >= run.max_steps or (self._thread is not None and self._thread.is_alive()):
            return
        try:
            folder = _stage(path, run.output)
        except (OSError, VramwiseError) as error:
            self._tell(one_line(error))
            return
        self._thread = threading.Thread(target=self._push, args=(folder, step), daemon=True)
        self._thread.start()

    def on_train_end(self, run: Any) -> None:
        """Wait for what is on its way: the last push must come after it."""
        if self._thread is not None:
            self._thread.join(JOIN_LIMIT_S)

    def _push(self, folder: Path, step: int) -> None:
        try:
            upload(folder, self._section, token=None, message=f"Step {step}")
        except VramwiseError as error:
            self._tell(error.message)
        finally:
            clear(folder)

    def _tell(self, text: str) -> None:
        """Say what went wrong, once as long as it is the same."""
        if text != self._told:
            self._told = text
            self._say(f"push_to_hub: not pushed: {text}; the run goes on")


def _checkpoint(source: Path) -> tuple[Path, Path]:
    """Return (checkpoint, the run's output folder)."""
    if not source.is_dir():
        raise UsageError(f"push: no such folder: {source}", hint="a run's output, or a checkpoint")
    inside = source.resolve().parent.parent
    if not (source / "run.yaml").exists() and (inside / "run.yaml").exists():
        return source.resolve(), inside
    found = checkpoints.checkpoints(source)
    if not found:
        raise UsageError(f"push: {source} has no complete checkpoint")
    return found[-1].path, source


def _stage(checkpoint: Path, output: Path, *, merged: bool = False) -> Path:
    (output / STAGING).mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=output / STAGING))
    try:
        if merged:
            from trainer.merge import merge_checkpoint

            merge_checkpoint(checkpoint, folder / "merged")
            folder = _lifted(folder)
        else:
            for path in checkpoint.iterdir():
                if path.is_file() and path.name not in STAY:
                    _link(path, folder / path.name)
        card = model_card(output, step=read_step(checkpoint), merged=merged)
        (folder / "README.md").write_text(card, encoding="utf-8")
    except BaseException:
        clear(folder)
        raise
    return folder


def _lifted(folder: Path) -> Path:
    """Move what is in FOLDER/merged up into FOLDER."""
    for path in (folder / "merged").iterdir():
        path.rename(folder / path.name)
    (folder / "merged").rmdir()
    return folder


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)
