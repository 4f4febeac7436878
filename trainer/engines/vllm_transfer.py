"""All weights to a `vllm serve` from GPU to GPU: the trainer is the sender of vLLM's own weight transfer.

vLLM 0.32, vllm/distributed/weight_transfer: `nccl` broadcasts each tensor from the first rank to the server's
workers, which are on other GPUs, of this host or another; `ipc` lets them read a buffer of the GPU that they share
with the trainer's ranks. All ranks go through the weights, for what is divided is gathered by all; one parameter is
whole at a time, or one unit of FSDP2's where adapters are folded in. The first speaks to the server, over the routes
of its development mode.
"""

import socket
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import torch

from planner.errors import UsageError, VramwiseError
from planner.run.recipe import Method
from trainer.engines.vllm_adapters import merged_weights, served
from trainer.engines.vllm_platform import importing_vllm, installed_version
from trainer.model import Policy
from trainer.parallel.together import RankFailed, together

Get = Callable[[str], Any]
Post = Callable[[str, dict[str, Any] | None], Any]
START = (
    'VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config \'{{"backend": "{kind}"}}\''
)


class PolicySource:
    """The policy's weights as vLLM's trainer engines ask for them; all ranks go through them alike."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    @cached_property
    def _metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer import ParamMeta

        return [
            ParamMeta(name, weight.dtype, tuple(weight.shape))
            for _, name, layer, parameter in served(self._policy)
            for weight in (parameter if layer is None else layer.get_base_layer().weight,)
        ]

    def metadata(self) -> list[Any]:
        """Return name, dtype and whole shape of every weight, in the order in which they come."""
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (transformers name, whole tensor), adapters folded in."""
        return merged_weights(self._policy)

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest tensor."""
        return max(torch.Size(each.shape).numel() * each.dtype.itemsize for each in self._metadata)


class WeightSender:
    """A connection between the policy and the workers of one server, opened once, used after every step."""

    def __init__(self, policy: Policy, *, kind: str, url: str, get: Get, post: Post) -> None:
        """Open it; all ranks do. Raises UsageError where policy or server cannot, before anything waits."""
        self._ranks, self._post = policy.ranks, post
        self._source: Any = PolicySource(policy)
        check_policy(policy, kind)
        installed_version()
        with importing_vllm():
            from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        workers = together(self._ranks, lambda: _workers(get, kind) if self._ranks.first else 0)
        info = _init_info(kind, policy, self._source, url=url, workers=workers)
        self._engine: Any = self._guarded(
            lambda: WeightTransferTrainerFactory.trainer_init(
                info, client=_client(url, post), source=self._source
            )
        )
        group = getattr(self._engine, "model_update_group", None)
        if group is not None and group.disabled:
            raise VramwiseError(
                "recipe.engine.transfer: nccl, but NCCL's library did not load beside vLLM here",
                hint="transfer: folder",
            )

    def send(self) -> None:
        """Make the server's weights the policy's; all ranks call it."""
        self._guarded(self._engine.send_weights)

    def close(self) -> None:
        """Leave the server: it may be given other weights by another run."""
        self._engine.shutdown()
        if self._ranks.first:
            self._post("/shutdown_weight_transfer_engine", None)

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """Return `work()`; what goes wrong in it on one of several ranks ends them, for others wait in a gather."""
        try:
            return work()
        except VramwiseError as error:
            failed = error
        except (RuntimeError, ValueError, OSError) as error:  # NCCL's, a store's, a socket's
            failed = VramwiseError(
                f"recipe.engine.transfer: the weights did not reach the vLLM server: {str(error).splitlines()[0][:200]}",
                hint="can the server's host reach this one? NCCL_DEBUG=INFO on both sides says more; or transfer: folder",
            )
        if self._ranks.several:
            raise RankFailed(failed.message, hint=failed.hint)
        raise failed


def check_policy(policy: Policy, kind: str) -> None:
    """Raise UsageError for a policy that cannot be sent whole from its GPU."""
    if policy.method is Method.QLORA:
        raise UsageError(
            f"recipe.engine.transfer: {kind} sends whole weights, and a 4-bit base has none to merge into",
            hint="transfer: folder, which hands over the adapter alone",
        )
    if policy.device.type != "cuda":
        raise UsageError(
            f"recipe.engine.transfer: {kind} sends from a GPU, and the policy is on {policy.device.type}",
            hint="transfer: folder",
        )


def _workers(get: Get, kind: str) -> int:
    """Return how many workers the server has. Raises UsageError where it was not started for this transfer."""
    start = START.format(kind=kind)
    if kind == "ipc":
        start = f"VLLM_ALLOW_INSECURE_SERIALIZATION=1 {start}"
    try:
        config = get("/server_info?config_format=json")["vllm_config"]
        workers = int(get("/get_world_size")["world_size"])
    except VramwiseError as error:
        raise UsageError(f"recipe.engine.transfer: {kind}: {error.message}", hint=start) from None
    found = (config.get("weight_transfer_config") or {}).get("backend")
    if found != kind:
        raise UsageError(
            f"recipe.engine.transfer: {kind}, but the server takes weights by {found or 'no transfer'}",
            hint=start,
        )
    return workers


def _init_info(kind: str, policy: Policy, source: PolicySource, *, url: str, workers: int) -> Any:
    """Return vLLM's description of the sending side. Rank 0 of the run is the sender."""
    rank = policy.ranks.rank
    if kind == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        # the smallest buffer through which every tensor goes
        return IPCTrainerInitInfo(
            rank=rank, packed=True, packed_buffer_size_bytes=source.largest_bytes
        )
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    address, port = _meeting_place(url)
    return NCCLTrainerInitInfo(
        rank=rank,
        master_address=address,
        master_port=port,
        world_size=1 + workers,
        packed=False,  # a tensor at a time: vLLM's packed buffers would be 2 GiB of this GPU
    )


def _meeting_place(url: str) -> tuple[str, int]:
    """Return this host's address as the server sees it, and a free port."""
    server = urlsplit(url)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:  # nothing is sent
            link.connect((server.hostname, server.port or 80))
            address = link.getsockname()[0]
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, probe.getsockname()[1]
    except OSError as error:
        raise UsageError(
            f"recipe.engine.url: {url} cannot be reached over IPv4 ({error})",
            hint="NCCL's rendezvous needs an address of this host that the server can reach",
        ) from None


def _client(url: str, post: Post) -> Any:
    """Return vLLM's client of the routes, with the trainer's own time limit and errors."""
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

    class Client(HTTPVLLMWeightSyncClient):
        def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
            post(f"/{path}", json)

    return Client(url)
