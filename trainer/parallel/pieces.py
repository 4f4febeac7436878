"""Rows of a tensor on one rank, written and read by torch.distributed.checkpoint, at any number of ranks.

torch's own planner knows DTensors, which must lie on the mesh's device and in their own dtype. A run's optimizer
keeps its state flat, perhaps in host memory, perhaps in 8 bits: a piece says where it lies in the whole.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows of a whole tensor are here: all of one process, one part in N of a rank."""

    shape: torch.Size
    """Of the whole."""
    first: int = 0
    count: int | None = None
    """None = all."""

    @property
    def sizes(self) -> torch.Size:
        """Shape of what is here."""
        if self.count is None:
            return self.shape
        return torch.Size((self.count, *self.shape[1:]))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Return where they are, as the checkpoint's own table says it."""
        offsets = torch.Size((self.first, *[0] * (len(self.shape) - 1)) if self.shape else ())
        return ChunkStorageMetadata(offsets=offsets, sizes=self.sizes)

    @property
    def elements(self) -> slice:
        """Return the part of the whole, flattened, that is here."""
        width = self.shape[1:].numel()
        return slice(self.first * width, self.first * width + self.sizes.numel())


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One tensor's rows here, how to get their values to be saved, and where values go that are read."""

    rows: Rows
    dtype: torch.dtype
    """Of the values as saved."""
    read: Callable[[], Tensor]
    """Values of the shape `rows.sizes`, or as many of them in a row."""
    target: Callable[[], Tensor]
    """Memory for values that are read; it may be `read`'s own."""
    done: Callable[[Tensor], None] = lambda values: None
    """Called with `target` when all of it is read."""


def memory(rows: Rows, tensor: Tensor) -> Piece:
    """Return a piece whose values are `tensor` itself."""
    flat = tensor.detach()
    return Piece(rows=rows, dtype=tensor.dtype, read=lambda: flat, target=lambda: flat)


Pieces = dict[str, Piece]


def save_pieces(pieces: Pieces, folder: Path) -> None:
    """Write every rank's pieces to `folder`; all ranks call it. Raises OSError on all where one cannot."""
    writer = dcp.FileSystemWriter(folder)
    try:
        dcp.save(dict(pieces), storage_writer=writer, planner=_SavePieces())
    except dcp.api.CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {rank}: {cause}") from None


def load_pieces(pieces: Pieces, folder: Path, *, several: bool) -> None:
    """Fill pieces from `folder`, which any number of ranks may have written; all ranks call it.

    Raises ValueError or RuntimeError for a tensor that is not there or has another shape.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one process alone is meant, which it is
            reader = dcp.FileSystemReader(folder)
            dcp.load(
                dict(pieces), storage_reader=reader, planner=_LoadPieces(), no_dist=not several
            )
    except dcp.api.CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise ValueError(str(cause)) from None


def saved(folder: Path) -> dict[str, Any]:
    """Return name -> size and dtype of what was saved in `folder`."""
    return dict(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)


class _SavePieces(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(list(self._items()))
        return self.plan

    def _items(self) -> Iterable[WriteItem]:
        for name, piece in self.state_dict.items():
            chunk = piece.rows.chunk
            if chunk.sizes.numel() == 0 and piece.rows.shape.numel():
                continue  # a tensor of fewer rows than there are ranks
            yield WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties(dtype=piece.dtype),
                    size=piece.rows.shape,
                ),
            )

    def lookup_object(self, index: MetadataIndex) -> Any:
        piece = self.state_dict[index.fqn]
        return piece.read().reshape(piece.rows.sizes)


class _LoadPieces(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._open: dict[str, Tensor] = {}
        self._to_come: dict[str, int] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata = state_dict, metadata
        self.original_state_dict, self.is_coordinator = state_dict, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, piece in self.state_dict.items():
            saved = self.metadata.state_dict_metadata.get(name)
            if not isinstance(saved, TensorStorageMetadata):
                raise ValueError(f"{name} is not in the checkpoint")
            if saved.size != piece.rows.shape:
                raise ValueError(
                    f"{name} has shape {tuple(saved.size)}, here {tuple(piece.rows.shape)}"
                )
            own = create_read_items_for_chunk_list(name, saved, [piece.rows.chunk])
            own = own if piece.rows.sizes.numel() else []
            self._to_come[name] = len(own)
            items += own
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        piece = self.state_dict[index.fqn]
        if index.fqn not in self._open:
            self._open[index.fqn] = piece.target()
        return self._open[index.fqn].view(piece.rows.sizes)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        name = read_item.dest_index.fqn
        self._to_come[name] -= 1
        if self._to_come[name] == 0:
            self.state_dict[name].done(self._open.pop(name))
