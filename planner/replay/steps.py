"""A run on one device, allocation by allocation: load, then steps until nothing new is reserved.

The second step meets the first's cache and the optimizer's states, so two are played.
"""

from typing import NamedTuple

from planner.allocator.caching import AllocatorConfig, read_intervals
from planner.allocator.pool import Chunk
from planner.layer.program import OpSettings
from planner.models.spec import ModelSpec
from planner.replay.fsdp2 import Fsdp2Units, load_shards
from planner.replay.head import Head
from planner.replay.layers import Layers
from planner.replay.norm import norm_events
from planner.replay.player import Blocks, DeviceFullError, Player
from planner.replay.rollout import play_rollout
from planner.replay.tensors import Trained, factored, loaded, trained
from planner.replay.units import Units, wrap_units
from planner.replay.update import Update
from planner.replay.warmup import warmup_bytes
from planner.replay.zero import flat_groups, load_zero, reduce_at_the_end, step_sizes, units_of
from planner.run.recipe import Checkpointing, EngineKind, Method, Reference, Task
from planner.run.resolved import Resolved
from planner.run.tasks import PREFERENCE, TASKS
from planner.terms.activations import masks, op_settings
from planner.terms.adapters import trains_embedding, trains_tied
from planner.terms.companions import as_companion, resident
from planner.terms.embedding import backward_blocks
from planner.terms.gradients import gradient_width
from planner.terms.logits import head_gradient_width
from planner.terms.optimizer_kinds import KINDS
from planner.terms.rope_tables import rope_tables
from planner.terms.step_scratch import bundles
from planner.terms.weights import flat_units, trained_width, weights
from planner.units import MiB

STEPS = 2
DDP_BUCKET, DDP_FIRST_BUCKET = 25 * MiB, 1 * MiB
"""torch DistributedDataParallel: bucket_cap_mb and kDefaultFirstBucketBytes."""


class Replayed(NamedTuple):
    """What the allocator held."""

    allocated_bytes: int
    """Largest total of blocks handed out."""
    reserved_bytes: int
    """Largest total taken from the device."""
    needed_bytes: int
    """The least capacity on which it would have gone through, unused segments given back."""
    full: bool
    """A request failed, with nothing left to give back."""
    loaded_bytes: int = 0
    """Taken from the device when the model is there and no step has run."""


def replay_run(
    model: ModelSpec,
    r: Resolved,
    *,
    workspace_bytes: int = 0,
    capacity_bytes: int | None = None,
    lengths: tuple[int, ...] = (),
    resident_bytes: int = 0,
    card_bytes: int = 0,
) -> Replayed:
    """Return what torch's allocator holds at most while a run of `r` goes on.

    `lengths`: tokens of one sequence in each step; all are the recipe's when empty. `card_bytes`: what
    the card has for torch, which bounds transformers' warm-up.
    """
    config = AllocatorConfig(
        expandable_segments=r.switches.expandable_segments,
        interval_divisions=read_intervals(r.switches.roundup_power2),
    )
    run = Run(model, r, Player(config, capacity_bytes=capacity_bytes))
    full, loaded_bytes = False, 0
    try:
        run.warm_up(card_bytes)
        run.load(workspace_bytes, resident_bytes)
        loaded_bytes = run.player.device.peak_reserved_bytes
        for length in lengths or (r.seq_tokens,) * STEPS:
            run.step(length)
    except DeviceFullError:
        full = True
    device = run.player.device
    return Replayed(
        device.peak_allocated_bytes,
        device.peak_reserved_bytes,
        device.needed_bytes,
        full,
        loaded_bytes,
    )


class Running(NamedTuple):
    """A forward whose graph waits for its backward."""

    tokens: int
    settings: OpSettings
    units: Units | None
    layers: Layers
    rotary: list[Chunk]
    masked: list[Chunk]
    kept: Blocks
    """The final norm's output and what it saved."""
    accumulate: bool
    """Its gradients are added to those of another."""


class Run:
    """One run: what stays on the device between steps."""

    def __init__(self, model: ModelSpec, r: Resolved, player: Player) -> None:
        self.model = model
        self.r = r
        self.player = player
        self.sharded = r.placement.gathers
        self.trained = self._trained() if r.trains else []
        roots = KINDS[r.optimizer].square_roots
        copies = (
            step_sizes(model, r, square_roots=roots)
            if r.trains and r.placement.zero is not None
            else None
        )
        bundle = bundles(model, r).bytes if r.trains and r.switches.step_scratch_bytes else 0
        self.update = Update(r, self.trained, player, self._factored(), copies, bundle)
        self.outputs: Chunk | None = None
        self.held: list[list[Chunk]] = []
        """Whole gradients that wait for the last micro-batch."""
        self.once = op_settings(model, r)._replace(accumulate=False)

    def _trained(self) -> list[Trained]:
        """Return every tensor the optimizer sees on this rank."""
        r = self.r
        if r.placement.zero is not None and r.method is Method.FULL:
            return flat_groups(self.model, r)
        if self.sharded and r.method is Method.FULL:
            sizes = self._shards(-(-self.model.parameters // r.placement.state_shards))
            return [Trained(size, trained_width(r)) for size in sizes]
        ranks = r.placement.state_shards
        return [
            each._replace(elements=-(-each.elements // ranks)) for each in trained(self.model, r)
        ]

    def _factored(self) -> list[int]:
        """Return the elements of each statistic of a factored optimizer on this rank."""
        if not (self.r.trains and KINDS[self.r.optimizer].factored):
            return []
        ranks = self.r.placement.state_shards
        return [-(-size // ranks) for size in factored(self.model, self.r)]

    def warm_up(self, card_bytes: int) -> None:
        """Make the allocator take one segment for the model, as transformers does from 4.50 on."""
        if not self.sharded:
            self.player.passing(warmup_bytes(self.model, self.r, card_bytes))

    def load(self, workspace_bytes: int, resident_bytes: int) -> None:
        """Load the base, tensor by tensor, then adapters and what the first product needs."""
        player = self.player
        if self.sharded:
            self._shard()
        else:
            self._load_whole()
        if self.r.method is not Method.FULL and self.r.trains:
            times = 2 if self.r.keeps_start else 1
            for each in self.trained:
                copies = times if each.loads else times - 1
                player.take_all([each.width * each.elements] * copies)
        if self.r.placement.buckets:
            player.take_all(self._buckets())
        load_zero(self.model, self.r, player)
        player.take(workspace_bytes)
        player.take(resident_bytes)

    def _buckets(self) -> list[int]:
        """Return DDP's reduction buckets: last tensors first, a small first bucket."""
        sizes: list[int] = []
        filled = 0
        full = gradient_width(self.r) if self.r.method is Method.FULL else 0
        for each in reversed(self.trained):
            filled += each.elements * (full or each.width)
            if filled >= (DDP_BUCKET if sizes else DDP_FIRST_BUCKET):
                sizes.append(filled)
                filled = 0
        return [*sizes, filled]

    def _load_whole(self) -> None:
        player = self.player
        player.take_all(rope_tables(self.model, self.r))
        player.stay(loaded(self.model, self.r))
        for companion, _ in resident(self.r):
            other = as_companion(self.r, companion)
            player.stay((blocks, 0) for blocks, _ in loaded(companion.spec, other))

    def _shard(self) -> None:
        """Keep this rank's part of each unit, layers first and the root last."""
        if self.r.placement.flat_buffers:
            load_shards(self.model, self.r, self.player)
            return
        if self.r.placement.zero is None:
            wrap_units(self.model, self.r, self.player)
            return
        root, *layers = self._shards(weights(self.model, self.r).bytes)
        for size in (*layers, root):
            flat = self.player.take(size * self.r.placement.weight_shards)
            self.player.take(size)
            self.player.give(flat)

    def _shards(self, total: int) -> list[int]:
        """Return one flat block for the root unit and each layer, of `total` together."""
        return [total * part // self.model.parameters for part in flat_units(self.model)]

    def step(self, length: int) -> None:
        """Play one optimizer step on sequences of `length` tokens."""
        tokens = self.r.sequences * length
        if TASKS[self.r.task].generates and self.r.engine is EngineKind.TRANSFORMERS:
            play_rollout(self.model, self.r, self.player)
        if self.r.task is Task.GRPO or (self._asks and not self._asks_after_forward):
            self._score(tokens)
        grads: list[Chunk] = []
        for number in range(min(2, self.r.grad_accum)):
            if self.r.columns:
                self._columns(length, grads)
            else:
                self._micro_batch(length, tokens, grads, accumulate=number > 0)
        reduce_at_the_end(self.model, self.r, self.player, grads)
        self.update.step(grads)

    def _embed(self, tokens: int, settings: OpSettings) -> Chunk:
        chunk = self.player.block(tokens * self.model.hidden * settings.residual)
        if self.model.embedding_scale_copy:
            scaled = self.player.block(tokens * self.model.hidden * settings.residual)
            self.player.give(chunk)
            chunk = scaled
        return chunk

    def _rotary(self, length: int, settings: OpSettings) -> list[Chunk]:
        mixer = max(self.model.layers, key=lambda layer: layer.mixer.head_dim).mixer
        width = mixer.qk_rope_head_dim or mixer.head_dim
        return self.player.take_all([length * width * settings.residual] * 2)

    def _score(self, tokens: int) -> None:
        teacher = self.r.companion("teacher")
        if teacher is not None:
            other = as_companion(self.r, teacher)
            Run(teacher.spec, other, self.player).score_plain(tokens)
            return
        self.score_plain(tokens)

    def score_plain(self, tokens: int) -> None:
        """Play one forward of this model and its head without a graph."""
        units = units_of(self.model, self.r, self.player) if self.sharded else None
        layers = Layers(self.model, self.r, self.once, tokens, self.player, units)
        x = layers.no_grad(self._embed(tokens, self.once))
        head = Head(self.model, self.r, tokens, self.player)
        events = norm_events(self.model, self.once)
        left = self.player.play(events.forward, tokens, {events.forward.x: x})
        out = left.pop(events.forward.out)
        self.player.give(*left.values())
        head.score(out)
        if units is not None:
            units.finish([], [])

    def _micro_batch(
        self, length: int, tokens: int, grads: list[Chunk], *, accumulate: bool
    ) -> None:
        self._backward(self._forward(length, tokens, accumulate=accumulate), grads)

    def _columns(self, length: int, grads: list[Chunk]) -> None:
        """Play a micro-batch of embeddings: all graphs first, or under GradCache one after another."""
        shapes = [(tokens * length // self.r.seq_tokens, rows) for rows, tokens in self.r.columns]
        if self.r.cached:
            for number, (tokens, rows) in enumerate(shapes):
                self._micro_batch(tokens, rows * tokens, grads, accumulate=number > 0)
            return
        running = [
            self._forward(tokens, rows * tokens, accumulate=number < len(shapes) - 1)
            for number, (tokens, rows) in enumerate(shapes)
        ]
        for each in reversed(running):  # the last forward's nodes run backward first
            self._backward(each, grads)

    def _forward(self, length: int, tokens: int, *, accumulate: bool) -> "Running":
        player, settings = self.player, self.once._replace(accumulate=accumulate)
        here = self.r.placement
        reduces = here.gradient_shards > 1 or here.offload.gradients or here.zero is not None
        units = units_of(self.model, self.r, player) if self.sharded or reduces else None
        if isinstance(units, Fsdp2Units):
            units.again, units.held = accumulate, self.held
        if units is not None:
            units.start()
        layers = Layers(self.model, self.r, settings, tokens, player, units)
        rotary = self._rotary(length, settings)
        masked = player.take_all(
            [masks(self.model, self.r, settings) * length // self.r.seq_tokens]
        )
        last = layers.forward(self._embed(tokens, settings))
        if units is not None:
            units.forward_done()
        events = norm_events(self.model, settings)
        kept = player.play(events.forward, tokens, {events.forward.x: last})
        if self.r.checkpointing is Checkpointing.NONE:  # else every checkpoint has it
            player.give(*masked)
            masked = []
        return Running(tokens, settings, units, layers, rotary, masked, kept, accumulate)

    def _backward(self, running: "Running", grads: list[Chunk]) -> None:
        player, tokens, units = self.player, running.tokens, running.units
        events, accumulate = norm_events(self.model, running.settings), running.accumulate
        kept = running.kept
        out = kept.pop(events.forward.out)
        outside: list[Chunk] = grads if units is None else []
        head = Head(self.model, self.r, tokens, player)
        player.give(self.outputs)
        if self._asks_after_forward:
            waiting = head.wait()
            self._score(tokens)
            player.give(*waiting)
        if units is not None:
            units.backward_starts()
        # autograd has one node for a tied weight: what the head made waits for what the embedding will make
        tied = trains_tied(self.model, self.r) and self.r.law.kind != "tiled"
        waits = accumulate and units is None and tied
        own: list[Chunk] = []
        grad = head.run(out, own if waits else outside, accumulate=accumulate and not waits)
        self.outputs = head.outputs
        left = player.play(events.backward, tokens, {**kept, events.backward.grad_out: grad})
        grad = left.pop(events.backward.grad_in)
        done = left.pop(events.forward.x, None)
        outside.extend(left.values())
        self._into_buckets(outside)
        first = running.layers.backward(done, grad, grads)
        player.give(*running.rotary, *running.masked)
        self._embedding_grad(tokens, outside, accumulate=accumulate)
        player.give(first, *own)
        self._into_buckets(outside)
        if units is not None:
            units.finish(outside, grads)

    def _into_buckets(self, grads: list[Chunk]) -> None:
        """Free gradients that DDP has copied into its buckets, of which they are views from then on."""
        if self.r.copies_into_buckets:
            self.player.give(*grads)
            grads.clear()

    @property
    def _asks(self) -> bool:
        """A reference or a teacher on this GPU runs in every micro-batch."""
        if self.r.task is Task.DISTILL:
            teacher = self.r.companion("teacher")
            return teacher is not None and teacher.resident
        return self.r.reference not in (Reference.NONE, Reference.PRECOMPUTED)

    @property
    def _asks_after_forward(self) -> bool:
        together = self.r.task in (*PREFERENCE, Task.DISTILL)
        return together and self._asks and not self.r.switches.reference_first

    def _embedding_grad(self, tokens: int, grads: list[Chunk], *, accumulate: bool) -> None:
        if not trains_embedding(self.model, self.r):
            return
        player, width = self.player, head_gradient_width(self.r)
        tied = trains_tied(self.model, self.r)
        full = self.r.method is Method.FULL
        for module in self.model.embeddings if full else self.model.embeddings[:1]:
            chunk = player.take(module.parameters * width)
            # beyond a few thousand tokens CUDA sorts them: its temporaries come and go
            player.passing(*backward_blocks(tokens, self.model.vocab, self.model.hidden))
            view = tied and self.r.law.kind == "full" and self.r.law.chunk_count < 2
            if view and module is self.model.embeddings[0]:
                # a linear's gradient for the head is a view: torch adds the two in a third buffer
                total = player.take(module.parameters * width)
                player.give(chunk)
                chunk = total
            if accumulate or tied:
                player.give(chunk)
            elif chunk is not None:
                grads.append(chunk)
