"""A training state over ranks: the trained weights, the optimizer's state, and each rank's random state.

CHECKPOINT/training/ is torch.distributed.checkpoint's own format; every rank writes what it holds, and any number
of ranks reads it. 8-bit moments are saved as the numbers that they mean, for other ranks have other blocks; with
the scales of the blocks, by which as many ranks find the same codes again.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from planner.run.recipe import Method
from trainer.elementwise_optimizer import ElementwiseOptimizer, saved_values
from trainer.model import Policy
from trainer.parallel.pieces import (
    Piece,
    Pieces,
    Rows,
    load_pieces,
    memory,
    save_pieces,
    saved,
)
from trainer.parallel.ranks import Ranks
from trainer.parallel.whole import whole
from trainer.random_states import random_states, set_random_states

FOLDER = "training"
SCALES = "scales/"
STEP = "step"
"""A number in our own optimizer's state; torch's have a tensor of that name, or none."""


def save_training(policy: Policy, optimizer: Any, ranks: Ranks, folder: Path) -> None:
    """Write the training state of all ranks into `folder`; all of them call it."""
    pieces = dict(_weights(policy))
    for name, local, rows in held(policy):
        pieces |= _state(name, local, rows, optimizer, ranks)
    pieces |= _random(ranks, _random_state(optimizer, policy.device))
    save_pieces(pieces, folder)


def load_training(policy: Policy, optimizer: Any, ranks: Ranks, folder: Path) -> bool:
    """Read the training state in `folder`, of however many ranks it is; all ranks call it.

    Returns whether each rank drew on where it was: not at another number of ranks.
    """
    there = saved(folder)
    pieces = dict(_weights(policy))
    steps: dict[str, Tensor] = {}
    optimizer.state.clear()
    for name, local, rows in held(policy):
        state = _fresh(optimizer, local, name, there)
        if not state:
            continue  # never stepped
        optimizer.state[local] = state
        pieces |= _state(name, local, rows, optimizer, ranks, there)
        if not isinstance(state.get(STEP), Tensor | None):
            steps[name] = torch.zeros(1, dtype=torch.int64)
            pieces[f"optimizer/{name}/step"] = memory(Rows(torch.Size((1,))), steps[name])
    drawn = _saved_ranks(there) == ranks.size
    random = _random_state(optimizer, policy.device) if drawn else {}
    random = {name: state for name, state in random.items() if _random_name(ranks, name) in there}
    pieces |= _random(ranks, random)
    # codes are found by the scales of their blocks, which come first
    scales = {name for name in pieces if name.startswith(SCALES)}
    for chosen in (scales, pieces.keys() - scales):
        part = {name: pieces[name] for name in sorted(chosen)}
        load_pieces(part, folder, several=ranks.several)
    for name, local, _ in held(policy):
        if name in steps:
            optimizer.state[local][STEP] = int(steps[name])
    _set_random_state(random, optimizer, policy.device)
    return drawn


def training_bytes(policy: Policy, optimizer: Any) -> int:
    """Return what this rank writes of the training state; of parts that others hold too, its share."""
    size = 0
    for name, local, rows in held(policy):
        pieces = {"": memory(rows, local)} | _state(name, local, rows, optimizer, policy.ranks)
        size += sum(piece.rows.sizes.numel() * piece.dtype.itemsize for piece in pieces.values())
    return size // policy.ranks.copies


def whole_bytes(policy: Policy) -> int:
    """Return the size of everything that is trained, whole."""
    return sum(each.numel() * each.dtype.itemsize for _, each in policy.trainable())


@torch.no_grad()
def gathered(policy: Policy, *, here: bool | None = None) -> dict[str, Tensor]:
    """Return every trained tensor whole and on the host, on the ranks that want it; all ranks call it.

    `here`: whether this one does; None: the first does. Of full training also what the model keeps beside
    it. One tensor at a time is whole on the device.
    """
    first = policy.ranks.first if here is None else here
    named: dict[str, Any] = (
        policy.model.state_dict() if policy.method is Method.FULL else dict(policy.trainable())
    )
    found: dict[str, Tensor] = {}
    same: dict[tuple[Any, ...], Tensor] = {}
    for name, value in named.items():
        local = value.to_local() if isinstance(value, DTensor) else value
        place = (local.data_ptr(), value.shape, value.dtype)
        if place not in same or not local.numel():  # tied weights are one tensor in the file too
            all_of_it = whole(value)
            same[place] = all_of_it.cpu().contiguous() if first else torch.empty(0)
            del all_of_it  # before the next one
        found[name] = same[place]
    return found if first else {}


@torch.no_grad()
def load_alone(policy: Policy, optimizer: Any, folder: Path) -> None:
    """Read on each of several ranks its rows of what one process has saved in `folder`."""
    names = _file_names(policy)
    buffers = {name for name, _ in policy.model.named_buffers()}
    rows = {name: (local, own) for name, local, own in held(policy)}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - it is no mapping
                if key in buffers:
                    continue  # the loaded model's own
                if key not in names:
                    raise ValueError(f"unknown weight {key}")
                local, own = rows.pop(names[key])
                values = opened.get_slice(key)
                if torch.Size(values.get_shape()) != own.shape:
                    raise ValueError(f"{key} has shape {tuple(values.get_shape())}")
                local.copy_(values[own.first : own.first + own.sizes[0]])
    if rows:
        raise ValueError(f"{next(iter(rows))} is not in the checkpoint")
    stored = torch.load(folder / "training.pt", map_location="cpu", weights_only=True, mmap=True)
    document = stored["optimizer"]
    if not isinstance(optimizer, ElementwiseOptimizer):
        optimizer.load_state_dict(document)  # torch's own step whole tensors only
        return
    indices = [index for group in document["param_groups"] for index in group["params"]]
    if len(indices) != len(names):
        raise ValueError("the optimizer's state is of another number of parameters")
    optimizer.state.clear()
    by_tensor = {id(local): own for _, local, own in held(policy)}
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    for index, tensor in zip(indices, tensors, strict=True):
        if index in document["state"]:
            _cut_state(optimizer, tensor, by_tensor[id(tensor)], document["state"][index])


def _cut_state(
    optimizer: ElementwiseOptimizer, tensor: Tensor, rows: Rows, old: dict[str, Any]
) -> None:
    """Give a rank's rows of a parameter their part of the state of the whole."""
    state = optimizer.state[tensor] = optimizer.new_state(tensor)
    state[STEP] = old[STEP]
    for key, values in state.items():
        if not isinstance(values, Tensor) or key.startswith("absmax"):
            continue
        if old[key].numel() != rows.shape.numel():
            raise ValueError("the optimizer's state is of other weights")
        number = int(key.removeprefix("moment")) if key.startswith("moment") else 0
        part = saved_values(old, key, number)[rows.elements]
        if values.dtype == torch.uint8:
            optimizer.set_moment(tensor, number, part, keep_scales=False)
        else:
            values.copy_(part)


def _file_names(policy: Policy) -> dict[str, str]:
    """Return the name in a checkpoint's file -> the name in the model, of all that is trained."""
    trained = dict(policy.trainable())
    if policy.method is Method.FULL:
        return {name: name for name in trained}
    from peft import get_peft_model_state_dict

    marks = {name: torch.empty(0) for name in trained}
    by_mark = {id(mark): name for name, mark in marks.items()}
    filed = get_peft_model_state_dict(policy.model, state_dict=marks, save_embedding_layers=False)
    return {key: by_mark[id(mark)] for key, mark in filed.items()}


def held(policy: Policy) -> Iterator[tuple[str, Tensor, Rows]]:
    """Yield what the optimizer steps here: each trained parameter's name, its rows here, and which they are."""
    whole = dict(policy.trainable())
    ranks = policy.ranks
    for name, local in policy.stepped():
        shape = whole[name].shape
        if not ranks.several:
            yield name, local, Rows(shape)
            continue
        size = -(-shape[0] // ranks.shards)  # as FSDP2 cuts: torch.chunk along the first dimension
        first = min(shape[0], ranks.shard_index * size)
        yield name, local, Rows(shape, first, min(size, shape[0] - first))


def _weights(policy: Policy) -> Iterator[tuple[str, Piece]]:
    for name, local, rows in held(policy):
        yield f"model/{name}", memory(rows, local)


def _state(
    name: str,
    local: Tensor,
    rows: Rows,
    optimizer: Any,
    ranks: Ranks,
    there: Collection[str] | None = None,
) -> Pieces:
    """Return the pieces of one parameter's optimizer state; none before its first step.

    `there`: what is saved, for pieces that are read.
    """
    state: dict[str, Any] = optimizer.state.get(local, {})
    pieces: Pieces = {}
    for key, values in state.items():
        if key.startswith("absmax"):
            continue
        whole = f"optimizer/{name}/{key}"
        if not isinstance(values, Tensor):
            pieces[whole] = memory(Rows(torch.Size((1,))), torch.tensor([values]))
            continue
        if values.dtype != torch.uint8:
            own = rows if values.numel() == rows.sizes.numel() else Rows(values.shape)
            pieces[whole] = memory(own, values)
            continue
        number = int(key.removeprefix("moment"))
        scales = f"{SCALES}{ranks.shards}/{ranks.shard_index}/{name}/{key}"
        same_blocks = there is None or scales in there
        if same_blocks:
            blocks = state[f"absmax{number}"]
            pieces[scales] = memory(Rows(blocks.shape), blocks)
        pieces[whole] = _eight_bit(rows, local, number, optimizer, same_blocks)
    return pieces


def _fresh(optimizer: Any, local: Tensor, name: str, there: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state to be filled with what was saved of one parameter; empty where nothing was."""
    prefix = f"optimizer/{name}/"
    keys = [key.removeprefix(prefix) for key in there if key.startswith(prefix)]
    if not keys or isinstance(optimizer, ElementwiseOptimizer):
        return optimizer.new_state(local) if keys else {}
    found = {key: there[prefix + key] for key in keys}
    return {
        # torch's own keep a counter where it was made, on the host
        key: torch.zeros(
            of.size, dtype=of.properties.dtype, device="cpu" if key == STEP else local.device
        )
        for key, of in found.items()
    }


def _eight_bit(
    rows: Rows, local: Tensor, number: int, optimizer: ElementwiseOptimizer, same_blocks: bool
) -> Piece:
    return Piece(
        rows=rows,
        dtype=torch.float32,
        read=lambda: optimizer.moment(local, number),
        target=lambda: torch.zeros(rows.sizes.numel()),
        done=lambda values: optimizer.set_moment(local, number, values, keep_scales=same_blocks),
    )


def _random_name(ranks: Ranks, name: str) -> str:
    return f"random/{ranks.size}/{ranks.rank}/{name}"


def _saved_ranks(there: Collection[str]) -> int:
    return max((int(name.split("/")[1]) for name in there if name.startswith("random/")), default=1)


def _random(ranks: Ranks, states: dict[str, Tensor]) -> Pieces:
    return {
        _random_name(ranks, name): memory(Rows(state.shape), state)
        for name, state in states.items()
    }


def _random_state(optimizer: Any, device: torch.device) -> dict[str, Tensor]:
    """Return this rank's generators: torch's, and those of the optimizer's rounding."""
    states = random_states(device)
    if isinstance(optimizer, ElementwiseOptimizer):
        states["rounding"] = optimizer.rounding_state(device)
    return states


def _set_random_state(states: dict[str, Tensor], optimizer: Any, device: torch.device) -> None:
    set_random_states(states, device)
    if "rounding" in states:
        optimizer.set_rounding_state(device, states["rounding"])
