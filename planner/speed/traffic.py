"""Bytes that one rank receives in an optimizer step, by the link they come over.

Ranks are numbered tensor first, then context, shards, replicas and stages, so that the groups that talk
most sit in one node. Of a collective over several nodes each node fetches what it lacks once and its
ranks share the work, as NCCL's rings do.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from planner.dtypes import element_bytes
from planner.models.spec import ModelSpec
from planner.run.ranks import rank_runs
from planner.run.recipe import Checkpointing
from planner.run.resolved import Resolved
from planner.terms.adapters import trained_parameters
from planner.terms.counts import base_weights
from planner.terms.gradients import gradient_width, reduce_width
from planner.terms.host import FP32, node_ranks
from planner.terms.optimizer import optimizer
from planner.terms.optimizer_kinds import KINDS

HOST_STEPS = frozenset({"zero", "zero3", "fsdp"})
"""Whose optimizer runs on the host where its states are (DeepSpeedCPUAdam; torch's own on FSDP's shards)."""
NORM_AND_CLIP = 3
"""Gradients read for their norm; read and written to be clipped."""


class Traffic(NamedTuple):
    """Bytes a rank receives in one step."""

    network: int
    """From other nodes."""
    host: int
    """From and to host memory."""
    node: int
    """From GPUs of the same node."""
    stepping: int = 0
    """Of `host`, what moves inside the optimizer's step, when nothing computes beside it."""
    host_steps: int = 0
    """Bytes that the ranks of a node read and write in its memory where the host steps for them."""

    @property
    def slow(self) -> int:
        """Over links that are tens of times slower than those between a node's GPUs."""
        return self.network + self.host

    def to_dict(self) -> dict[str, int]:
        """Return the JSON form."""
        return {
            "network_bytes": self.network,
            "host_link_bytes": self.host,
            "node_bytes": self.node,
        }


class Sent(NamedTuple):
    """What one kind of collective brings a rank in a step."""

    size: int
    """Bytes of the whole result."""
    ranks: int
    stride: int
    """Ranks between two neighbours of the group."""

    def by_link(self, node: int) -> tuple[int, int]:
        """Return the bytes over the network and inside the node, of nodes with `node` GPUs."""
        if self.ranks < 2:
            return 0, 0
        near = max(1, min(self.ranks, node // self.stride))
        every = self.size * (self.ranks - 1) // self.ranks
        nodes = -(-self.ranks // near)
        far = self.size * (nodes - 1) // nodes // near
        return far, max(0, every - far)


def traffic(model: ModelSpec, r: Resolved, node: int) -> Traffic:
    """Return what a rank of the run receives in one step; `node`: GPUs of a node."""
    step = _Step(model, r)
    sent = [*step.weights(), *step.gradients(), *step.activations()]
    links = [each.by_link(node) for each in sent]
    far, near = (sum(sizes) for sizes in zip(*links, strict=True)) if links else (0, 0)
    return Traffic(far, step.host(), near, step.stepping(), step.host_steps())


@dataclass(frozen=True)
class _Step:
    model: ModelSpec
    r: Resolved

    @cached_property
    def part(self) -> ModelSpec:
        """The model as the first stage's ranks hold it, before anything shards it."""
        return rank_runs(self.model, self.r)[0].model

    @property
    def shards_stride(self) -> int:
        # ranks of one sequence's parts shard too, and stand before the others
        return self.r.layout.tensor

    @cached_property
    def base(self) -> int:
        """Bytes of the weights as they travel."""
        found = base_weights(self.part, self.r)
        return found.total if found.quantized else self.part.parameters * self._width

    @property
    def _width(self) -> int:
        return element_bytes(self.r.compute_dtype)

    @cached_property
    def trained(self) -> int:
        return trained_parameters(self.part, self.r)

    def weights(self) -> list[Sent]:
        """Return what gathering weights brings: twice a micro-batch, or once after the step."""
        here, stride = self.r.placement, self.shards_stride
        if here.weight_shards > 1:
            found = [Sent(self.base * self.r.grad_accum, here.weight_shards, stride)]
            again = here.keeps_over or here.weight_shards
            return [*found, Sent(self.base * self.r.grad_accum, again, stride)]
        if here.state_shards > 1:
            return [Sent(self.trained * self._width, here.state_shards, stride)]
        return []

    def gradients(self) -> list[Sent]:
        """Return what reducing gradients brings: a reduce-scatter over shards, a sum over replicas."""
        r, here = self.r, self.r.placement
        times = r.grad_accum if r.accumulate_sync or here.gradient_shards > 1 else 1
        times = 1 if r.accumulates_whole else times
        width = reduce_width(r) if here.flat_buffers else gradient_width(r)
        shards = max(here.gradient_shards, here.state_shards)
        found = [Sent(times * self.trained * width, shards, self.shards_stride)]
        copies = r.layout.data * r.layout.context // shards
        part = self.trained * width // shards
        # a sum is a reduce-scatter and a gather
        return [*found, Sent(2 * times * part, copies, self.shards_stride * shards)]

    def activations(self) -> list[Sent]:
        """Return what tensor, context, expert and pipeline ranks bring each other."""
        r, layout = self.r, self.r.layout
        count = len(self.part.layer_order) * r.grad_accum
        tokens = r.tokens // layout.context
        hidden = tokens * self.model.hidden * self._width
        again = 1 if r.checkpointing is not Checkpointing.NONE else 0
        found = []
        # attention and MLP sum their outputs forward, their inputs' gradients backward
        found.append(Sent(2 * (4 + 2 * again) * hidden * count, layout.tensor, 1))
        found.append(self._context(tokens, again))
        routed = [layer for layer in self.model.layers if layer.mlp.num_experts]
        if routed and layout.expert > 1:
            each = max(layer.mlp.top_k for layer in routed)
            found.append(
                Sent((4 + 2 * again) * hidden * each * count, layout.expert, layout.expert_tensor)
            )
        if layout.pipeline > 1:
            between = 2 * hidden * r.grad_accum // (layout.tensor if layout.sequence else 1)
            # one neighbour, so all of it comes over that link
            found.append(Sent(2 * between, 2, layout.gpus // layout.pipeline))
        return found

    def _context(self, tokens: int, again: int) -> Sent:
        """Return what the ranks of one sequence bring each other, of `tokens` on each.

        ring: every other rank's keys and values, forward and backward, and their gradients. Ulysses:
        queries, keys, values and outputs change from tokens to heads and back.
        """
        layout = self.r.layout
        count = len(self.part.layer_order) * self.r.grad_accum
        mixers = [layer.mixer for layer in self.model.layers]
        keys = max(2 * mixer.num_kv_heads * mixer.head_dim for mixer in mixers)
        whole = keys + max(2 * mixer.num_heads * mixer.head_dim for mixer in mixers)
        if layout.context_kind == "ulysses":
            size = (2 + again) * tokens * whole
        else:
            size = (3 + again) * tokens * layout.context * keys
        sent = size // layout.tensor * self._width * count
        return Sent(sent, layout.context, layout.tensor)

    def host(self) -> int:
        """Return what goes to host memory and back."""
        r, here = self.r, self.r.placement
        total = self.stepping()
        if here.offload.gradients:  # reduced in every backward, and added up on the host
            total += r.grad_accum * self._shard * gradient_width(r)
        if here.offload.weights:
            total += 2 * r.grad_accum * self.base // here.weight_shards
        if r.checkpointing is Checkpointing.OFFLOAD:
            tokens = r.tokens // r.layout.context
            inputs = tokens * self.model.hidden * self._width * len(self.part.layer_order)
            total += 2 * inputs * r.grad_accum
        return total

    @property
    def _shard(self) -> int:
        return self.trained // max(self.r.placement.state_shards, 1)

    def stepping(self) -> int:
        """Return what moves while the optimizer steps.

        Where the GPU steps on states of the host they come and go back: in vramwise's trainer at once, each way
        at the link's whole speed (trainer/bundles.py; PCIe carries as much in both directions together as twice
        one way: 111.4 of 56.8 GB/s between RTX 5090s, 54.2 of 27.1 between RTX 3090s, p2pBandwidthLatencyTest), elsewhere
        one after the other. Where the host steps the new weights go to the GPU at its end (DeepSpeed
        stage_1_and_2.py and stage3.py: step); FSDP's are gathered from the host as they are used.
        """
        offload = self.r.placement.offload
        if not offload.states or offload.by == "fsdp":
            return 0
        if offload.by in HOST_STEPS:
            return 0 if offload.weights else self._shard * self._width
        ways = 1 if self.r.switches.step_scratch_bytes else 2
        return ways * optimizer(self.part, self.r).host.bytes

    def host_steps(self) -> int:
        """Return what the host's memory moves for all ranks of a node that it steps for.

        In fp32: gradients added up over micro-batches, their norm, clipped, and then read beside master
        weights and states, which are read and written.
        """
        r = self.r
        if not r.placement.offload.states or r.placement.offload.by not in HOST_STEPS:
            return 0
        adding = 3 * (r.grad_accum - 1) * r.placement.offload.gradients
        stepping = 1 + 2 * (1 + KINDS[r.optimizer].states)
        each = FP32 * (adding + NORM_AND_CLIP + stepping)
        return min(node_ranks(r), r.layout.gpus) * self._shard * each
