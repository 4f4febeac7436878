"""overhead: library workspaces inside torch's pool."""

from planner.machines.machine import Machine
from planner.terms.term import Term
from planner.units import KiB, MiB

CUBLAS_DEFAULT = 8 * MiB + 128 * KiB
"""torch's cuBLAS workspace per handle and stream (4096x2 + 16x8 KiB)."""
CUBLAS_HOPPER = 32 * MiB


def workspace(machine: Machine) -> Term:
    """Return cuBLAS' workspace, which torch allocates from its own pool."""
    hopper = machine.gpu is not None and machine.gpu.compute_capability.startswith(
        ("9", "10", "12")
    )
    size = CUBLAS_HOPPER if hopper else CUBLAS_DEFAULT
    return Term("overhead", size, "cuBLAS workspace {0:,} B", (size,), "torch aten CUDABlas.cpp")
