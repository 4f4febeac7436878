"""Checkpoints that are whole or absent: written aside, flushed to disk, then renamed.

OUTPUT/checkpoints/step-00000100/
  adapter_model.safetensors adapter_config.json   PEFT's format (LoRA, QLoRA)
  model*.safetensors config.json tokenizer*       full training
  training.pt                                     optimizer and RNG state (tensors only), of one process
  training/                                       the same of several ranks, and what they train: any number reads it
  state.json                                      step, data order, counters
"""

import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from planner.errors import UsageError, VramwiseError
from planner.run.recipe import Method
from trainer.adapters import pissa_as_lora, split_pissa
from trainer.model import Policy
from trainer.parallel.ranks import ALONE, Ranks
from trainer.parallel.saving import FOLDER as TRAINING
from trainer.parallel.saving import (
    gathered,
    load_alone,
    load_training,
    save_training,
    training_bytes,
    whole_bytes,
)
from trainer.room import check_room, check_space

FOLDER = "checkpoints"
RUN_FILE = "run.yaml"
"""The run as it was resolved, beside its checkpoints."""
PARTIAL = ".partial-"
RANK_STRIDE = 7_368_787
"""Between the seeds of two ranks; a prime, so that runs of near seeds don't share them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """One complete checkpoint on disk."""

    path: Path
    step: int

    def state(self) -> dict[str, Any]:
        """Return state.json."""
        return json.loads((self.path / "state.json").read_text(encoding="utf-8"))


def checkpoints(output: Path) -> list[Checkpoint]:
    """Return the complete checkpoints under `output`, oldest first; partial ones don't count."""
    found = [
        Checkpoint(path=path, step=int(path.name.removeprefix("step-")))
        for path in (output / FOLDER).glob("step-*")
        if path.name.removeprefix("step-").isdigit() and (path / "state.json").exists()
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def latest(output: Path) -> Checkpoint:
    """Return the newest checkpoint; raises UsageError when there is none."""
    found = checkpoints(output)
    if not found:
        raise UsageError(f"nothing to resume: {output} has no complete checkpoint")
    return found[-1]


def save(
    output: Path,
    *,
    step: int,
    policy: Policy,
    optimizer: Any,
    state: Mapping[str, Any],
    keep: int = 2,
    ranks: Ranks = ALONE,
) -> Checkpoint:
    """Write the checkpoint of `step` and drop all but the newest `keep`; every rank of `ranks` calls it.

    `state` must be JSON: data order, counters. Raises VramwiseError when it cannot be written; the
    checkpoints before it are untouched then.
    """
    if ranks.several:
        final = save_together(output, step, policy, optimizer, state, ranks)
        if ranks.first:
            for old in checkpoints(output)[:-keep]:
                drop(old.path)
        return Checkpoint(path=final, step=step)
    folder = output / FOLDER
    partial = folder / f"{PARTIAL}{step}-{os.getpid()}"
    final = folder / f"step-{step:08d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        training = {"optimizer": optimizer.state_dict(), "rng": rng_state()}
        check_space(folder, policy, training)
        partial.mkdir()
        write_weights(policy, partial)
        torch.save(training, partial / "training.pt")
        document = json.dumps({"step": step, **state}, indent=1)
        (partial / "state.json").write_text(document, encoding="utf-8")
        _flush(partial)
        drop(final)
        partial.rename(final)
        _flush_folder(folder)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) or _is_write_error(error):
            raise _not_written(output, step, error) from None
        raise
    for old in checkpoints(output)[:-keep]:
        drop(old.path)
    return Checkpoint(path=final, step=step)


def save_together(
    output: Path, step: int, policy: Policy, optimizer: Any, state: Mapping[str, Any], ranks: Ranks
) -> Path:
    """Write the checkpoint of several ranks, each its part, the first one the rest; return its folder.

    It has its name when every rank has written: nothing before that counts.
    """
    folder = output / FOLDER
    partial = folder / ranks.broadcast_object(f"{PARTIAL}{step}-{os.getpid()}")
    final = folder / f"step-{step:08d}"

    needed = whole_bytes(policy) + int(ranks.sum(float(training_bytes(policy, optimizer))))

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        check_room(folder, needed)
        partial.mkdir()

    def end() -> None:
        document = json.dumps({"step": step, "ranks": ranks.size, **state}, indent=1)
        (partial / "state.json").write_text(document, encoding="utf-8")
        _flush(partial)
        drop(final)
        partial.rename(final)
        _flush_folder(folder)

    try:
        first_does(ranks, begin)
        write_weights(policy, partial, ranks=ranks)
        save_training(policy, optimizer, ranks, partial / TRAINING)
        first_does(ranks, end)
    except Exception as error:
        if ranks.first:
            shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) or _is_write_error(error):
            raise _not_written(output, step, error) from None
        raise
    return final


def first_does(ranks: Ranks, work: Callable[[], None]) -> None:
    """Let the first rank do `work` while the others wait; raises OSError on all of them where it fails."""
    failed = ""
    if ranks.first:
        try:
            work()
        except Exception as error:
            if not isinstance(error, OSError) and not _is_write_error(error):
                raise
            failed = str(error) or type(error).__name__
    if failed := ranks.broadcast_object(failed):
        raise OSError(failed)


def restore(
    checkpoint: Checkpoint, *, policy: Policy, optimizer: Any, ranks: Ranks = ALONE, seed: int = 0
) -> dict[str, Any]:
    """Put weights, optimizer and RNG back as they were; return the state that `save` was given.

    Any number of ranks may have saved it; where it was another number, each rank draws anew from `seed`.
    """
    if ranks.several or (checkpoint.path / TRAINING).is_dir():
        return _restore_together(checkpoint, policy, optimizer, ranks, seed)
    try:
        read_weights(policy, checkpoint.path)
        training = torch.load(
            checkpoint.path / "training.pt", map_location="cpu", weights_only=True
        )
        optimizer.load_state_dict(training["optimizer"])
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        raise _cannot_resume(checkpoint, error) from None
    set_rng_state(training["rng"])
    return checkpoint.state()


def _restore_together(
    checkpoint: Checkpoint, policy: Policy, optimizer: Any, ranks: Ranks, seed: int
) -> dict[str, Any]:
    state = checkpoint.state()
    try:
        if (checkpoint.path / TRAINING).is_dir():
            drawn = load_training(policy, optimizer, ranks, checkpoint.path / TRAINING)
        else:
            load_alone(policy, optimizer, checkpoint.path)
            drawn = False
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        raise _cannot_resume(checkpoint, error) from None
    if not drawn:
        torch.manual_seed(rank_seed(seed + state["step"], ranks.rank))
    return state


def _cannot_resume(checkpoint: Checkpoint, error: Exception) -> UsageError:
    return UsageError(
        f"cannot resume from {checkpoint.path}: {str(error).splitlines()[0][:200]}",
        hint="was the recipe changed since?",
    )


def rank_seed(seed: int, rank: int) -> int:
    """Return the seed of a rank's own draws, such as dropout's; the first one's is the run's."""
    return seed + RANK_STRIDE * rank


def write_weights(policy: Policy, folder: Path, *, ranks: Ranks = ALONE) -> None:
    """Write adapters in PEFT's format, or the whole model in safetensors, and the tokenizer.

    Every rank of `ranks` calls it, the first writes what it gathers of all.
    """
    tensors = gathered(policy) if ranks.several else None
    if not ranks.several:
        _write(policy, folder, None)
    else:
        first_does(ranks, lambda: _write(policy, folder, tensors))


def _write(policy: Policy, folder: Path, tensors: dict[str, Tensor] | None) -> None:
    """Write `tensors`, or the policy's own."""
    if policy.method is Method.FULL:
        policy.model.save_pretrained(folder, state_dict=tensors)
        policy.tokenizer.save_pretrained(folder)
        return
    if policy.pissa is not None:
        _write_pissa(policy, folder, tensors)
        return
    # save_embedding_layers="auto" would ask the hub whether the vocabulary was resized
    policy.model.save_pretrained(folder, save_embedding_layers=False, state_dict=tensors)
    (folder / "README.md").unlink(missing_ok=True)


def _write_pissa(policy: Policy, folder: Path, given: dict[str, Tensor] | None) -> None:
    """Write a plain LoRA of twice the rank on the untouched base, which any tool loads."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    tensors = get_peft_model_state_dict(policy.model, state_dict=given, save_embedding_layers=False)
    config, made = pissa_as_lora(policy.model, tensors, policy.pissa or {})
    config.inference_mode = True
    config.save_pretrained(str(folder))
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in made.items()}
    save_file(whole, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def read_weights(policy: Policy, folder: Path) -> None:
    """Copy the weights in `folder` into the policy's own parameters."""
    from safetensors.torch import load_file

    if policy.method is not Method.FULL:
        from peft import set_peft_model_state_dict

        tensors = load_file(folder / "adapter_model.safetensors")
        if policy.pissa is not None:
            tensors = split_pissa(policy.model, tensors, policy.pissa)
        result: Any = set_peft_model_state_dict(policy.model, tensors)
        if result.unexpected_keys:
            raise ValueError(f"unknown adapter weight {result.unexpected_keys[0]}")
        return
    own = dict(policy.model.state_dict(keep_vars=True))
    with torch.no_grad():
        for file in sorted(folder.glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                if own[name].shape != tensor.shape:
                    raise ValueError(f"{name} has shape {tuple(tensor.shape)}")
                own[name].copy_(tensor)


def rng_state() -> dict[str, Any]:
    """Return the state of torch's generators."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore what `rng_state` returned."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        # a machine with fewer GPUs than the one that saved
        for index, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(saved, torch.device("cuda", index))


class StopSignal:
    """Notes SIGTERM and SIGINT, so that the loop can save at the end of the step under way.

    `repeats`: the same request comes several times: a scheduler sends it to every process of a job, and
    torchrun passes it on to its ranks once more.
    """

    def __init__(self, *, repeats: bool = False) -> None:
        self.received: int | None = None
        self._repeats = repeats
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and not self._repeats:
            # asked twice: the user doesn't want to wait for the step
            raise KeyboardInterrupt
        self.received = number


def drop(path: Path) -> None:
    """Delete a checkpoint; first it loses its name, for a kill must not leave half of one."""
    if path.exists():
        doomed = path.with_name(f"{PARTIAL}{path.name}")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what killed runs left half written."""
    for path in folder.glob(f"{PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_write_error(error: Exception) -> bool:
    """Return whether torch.save or safetensors failed to write: they don't raise OSError."""
    text = str(error)
    return type(error).__name__ == "SafetensorError" or (
        isinstance(error, RuntimeError)
        and any(part in text for part in ("PytorchStreamWriter", "unexpected pos", "file write"))
    )


def _not_written(output: Path, step: int, error: Exception) -> VramwiseError:
    kept = checkpoints(output)
    before = f"step {kept[-1].step} is intact" if kept else "there is none before it"
    reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return VramwiseError(
        f"checkpoint of step {step} not written to {output}: {reason}; {before}",
        hint="free some space, then go on with: vramwise train RUN.yaml --resume",
    )
