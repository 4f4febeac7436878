"""The loss head's allocations in order, by the framework's law."""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from planner.allocator.pool import Chunk
from planner.dtypes import element_bytes
from planner.models.spec import ModelSpec
from planner.replay.player import Player
from planner.run.logits_law import LogitsLaw, width
from planner.run.resolved import Resolved
from planner.terms.adapters import trains_head
from planner.terms.gradients import gradient_width
from planner.terms.logits import (
    chunk_rows,
    head_gradient_width,
    head_width,
    logit_width,
    logits,
    scored_rows,
    tile_shape,
)

SCALES_LOGITS = ("granite", "cohere")
"""Families whose forward always multiplies or divides the logits (modeling_granite, modeling_cohere)."""


class Step(NamedTuple):
    """One allocation or free of vocabulary width."""

    gone: str
    """Freed, after `made` if there is one."""
    made: str
    each: int
    """Bytes of an element of `made`; 0: `gone` goes on under that name."""
    shifted: bool
    """A row less for each sequence."""


@dataclass(slots=True)
class Head:
    """The head of one model under one recipe."""

    model: ModelSpec
    r: Resolved
    tokens: int
    player: Player
    outputs: Chunk | None = None
    """The logits that the training loop still holds."""

    @property
    def law(self) -> LogitsLaw:
        """The framework's law."""
        return self.r.law

    @property
    def trained(self) -> bool:
        """The head gets a gradient."""
        return trains_head(self.model, self.r)

    @property
    def rows(self) -> int:
        """Rows of hidden states that meet the vocabulary."""
        most = scored_rows(self.r, self.law)
        return max(1, most * self.tokens // self.r.tokens)

    def run(self, hidden: Chunk | None, grads: list[Chunk], *, accumulate: bool) -> Chunk:
        """Play the loss and its backward down to the gradient of the head's input, which is left.

        `hidden` is the norm's output, freed when nothing needs it; the head's own gradient is added
        to `grads`.
        """
        if self.law.kind == "full":
            return self._full(hidden, grads, accumulate=accumulate)
        if self.law.kind in ("score", "none"):
            return self._without_vocabulary(hidden, grads, accumulate=accumulate)
        return self._in_parts(hidden, grads, accumulate=accumulate)

    def wait(self) -> list[Chunk]:
        """Take what the head's forward leaves while another model runs; the caller gives it back."""
        return self.player.take_all([logits(self.model, self.r).held.bytes])

    def _without_vocabulary(
        self, hidden: Chunk | None, grads: list[Chunk], *, accumulate: bool
    ) -> Chunk:
        """Play a head of one number a token, or the choice of a token's hidden state."""
        player, act = self.player, element_bytes(self.r.compute_dtype)
        numbers = self.tokens * act if self.law.kind == "score" else 0
        made = player.take_all([numbers])
        whole = player.block(self.tokens * self.model.hidden * act)
        if self.law.kind == "score" and self.trained and not accumulate:
            grads.extend(player.take_all([self.model.hidden * gradient_width(self.r)]))
        player.give(hidden, *made)
        return whole

    def score(self, hidden: Chunk | None) -> None:
        """Play log-probabilities without a graph."""
        if self.law.kind in ("score", "none"):
            self.player.give(hidden)
            return
        if self.law.kind == "full":
            copies = self._copies()
            forward, _ = self._steps(logit_width(self.r))
            alive: dict[str, Chunk | None] = {}
            self._play(forward, alive)
            self.player.give(*alive.values(), *copies)
        else:
            work = self._part()
            self.player.give(*self.player.take_all(work))
        self.player.give(hidden)

    def _entropy(self) -> list[Chunk]:
        """Take what an entropy of full logits copies; it goes with the loss's graph."""
        if not self.r.entropy:
            return []
        act = logit_width(self.r)
        return self.player.take_all(
            self.rows * self.model.vocab * width(dtype, act) for _, dtype in self.law.entropy
        )

    def _copies(self) -> list[Chunk]:
        """Take the head's weight dequantised or cast, and its input's cast."""
        model, r = self.model, self.r
        act = element_bytes(r.compute_dtype)
        if r.quantization and r.switches.quantized_head:
            return self.player.take_all([4 * model.vocab * model.hidden])
        if not r.autocast or head_width(r) == act:
            return []
        sizes = [act * model.hidden * model.vocab]
        if self.trained:
            sizes.append(act * model.hidden * self.rows)
        return self.player.take_all(sizes)

    def _full(self, hidden: Chunk | None, grads: list[Chunk], *, accumulate: bool) -> Chunk:
        player, act = self.player, logit_width(self.r)
        copies = self._copies()
        forward, backward = self._steps(act)
        alive: dict[str, Chunk | None] = {}
        copies += self._entropy()
        self._play(forward, alive)
        if not self.trained:  # a frozen head saves nothing
            player.give(hidden)
        self._play(backward, alive)
        if self.law.chunk_count > 1:
            part = -(-self.rows // self.law.chunk_count) * self.model.vocab
            player.passing(*(part * width(dtype, act) for _, dtype in self.law.chunk))
        if self.r.switches.keeps_outputs:
            names = [name for name in alive if name.startswith("outputs.")]
            self.outputs = alive.pop(names[0]) if names else None
        if self._scales or self._capped:  # its gradient, out of place
            self._play((Step(next(reversed(alive)), "unscaled gradient", act, False),), alive)
        incoming = player.block(self.rows * self.model.hidden * act)
        if self.trained:
            self._weight_grad(grads, accumulate=accumulate)
            player.give(hidden)
        player.give(*reversed(alive.values()), *copies)
        return self._whole(incoming, act)

    @property
    def _scales(self) -> bool:
        """The model's forward scales its logits, out of place; some do so even by 1."""
        scaled = self.model.logit_scale != 1 or self.model.model_type.startswith(SCALES_LOGITS)
        return scaled and not self.law.caps_inside

    @property
    def _capped(self) -> bool:
        """The model's forward caps its logits by tanh."""
        return bool(self.model.softcap) and not self.law.caps_inside

    def _steps(self, act: int) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        """Return the law's steps, with what the model does to its logits first."""
        forward, backward = in_order(self.law, act, bool(self.r.autocast))
        name = forward[0].made
        if self._capped:  # logits / cap, tanh, * cap: three tensors, tanh's is saved
            scaled = (
                Step(name, "divided", act, False),
                Step("divided", "tanh", act, False),
                Step("", name, act, False),
            )
            forward = (forward[0], *scaled, *forward[1:])
        elif self._scales:
            forward = (forward[0], Step(name, name, act, False), *forward[1:])
        return forward, backward

    def _play(self, steps: tuple[Step, ...], alive: dict[str, Chunk | None]) -> None:
        vocab = self.model.vocab
        for gone, made, each, shifted in steps:
            if made and each:
                rows = self.rows - (self.r.sequences if shifted else 0)
                fresh = self.player.take(rows * vocab * each)
                self.player.give(alive.pop(gone, None))
                alive[made] = fresh
            elif made and gone:
                alive[made] = alive.pop(gone)
            elif gone:
                self.player.give(alive.pop(gone, None))

    def _whole(self, incoming: Chunk, act: int) -> Chunk:
        """Return the gradient of all tokens' hidden states from that of the scored rows."""
        if self.rows == self.tokens:
            return incoming
        whole = self.player.block(self.tokens * self.model.hidden * act)
        self.player.give(incoming)
        return whole

    def _weight_grad(self, grads: list[Chunk], *, accumulate: bool) -> None:
        size = self.model.vocab * self.model.hidden * head_gradient_width(self.r)
        if self.law.kind == "full" and self.law.chunk_count > 1:  # a chunk's, added to the sum
            self.player.passing(size)
        chunk = self.player.take(size)
        if accumulate:
            self.player.give(chunk)
        elif chunk is not None:
            grads.append(chunk)

    def _part(self) -> list[int]:
        """Return the blocks of one chunk or tile."""
        law, act = self.law, logit_width(self.r)
        if law.kind == "tiled":
            tall, columns = tile_shape(self.model, self.r, law, self.rows)
            one = 4 * tall * self.model.hidden
            narrow = [tall * columns * act] if act < 4 else []
            return [one, 4 * tall * columns, *narrow, one]
        chunk = chunk_rows(self.model, self.r, law, self.rows, act)
        vocab = min(self.model.vocab, law.chunk_vocab or self.model.vocab)
        cast = 0 if head_width(self.r) == act else vocab * self.model.hidden * act
        return [cast, *(chunk * vocab * width(dtype, act) for _, dtype in law.chunk)]

    def _parts(self) -> int:
        law, act = self.law, logit_width(self.r)
        if law.kind == "tiled":
            tall, columns = tile_shape(self.model, self.r, law, self.rows)
            return -(-self.rows // tall) * -(-self.model.vocab // columns)
        return -(-self.rows // chunk_rows(self.model, self.r, law, self.rows, act))

    def _in_parts(self, hidden: Chunk | None, grads: list[Chunk], *, accumulate: bool) -> Chunk:
        player, law, act = self.player, self.law, logit_width(self.r)
        one = self.rows * self.model.hidden
        kept = player.take_all(one * width(dtype, act) for _, dtype in law.hidden)
        if law.drops_hidden:
            player.give(hidden)
            hidden = None
        weight = self.model.vocab * self.model.hidden
        sums = [weight * width(dtype, act) for _, dtype in law.head_grad] if self.trained else []
        accumulators = player.take_all(sums)
        work = self._part()
        for _ in range(min(2, self._parts())):  # every part frees what the next one takes
            player.passing(*work)
        if self.trained and len(sums) == 1 and sums[0] == weight * head_gradient_width(self.r):
            player.give(*accumulators) if accumulate else grads.extend(accumulators)
        elif self.trained:
            self._weight_grad(grads, accumulate=accumulate)
            player.give(*accumulators)
        player.give(hidden)
        incoming = player.block(self.tokens * self.model.hidden * act)
        player.give(*kept)
        return incoming


@cache
def in_order(law: LogitsLaw, act: int, autocast: bool) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Return the steps of a law's forward and backward, when logits are computed in `act` bytes."""
    if not law.order:
        return _from_totals(law, act)
    halves: tuple[list[Step], list[Step]] = ([], [])
    half = 0
    for text in law.order:
        if text == "|":
            half = 1
        elif text.startswith("-"):
            halves[half].append(Step(text[1:], "", 0, False))
        else:
            names, _, kind = text.partition(": ")
            gone, _, made = names.rpartition(" > ")
            dtype, _, rows = kind.partition(" ")
            halves[half].append(Step(gone, made, _width(dtype, act, autocast), rows == "shifted"))
    return tuple(halves[0]), tuple(halves[1])


def _width(dtype: str, act: int, autocast: bool) -> int:
    if dtype == "downcast":
        return act if act < 4 else 0
    if dtype == "outputs":
        return 4 if autocast and act < 4 else 0
    return width(dtype, act)


def _from_totals(law: LogitsLaw, act: int) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Return the steps of a law that only says what is alive at its two largest moments."""
    forward: list[Step] = []
    first = width(law.forward[0][1], act) if law.forward else 0
    if first > act and not any(width(dtype, act) == act for _, dtype in law.forward):
        forward.append(Step("", "16-bit logits", act, False))  # the matmul's, which fp32 replaces
    for name, dtype in law.forward:
        gone = "16-bit logits" if forward and forward[-1].made == "16-bit logits" else ""
        forward.append(Step(gone, name, width(dtype, act), False))
    alive = [step.made for step in forward if step.made != "16-bit logits"]
    lasting = {_same(name, alive): width(dtype, act) for name, dtype in law.backward}
    forward += [Step(name, "", 0, False) for name in alive if name not in lasting]
    made = [name for name in lasting if name not in alive]
    backward = [Step("", name, lasting[name], False) for name in made]
    last = made[-1] if made else next(reversed(lasting), "")
    backward += [
        Step(name, "", 0, False)
        for name in lasting
        if name != last and not name.startswith("outputs")
    ]
    if lasting.get(last, 0) > act:
        backward.append(Step(last, "gradient", act, False))
    return tuple(forward), tuple(backward)


def _same(name: str, alive: list[str]) -> str:
    """Return which of the forward's tensors a backward's tensor is: itself under another name."""
    if name in alive:
        return name
    bare = name.removeprefix("outputs.")
    return next((other for other in alive if bare == other or bare.startswith(other + ",")), name)
