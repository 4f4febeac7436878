"""overhead: library workspaces inside torch's pool."""

from planner.machines.machine import GpuSpec, Machine
from planner.terms.term import Term
from planner.units import KiB, MiB

BLAS_WORKSPACE_BYTES = 2 * 4096 * KiB + 8 * 16 * KiB
LARGE_BLAS_WORKSPACE_BYTES = 32 * MiB
LARGE_WORKSPACE_MAJORS = frozenset({"9", "10", "11", "12"})
"""Compute capabilities with the large one: 9.0 since torch 2.0, 10.x and 12.x since 2.12 (pull
request 175344), 11.x since 2.14 (189312)."""
HIPBLAS_WORKSPACE_BYTES = 32 * MiB
HIPBLASLT_WORKSPACE_BYTES = 76 * MiB
HIPBLASLT_ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx120")
"""Where torch multiplies by hipBLASLt, which has a workspace of its own (aten/src/ATen/Context.cpp,
blasPreferredBackend); elsewhere by hipBLAS."""
SOURCE = "torch 2.13 aten/src/ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize"


def blas_workspace_bytes(gpu: GpuSpec | None) -> int:
    """Return what torch's pool holds for one BLAS handle on one stream of `gpu` (None: an Ampere).

    torch hands every pair of handle and stream a workspace at its first product and keeps it
    (CublasHandlePool.cpp at 2.13: parseChosenWorkspaceSize, setWorkspaceForHandle); cuBLASLt uses
    the same one, since 2.11 by default. torch 2.15 gives it back after each product: from there on
    this is an upper bound. CUBLAS_WORKSPACE_CONFIG and torch.backends.cuda.cublas_workspace_size
    change it.
    """
    if gpu is None:
        return BLAS_WORKSPACE_BYTES
    if gpu.vendor == "amd":
        by_lt = gpu.compute_capability.startswith(HIPBLASLT_ARCHS)
        return HIPBLASLT_WORKSPACE_BYTES if by_lt else HIPBLAS_WORKSPACE_BYTES
    if gpu.vendor != "nvidia":
        return 0
    large = gpu.compute_capability.partition(".")[0] in LARGE_WORKSPACE_MAJORS
    return LARGE_BLAS_WORKSPACE_BYTES if large else BLAS_WORKSPACE_BYTES


def handles(*, trains: bool) -> int:
    """Return how many handles a process multiplies with, all on one stream.

    A handle belongs to a thread (aten/src/ATen/cuda/detail/DeviceThreadHandles.h), and autograd runs
    backward, recomputation included, in a thread of its own for each GPU
    (torch/csrc/autograd/engine.cpp) on the stream of the forward.
    """
    return 2 if trains else 1


TRANSFORMER_ENGINE_SMALL_BYTES = 4 * MiB
TE_SOURCE = (
    "Transformer Engine pytorch/module/base.py: get_cublas_workspace_size_bytes, get_workspace, "
    "get_multi_stream_cublas_workspace"
)


def engine_workspace(machine: Machine, count: int) -> Term:
    """Return `count` workspaces of Transformer Engine: 32 MiB from Hopper on, 4 before.

    One for its linears; four more, one a stream, for grouped ones (experts).
    """
    major = machine.gpu.compute_capability.partition(".")[0] if machine.gpu else ""
    large = major in LARGE_WORKSPACE_MAJORS
    size = LARGE_BLAS_WORKSPACE_BYTES if large else TRANSFORMER_ENGINE_SMALL_BYTES
    template = "{0} Transformer Engine workspace(s) x {1:,} B"
    return Term("overhead", count * size, template, (count, size), TE_SOURCE)


def workspace(machine: Machine, *, trains: bool) -> Term:
    """Return the BLAS workspaces, which torch allocates from its own pool."""
    size, count = blas_workspace_bytes(machine.gpu), handles(trains=trains)
    if not size:  # Metal and oneMKL: none in torch's pool
        return Term("overhead", 0)
    name = "hipBLAS" if machine.gpu is not None and machine.gpu.vendor == "amd" else "cuBLAS"
    template = (
        f"{{0}} {name} workspaces x {{1:,}} B" if count > 1 else f"{name} workspace {{1:,}} B"
    )
    return Term("overhead", count * size, template, (count, size), SOURCE)
