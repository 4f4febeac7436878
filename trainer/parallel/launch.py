"""`vramwise train RUN.yaml --nproc N`: starts PyTorch's own launcher, torchrun, and says in a line how ranks died."""

import contextlib
import logging
import os
import signal
import socket
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import torch

from planner.errors import UsageError, VramwiseError
from trainer.parallel.watch import LAUNCHER

DEFAULT_PORT = 29400
"""torchrun's own for c10d."""
SHUTDOWN_S = 600
"""For the step under way and its checkpoint, once the run was asked to stop; torchrun's own is 30 s. A rank that
died ends the others sooner (trainer/parallel/watch.py)."""
PROBE_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How many ranks on how many nodes, and where they meet: torchrun's flags by their names."""

    nproc: int
    nodes: int = 1
    node_rank: int | None = None
    """None: nodes are numbered as they come (c10d); else the first one is the meeting place (static)."""
    rdzv_endpoint: str | None = None
    """HOST:PORT where nodes meet."""
    rdzv_id: str | None = None

    def arguments(self) -> list[str]:
        """Return torchrun's command line without the program. Raises UsageError."""
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise UsageError(
                "--nproc: this is a rank of torchrun already",
                hint="leave --nproc out under torchrun",
            )
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else None
        if gpus is not None and self.nproc > gpus:
            raise UsageError(f"--nproc: {self.nproc}, but this machine has {gpus} GPUs")
        made = [f"--nproc-per-node={self.nproc}", f"--shutdown-timeout={SHUTDOWN_S}"]
        if self.nodes == 1:
            given = {"--node-rank": self.node_rank, "--rdzv-endpoint": self.rdzv_endpoint}
            for flag, value in given.items():
                if value is not None:
                    raise UsageError(
                        f"{flag}: {value} has no meaning with one node", hint="--nodes N"
                    )
            return [*made, "--standalone"]
        if self.rdzv_endpoint is None:
            raise UsageError(
                f"--nodes: {self.nodes} nodes have no place to meet",
                hint="--rdzv-endpoint HOST:PORT of one of them, the same on all",
            )
        host, port = _endpoint(self.rdzv_endpoint)
        made.append(f"--nnodes={self.nodes}")
        if self.rdzv_id is not None:
            made.append(f"--rdzv-id={self.rdzv_id}")
        if self.node_rank is None:
            if _is_here(host):
                _check_port(host, port, may_be_torch=True)
            return [*made, "--rdzv-backend=c10d", f"--rdzv-endpoint={host}:{port}"]
        if not 0 <= self.node_rank < self.nodes:
            raise UsageError(
                f"--node-rank: {self.node_rank} is not allowed", hint=f"0 to {self.nodes - 1}"
            )
        if self.node_rank == 0:
            _check_port(host, port, may_be_torch=False)
        place = [f"--master-addr={host}", f"--master-port={port}"]
        return [*made, f"--node-rank={self.node_rank}", *place]


def launch(how: Launch, run_file: Path, options: Sequence[str]) -> int:
    """Train on the ranks that `how` describes; return the exit code of the run. Raises VramwiseError."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import get_args_parser, run

    arguments = [*how.arguments(), "-m", "trainer", str(run_file), *options]
    os.environ[LAUNCHER] = uuid.uuid4().hex
    if not torch.cuda.is_available():
        cores = psutil.cpu_count(logical=False) or 1
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // how.nproc)))
    if not os.environ.get("VRAMWISE_DEBUG"):
        logging.disable(logging.ERROR)  # of torchrun: what a person needs of it is said here
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of a store whose clients are gone
    try:
        run(get_args_parser().parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode  # a rank has said why
        name = signal.Signals(-failure.exitcode).name
        raise VramwiseError(
            f"rank {rank} (process {failure.pid}) was killed by {name}; {kept(run_file)}",
            hint="out of host memory? the kernel's log says so" if name == "SIGKILL" else None,
        ) from None
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except (RendezvousError, RuntimeError, TimeoutError, ValueError, OSError) as error:
        cause = error.__cause__ or error
        raise VramwiseError(
            f"the nodes did not meet: {' '.join(str(cause).split())[:200]}",
            hint="the same --rdzv-endpoint on all nodes, its port free there and open between them",
        ) from None
    finally:
        logging.disable(logging.NOTSET)
    return 0


def kept(run_file: Path) -> str:
    """Return what a killed run has left to go on from."""
    from trainer import checkpoint as checkpoints
    from trainer.foreign import read_given

    found = checkpoints.checkpoints(Path(read_given(run_file).train.output))
    if not found:
        return "there is no checkpoint yet"
    return f"step {found[-1].step} is saved, --resume goes on from it"


def _endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdigit():
        host, port = text, str(DEFAULT_PORT)
    if not host or not 0 < int(port) < 65536:
        raise UsageError(f"--rdzv-endpoint: {text!r} is not allowed", hint="HOST:PORT")
    return host, int(port)


def _is_here(host: str) -> bool:
    names = {"localhost", "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn()}
    return host in names


def _check_port(host: str, port: int, *, may_be_torch: bool) -> None:
    """Raise VramwiseError where another program listens on the port that the nodes would meet at."""
    with socket.socket(socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            pass
        else:
            return
    if may_be_torch and _is_store(host, port):
        return  # another agent of this run, on this machine
    raise VramwiseError(
        f"--rdzv-endpoint: port {port} of {host} is in use by another program",
        hint="another port, the same on all nodes",
    )


def _is_store(host: str, port: int) -> bool:
    """Return whether torch's own store answers; to another program its client would wait for good."""
    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            torch.distributed.TCPStore(
                host,
                port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=PROBE_S),
            )
            answered.set()

    threading.Thread(target=ask, daemon=True).start()
    return answered.wait(PROBE_S)
