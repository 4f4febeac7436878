"""The policy cut over ranks by FSDP2, one code path for every degree: HSDP N x 1 is what DDP is.

A unit is a decoder layer; the rest (embeddings, final norm, head) is the root's, and the root's forward is
the whole scoring: whoever reads a weight does so inside `Sharded.run`, where the root is gathered and the
layers gather themselves. Gradients are summed, never averaged: losses have the whole step's normaliser.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from planner.errors import UnsupportedError
from planner.run.parallel import Layout
from planner.run.recipe import Checkpointing, EngineKind, ParallelSection, Recipe, Sharding, Task
from trainer.checkpointing import decoder_layers
from trainer.fields import MATRIX
from trainer.model import DTYPES, Policy
from trainer.parallel.ranks import Ranks
from trainer.parallel.traffic import Traffic

R = TypeVar("R")
FSDP2_NEEDS = ("reset_iter_state", "set_reduce_scatter_unused_params", "set_custom_all_gather")
"""What FSDP2 of torch 2.13 has, and older ones don't all have."""


class Root(nn.Module):
    """A module whose forward is any work on the model: FSDP2 gathers what is outside the layers for it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Any]) -> Any:
        """Return `work()`."""
        return work()


@dataclass(frozen=True, slots=True)
class Shard:
    """A trained parameter, and this rank's rows of it."""

    name: str
    whole: nn.Parameter
    """A DTensor; its gradient too."""
    local: Tensor
    """What the optimizer steps: the same memory."""


class Sharded:
    """A policy's model in FSDP2 units on this rank."""

    def __init__(
        self, model: nn.Module, units: Sequence[Any], ranks: Ranks, traffic: Traffic
    ) -> None:
        self.units = units
        """Layers, and the root behind them."""
        self.root = units[-1]
        self.ranks = ranks
        self.traffic = traffic
        self._kept = False
        """The root is gathered still, from the pass before."""
        self.gather_root()  # FSDP2 allocates its shards for good in the first forward
        with torch.no_grad():
            self.shards = [
                Shard(name, parameter, parameter.to_local().detach().requires_grad_())  # type: ignore[attr-defined]
                for name, parameter in model.named_parameters()
                if parameter.requires_grad
            ]

    @property
    def degree(self) -> int:
        """Ranks that a parameter is cut over; 1 = each has all of it."""
        return self.ranks.shards

    def run(self, work: Callable[[], R], *, keep: bool = False) -> R:
        """Return `work()`, which may read any weight; all ranks call it.

        Without gradients the root is cut again behind it, unless `keep`: until `settle`.
        """
        # where nothing is gathered, ranks generate each at their own pace
        if torch.is_grad_enabled() or (keep and self.degree == 1):
            return self.root(work)  # type: ignore[no-any-return]
        result: R = self._agreed(lambda: self.root(work), "again" if self._kept else "look")
        self._kept = keep
        if not keep:
            self.settle()
        return result

    def one_pass(self, work: Callable[[], R]) -> R:
        """Return `work()`, which runs the model once forward and backward.

        Raises torch.OutOfMemoryError on every rank when it is raised on one.
        """
        return self._agreed(work, "learn")

    def agreed(self, work: Callable[[], R]) -> R:
        """Return `work()`, which sends nothing, or only in passes of its own.

        Raises torch.OutOfMemoryError on every rank when it is raised on one.
        """
        return self._agreed(work, None)

    @torch.no_grad()
    def gather_root(self) -> None:
        """Gather what is outside the layers, and cut it again."""
        self.root(lambda: None)
        self.settle()

    @torch.no_grad()
    def each_whole(self) -> Iterator[Any]:
        """Yield one unit after the other while its parameters are whole; all ranks go through all of them."""
        self.settle()
        for unit in self.units:
            unit.unshard()
            try:
                yield unit
            finally:
                unit.reshard()

    def settle(self) -> None:
        """Cut what is gathered, and forget what a pass has left unfinished."""
        self._kept = False
        self.root.reset_iter_state()

    def _agreed(self, work: Callable[[], R], kind: str | None) -> R:
        self.traffic.begin()
        done = _attempt(work)
        if done is None:
            self.settle()  # what the pass held makes room for what it still has to send
            if kind is not None:
                self.traffic.finish(kind)
        elif kind is not None:
            self.traffic.complete(kind)
        if self.ranks.any(done is None):
            done = None
            self.settle()
            raise torch.OutOfMemoryError("memory ran out on one of the ranks")
        assert done is not None
        return done[0]

    def take_gradients(self) -> None:
        """Give every local shard its part of the summed gradient."""
        for shard in self.shards:
            grad: Any = shard.whole.grad
            shard.local.grad = None if grad is None else grad.to_local()

    def clear_gradients(self) -> None:
        """Drop the gradients."""
        for shard in self.shards:
            shard.whole.grad = shard.local.grad = None


def _set_aside(model: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """Return the memory of the parameters `names`, which are on the meta device from here on; tied ones stay tied."""
    memory: dict[str, Tensor] = {}
    empty: dict[nn.Parameter, nn.Parameter] = {}
    for name in names:
        owner, leaf = _place(model, name)
        real: nn.Parameter = getattr(owner, leaf)
        memory[name] = real.data
        if real not in empty:
            empty[real] = nn.Parameter(real.data.to("meta"), requires_grad=real.requires_grad)
        setattr(owner, leaf, empty[real])
    return memory


def _put_back(model: nn.Module, memory: Mapping[str, Tensor]) -> None:
    """Give FSDP2's parameters the memory set aside, as load_state_dict(assign=True) does after a start on meta."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, local in memory.items():
        owner, leaf = _place(model, name)
        old: Any = getattr(owner, leaf)
        if old not in made:
            whole = DTensor.from_local(local, old.device_mesh, old.placements, run_check=False)
            made[old] = nn.Parameter(whole, requires_grad=old.requires_grad)
        setattr(owner, leaf, made[old])


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _attempt(work: Callable[[], R]) -> tuple[R] | None:
    """Return what `work` does, or None when memory ran out: then no frame holds its tensors."""
    try:
        return (work(),)
    except torch.OutOfMemoryError:
        return None


def over_ranks(recipe: Recipe, size: int) -> Recipe:
    """Return the recipe as `size` ranks train it: FSDP2, over as many of them as divide the weights.

    No sharding, and DDP, are copies of the whole: HSDP size x 1. One rank divides nothing.
    """
    if size == 1:
        alone = {
            "sharding": Sharding.NONE,
            "parallel": ParallelSection(),
            "reshard_after_forward": None,
            "reduce_dtype": None,
            "accumulate_sync": None,
        }
        return recipe.model_copy(update=alone)
    parallel = recipe.parallel
    if recipe.sharding is not Sharding.FSDP2:
        parallel = ParallelSection(data_shard=1, data_replicate=size)
    return recipe.model_copy(update={"sharding": Sharding.FSDP2, "parallel": parallel})


def refuse_over_ranks(recipe: Recipe, layout: Layout) -> None:
    """Raise UnsupportedError for what one rank can do and several cannot yet, or the other way, by its field."""
    size = layout.gpus
    if size == 1:
        for name in ("reshard_after_forward", "reduce_dtype", "accumulate_sync"):
            if (value := getattr(recipe, name)) is not None:
                raise UnsupportedError(
                    f"recipe.{name}: {value} has no effect on one rank", hint="leave it out"
                )
        return
    kind = recipe.engine.kind or EngineKind.TRANSFORMERS
    cut = f"{layout.data_shard} ranks divide the weights"
    rules: tuple[tuple[str, Any, bool, str], ...] = (
        ("checkpointing", recipe.checkpointing, recipe.checkpointing is Checkpointing.EVERY_K, "full or offload: layers before the one at work are cut again by then"),
        ("optimizer", recipe.optimizer, recipe.optimizer in MATRIX and layout.data_shard > 1, f"adamw, lion or their 8-bit kinds, or sharding: ddp: it steps whole matrices, and {cut}"),
        ("engine.kind", kind, recipe.task is Task.GRPO and kind is EngineKind.NONE, "one that generates"),
        ("engine.kind", kind, recipe.task is Task.GRPO and kind is EngineKind.VLLM_SHARED and layout.data_shard > 1, f"vllm-push, transformers, vllm-server on other GPUs, or sharding: ddp: vllm-shared is whole weights, and {cut}"),
    )  # fmt: skip
    for name, value, wrong, allowed in rules:
        if wrong:
            raise UnsupportedError(
                f"recipe.{name}: {value} cannot be trained on {size} ranks", hint=f"use {allowed}"
            )
    if missing := [name for name in FSDP2_NEEDS if not hasattr(FSDPModule, name)]:
        raise UnsupportedError(
            f"torch {torch.__version__} cannot train on {size} ranks: its FSDP2 lacks {missing[0]}",
            hint="install torch 2.13 or newer",
        )


def shard_policy(
    policy: Policy,
    recipe: Recipe,
    layout: Layout,
    ranks: Ranks,
    *,
    stay: Collection[str] = (),
) -> Policy:
    """Return the policy with its parameters cut over `layout`; checkpointing is in place by then.

    `stay`: names of parameters whose memory is another's too, and whole on every rank: FSDP2 works on it where it
    is.
    """
    assert not stay or layout.data_shard == 1
    memory = _set_aside(policy.model, stay)
    ranks = ranks.laid_out(shard=layout.data_shard, device_type=policy.device.type)
    mesh = ranks.mesh
    assert mesh is not None
    options: dict[str, Any] = {
        "mesh": mesh if ranks.copies > 1 else mesh["shard"],
        "mp_policy": MixedPrecisionPolicy(
            reduce_dtype=DTYPES[recipe.reduce_dtype] if recipe.reduce_dtype else None,
            cast_forward_inputs=False,
        ),
    }
    layers = decoder_layers(policy.base)
    reshard = recipe.reshard_after_forward
    for layer in layers:
        fully_shard(layer, reshard_after_forward=True if reshard is None else reshard, **options)
    root: Any = fully_shard(Root(policy.model), **options)
    traffic = Traffic()
    units = (*layers, root)
    for unit in units:
        assert isinstance(unit, FSDPModule)
        # the sum over ranks, in ops that gloo has too
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        # a rank whose tokens never came by some expert still sends its zeros
        unit.set_reduce_scatter_unused_params(True, recurse=False)
        traffic.watch(unit, copies=mesh.get_group("replicate") if ranks.copies > 1 else None)
    _put_back(policy.model, memory)
    sharded = Sharded(policy.model, units, ranks, traffic)
    start = None
    if policy.start is not None:  # adapters are as they were when the run began
        start = {shard.name: shard.local.detach().clone() for shard in sharded.shards}
    return replace(policy, sharded=sharded, start=start)
