"""activations: what autograd keeps of the layers, and what one layer needs while it runs backward."""

from collections import Counter
from typing import NamedTuple

from planner.dtypes import element_bytes
from planner.layer.compiled import layer_tape
from planner.layer.costs import KeptCosts, checkpointed_costs, kept_costs, no_grad_costs
from planner.layer.program import OpSettings, Program
from planner.layer.tape import NOTHING as NOWHERE
from planner.layer.tape import Envelope, Point, envelope, largest
from planner.models.lora_rest import NOTHING
from planner.models.spec import ModelSpec, ModuleKind
from planner.quant.table import BITSANDBYTES
from planner.run.recipe import Attention, Checkpointing, Method, Task
from planner.run.resolved import Resolved
from planner.terms.beside_layers import with_noise_and_routers
from planner.terms.counts import adapters, base_weights, rest_width
from planner.terms.gradients import adds_in_place, gradient_width
from planner.terms.weights import trained_width

NO_ROPE = frozenset(
    {
        "gpt2",
        "opt",
        "bloom",
        "gpt_bigcode",
        "gpt_neo",
        "mpt",
        "jamba",
        "nemotron_h",
        "mamba2",
        "vision_tower",
    }
)
"""Families with learned or ALiBi positions, or none at all."""
UNDECLARED_GROUPS = frozenset({"falcon"})
"""Families that call SDPA with one key head for all queries and no enable_gqa."""


MLP_TILE_TOKENS = 2048
"""Tokens of one tile of a tiled MLP; the trainer cuts by it."""
MASK_ALIGNMENT = 16
"""Elements that a mask's rows are rounded up to, for SDPA's kernels take no others without a copy; torch
wants 8 or 16 by version (mem_eff_alignment)."""


BIAS_ALIGNMENT = 8
"""Elements that an additive mask's row has a multiple of, or is copied for (torch 2.5 preprocess_mask)."""


class Moment(NamedTuple):
    """Bytes at one moment of a step."""

    activations: int
    layer_grads: int
    """Weight gradients of the layer that is running."""
    layers_left: int
    """Decoder layers whose gradients do not exist yet, the running one included."""


class Tail(NamedTuple):
    """The final norm, per token."""

    forward: Envelope
    kept_forward: float
    """With its output, which the model's code holds while the loss is made."""
    kept_backward: float
    """Without it, unless a trained head saved it."""
    backward: Envelope


class Activations(NamedTuple):
    """Bytes of one micro-batch at the moments that can be the largest."""

    kept: int
    """Held by the graph when the last layer is done: checkpoint inputs, or everything."""
    forward: int
    """Largest inside the forward, `kept` included."""
    no_grad: int
    loss_forward: int
    """While the loss is made: kept, the final norm and its output."""
    loss_backward: int
    loss_copied: int
    """While a head that copied its rows works: without the norm's output."""
    backward: tuple[Moment, ...]
    """Final norm, last layer, first layer: one of them is the largest of backward."""
    autocast_cache: int
    """Casts of trained weights that autocast holds until the forward is over."""
    host: int
    parts: tuple[tuple[str, int, float], ...]
    """What is in `kept`: (name, count, bytes each)."""
    layer_per_token: float
    """Bytes per token of the layer that runs backward."""
    balance: int = 0
    """While the loss of a mixture's experts is made, the head being done: softmaxes and a product of one."""
    outliving: int = 0
    """Held beyond the backward with the outputs, whose graph has it: a frozen embedding's output,
    made a leaf, and its gradient; under reentrant checkpoints masks and positions too."""


def op_settings(model: ModelSpec, r: Resolved, tokens: int | None = None) -> OpSettings:
    """Return the sizes that decide what a layer's operations allocate.

    `tokens`: of the pass, where it is not a micro-batch's: fewer than a tile are never tiled.
    """
    full = r.method is Method.FULL and r.trains
    upcast = r.switches.kbit_upcast != "none" and r.quantization in BITSANDBYTES
    width = trained_width(r) if full else element_bytes(r.dtype)
    gathers = r.placement.gathers
    if gathers and r.autocast:
        width = element_bytes(r.autocast)  # units are gathered in the compute dtype
    eager = r.attention.value == "eager"
    idle = _idle_mask(model, r)
    masks = r.attention.value == "sdpa" and (r.padded or idle or _windowed(model, r))
    scores = eager or masks or _math_sdpa(model, r, upcast=upcast)
    lora = r.trains and not full
    rest = adapters(model, r).rest if lora else NOTHING
    many = (r.tokens if tokens is None else tokens) > MLP_TILE_TOKENS
    layout, buffers = r.layout, r.switches.gradient_buffers
    grad = (width if gathers else gradient_width(r)) if full else 0
    if buffers:  # a product's own result, before it is added to the buffer
        grad = 0 if r.switches.fused_weight_gradients else width
    tile = MLP_TILE_TOKENS if r.tiled_mlp and many else 0
    return OpSettings(
        full=full,
        adapted=adapters(model, r).leaves if lora else frozenset(),
        expert_adapters=adapters(model, r).experts if lora else (0, 0),
        experts=r.experts,
        imbalance=r.imbalance,
        capacity=r.expert_capacity,
        rank=r.lora_rank if lora else 0,
        act=element_bytes(r.compute_dtype),
        residual=4 if upcast or (model.norm_first and r.autocast) else width,
        weight=width,
        autocast=bool(r.autocast),
        adapter=element_bytes(r.adapter_dtype),
        grad=grad,
        quantized=bool(r.quantization),
        saved_output=r.switches.saved_output,
        saved_input=r.switches.saved_input if lora else 0,
        dropout=r.lora_dropout > 0,
        dora=r.dora and lora,
        saved=rest.linears,
        saved_norms=rest.norms,
        biases=rest.biases,
        rest=rest_width(r),
        final_norm=rest.final_norm,
        head=full or rest.head,
        embedding=full or rest.embedding,
        attention=r.attention.value,
        cpu=r.cpu,
        seq=r.seq_tokens if scores else 0,
        undeclared_groups=_undeclared_groups(model),
        batched=eager and r.sequences > 1,
        reads_half=eager and r.compute_dtype == "fp16" and not r.cpu,
        score_cap=eager and any(layer.mixer.softcap for layer in model.layers),
        sinks=eager and _sinks(model),
        masked=r.padded or idle,
        additive_mask=r.switches.mask == "packed" or idle,
        padded_bias=_padded_bias(r.seq_tokens) if idle else 0,
        repeat_kv=_repeats_kv(model, r) or _repeats_heads(model),
        norm=model.norm,
        rope=model.model_type not in NO_ROPE,
        hidden_dropout=model.hidden_dropout > 0,
        fused=r.switches.fused,
        mlp_tile=tile,
        tile_experts=r.switches.tiles_experts,
        norm_tile=tile if r.switches.tiled_norms else 0,
        accumulate=buffers or adds_in_place(r),
        compiled=r.compiled,
        again="ops" if r.checkpointing is Checkpointing.SELECTIVE_OP else "",
        float8=r.float8 is not None,
        code=r.switches.layers,
        tensor=layout.tensor,
        sequence=layout.tensor if layout.sequence else 1,
        context=layout.context,
        context_kind=_context_kind(r),
        attention_dropout=model.attention_dropout > 0,
        expert_rows=expert_rows(model, r),
        expert_groups=layout.expert,
    )


def _context_kind(r: Resolved) -> str:
    """Return how keys and values get round: torch's ring gathers them."""
    if r.layout.context == 1:
        return ""
    gathers = r.layout.context_kind == "ring" and r.switches.layers != "megatron"
    return "gathered" if gathers else r.layout.context_kind


def expert_rows(model: ModelSpec, r: Resolved) -> float:
    """Return the rows that a rank's experts get for every row that the rank sends to experts.

    Ranks that share an expert have the rows of all of them. Spread evenly an expert-parallel rank gets as
    many as it sends; at worst it gets all that the group sends, as far as a capacity lets it.
    """
    layout = r.layout
    worst: float = layout.expert if r.imbalance else 1
    if r.expert_capacity:
        worst = min(worst, r.expert_capacity)
    return layout.expert_tensor * worst


def layer_settings(r: Resolved, settings: OpSettings, index: int) -> OpSettings:
    """Return the settings of decoder layer `index`, whose graph is kept: some are checkpointed whole.

    torchtitan's _apply_layer_sac: every layer number checkpoint_every, counted from one.
    """
    if r.checkpointing is Checkpointing.SELECTIVE_LAYER and (index + 1) % r.checkpoint_every == 0:
        return settings._replace(again="all")
    return settings


KEEPS_GRAPHS = frozenset(
    {Checkpointing.NONE, Checkpointing.SELECTIVE_OP, Checkpointing.SELECTIVE_LAYER}
)
"""Checkpointing under which layers leave more than their inputs."""


def _undeclared_groups(model: ModelSpec) -> bool:
    """Return whether SDPA meets one key head; Falcon with several repeats them itself."""
    one = model.layers[0].mixer.num_kv_heads == 1
    return one and model.model_type in UNDECLARED_GROUPS


def _windowed(model: ModelSpec, r: Resolved) -> bool:
    """Return whether a layer's window is no longer than a sequence: then its mask is made in full."""
    return any(0 < layer.mixer.window <= r.seq_tokens for layer in model.layers)


def _sinks(model: ModelSpec) -> bool:
    """Return whether attention has parameters of its own, a sink a head (gpt-oss)."""
    return any(
        module.kind is ModuleKind.PARAMETER and module.name == "self_attn"
        for layer in model.layers
        for module in layer.modules
    )


def _idle_mask(model: ModelSpec, r: Resolved) -> bool:
    """Return whether a sliding window that no layer uses brings a mask all the same."""
    reached = 0 < model.idle_window <= r.seq_tokens
    return (
        r.switches.idle_windows_mask and r.attention is Attention.SDPA and reached and not r.padded
    )


def _padded_bias(row: int) -> int:
    """Return the elements of a row of SDPA's copy of an additive mask; 0: its rows are aligned, none is made."""
    return -(-row // BIAS_ALIGNMENT) * BIAS_ALIGNMENT if row % BIAS_ALIGNMENT else 0


def _repeats_kv(model: ModelSpec, r: Resolved) -> bool:
    """Return whether the framework's attention copies keys and values for every query head."""
    always = r.switches.sdpa_repeats_kv and r.attention is Attention.SDPA
    return always or model.model_type in r.switches.repeat_kv


def _repeats_heads(model: ModelSpec) -> bool:
    return model.model_type in UNDECLARED_GROUPS and not _undeclared_groups(model)


def _math_sdpa(model: ModelSpec, r: Resolved, *, upcast: bool) -> bool:
    """Return whether SDPA may have only its math kernel: fp32 on a GPU, or groups it is not told of."""
    if r.attention.value != "sdpa":
        return False
    if _undeclared_groups(model):
        return True
    return not (r.autocast or r.cpu) and (upcast or element_bytes(r.compute_dtype) == 4)


def beside_layers(settings: OpSettings) -> str:
    """Return what is compiled at once outside the layers: their graphs end with them."""
    return settings.compiled if settings.compiled == "model" else ""


def tail_settings(settings: OpSettings) -> OpSettings:
    """Return the settings of the final norm, which modules_to_save may name by itself."""
    return settings._replace(saved_norms=settings.final_norm)


NO_TAIL = Tail((NOWHERE,), 0, 0, (NOWHERE,))
_TAILS: dict[tuple[int, OpSettings], Tail] = {}


def _tail(model: ModelSpec, settings: OpSettings) -> Tail:
    if not model.final:  # another stage's
        return NO_TAIL
    key = (model.hidden, settings)
    if key in _TAILS:
        return _TAILS[key]
    width = settings.stream(model.hidden)
    tape = layer_tape(beside_layers(settings))
    x = tape.value(width)
    own = tail_settings(settings)
    out = Program(tape, own).norm(x, settings.residual, model.hidden // settings.sequence)
    if (
        settings.code != "megatron"
    ):  # which gathers it in the head's product, and keeps its own part
        out = Program(tape, own).gathered(out, model.hidden * settings.residual)
    tape.layer_done(out)
    tape.drop(x)
    forward, kept_forward = envelope(tape.points), tape.live
    # a trained head saves its input, unless autocast made it a copy of its own
    wide = settings.norm == "layernorm" and settings.autocast  # answers in fp32
    saved = settings.head and settings.residual == settings.act and not wide
    if not saved:
        tape.drop(out)
    kept_backward = tape.live
    if saved:
        tape.drop(out)
    tape.points.clear()
    tape.start_backward(out, out.size)
    tape.run()
    _TAILS[key] = Tail(forward, kept_forward, kept_backward, envelope(tape.points))
    return _TAILS[key]


def activations(model: ModelSpec, r: Resolved, tokens: int) -> Activations:
    """Return the activations of `tokens` tokens through the whole model."""
    settings = op_settings(model, r, tokens)
    tail = _tail(model, settings)
    fixed, mask = _rotary(model, r, settings), masks(model, r, settings)
    plain = max(
        largest(no_grad_costs(layer, model.hidden, settings), tokens).at(tokens)
        for layer in model.layers
    )
    found = _of_layers(model, r, settings, tail, tokens, (fixed, mask, plain))
    return with_noise_and_routers(
        model, r, found, tokens, width=settings.residual, act=settings.act
    )


def _of_layers(
    model: ModelSpec,
    r: Resolved,
    settings: OpSettings,
    tail: Tail,
    tokens: int,
    sizes: tuple[int, int, int],
) -> Activations:
    fixed, mask, plain = sizes
    if r.checkpointing in KEEPS_GRAPHS:
        # a variable of the model's forward, which checkpoints hold as an argument, and SDPA saves where
        # it is given as it comes: one for all layers
        saved = settings.masked and settings.additive_mask and settings.attention == "sdpa"
        held = mask if saved or r.checkpointing is not Checkpointing.NONE else 0
        found = _everything(model, r, settings, tail, tokens, fixed, plain, held)
        return found._replace(
            forward=found.forward + mask - held, no_grad=found.no_grad + mask - held
        )
    # an argument of every checkpoint
    return _checkpointed(model, r, settings, tail, tokens, fixed, mask, plain)


def _rotary(model: ModelSpec, r: Resolved, settings: OpSettings) -> int:
    """Return bytes of the cosines and sines every layer shares."""
    mixer = max(model.layers, key=lambda layer: layer.mixer.head_dim).mixer
    width = mixer.qk_rope_head_dim or mixer.head_dim
    return 2 * r.seq_tokens * width * settings.residual


def masks(model: ModelSpec, r: Resolved, settings: OpSettings) -> int:
    """Return bytes of the [sequences, 1, T, T] masks that the model's forward makes for its layers.

    transformers masking_utils: one for each kind of attention; eager's is additive, in the stream's
    dtype; SDPA's is boolean, and made only where its causal flag cannot say the same.
    """
    windows = {layer.mixer.window for layer in model.layers if layer.mixer.num_heads}
    if r.attention.value == "eager":
        width = settings.residual
    elif r.attention.value == "sdpa":
        width = 1
        if r.switches.mask == "packed" and settings.masked:
            # rows that share a prompt have a mask too, which the trainer's plan of them counts
            return _packed_mask(r, settings) if r.packing else 0
        if _idle_mask(model, r):  # one for all sequences, expanded
            return settings.residual * r.seq_tokens * r.seq_tokens
        if not settings.masked:
            windows = {window for window in windows if 0 < window <= r.seq_tokens}
    else:
        return 0
    return len(windows) * width * r.tokens * r.seq_tokens


def _packed_mask(r: Resolved, settings: OpSettings) -> int:
    """Return bytes of the trainer's additive mask of packed rows; GRPO's micro-batch is one row."""
    row = r.tokens if r.task is Task.GRPO else r.seq_tokens
    return settings.residual * r.tokens * -(-row // MASK_ALIGNMENT) * MASK_ALIGNMENT


def _everything(
    model: ModelSpec,
    r: Resolved,
    settings: OpSettings,
    tail: Tail,
    tokens: int,
    rotary: int,
    plain: int,
    masked: int = 0,
) -> Activations:
    """Every layer's graph is there: with all it saved, or what a policy kept of it; `masked`: the mask."""
    fixed = rotary + masked
    places = [
        (kind, layer_settings(r, settings, place)) for place, kind in enumerate(model.layer_order)
    ]
    costs = {
        key: kept_costs(model.layers[key[0]], model.hidden, key[1]) for key in dict.fromkeys(places)
    }
    counts = Counter(places)
    mask = model.hidden * tokens if model.embedding_dropout and settings.embedding else 0
    kept = fixed + mask + sum(counts[key] * cost.kept.at(tokens) for key, cost in costs.items())
    width = settings.stream(model.hidden)
    copies = sum(counts[key] * cost.kept.constant for key, cost in costs.items())
    first, last = costs[places[0]], costs[places[-1]]
    bottom = first
    if not settings.embedding:  # nothing before the first adapters needs a gradient
        bottom = kept_costs(
            model.layers[places[0][0]], model.hidden, places[0][1]._replace(input_grad=False)
        )
        kept -= first.kept.at(tokens) - bottom.kept.at(tokens)
    before_last = kept - last.kept.at(tokens)
    norm, top = largest(tail.backward, tokens), largest(last.backward, tokens)
    low = largest(bottom.backward, tokens)
    forward = max(
        before_last + largest(last.forward, tokens).at(tokens),
        kept + largest(tail.forward, tokens).at(tokens),
    )
    if not bottom.keeps_input:  # the model's forward holds the embeddings' output
        forward += width * tokens
    if mask:  # and before it was dropped out
        forward += width * tokens
    return Activations(
        kept=kept,
        forward=forward,
        no_grad=fixed + plain,
        loss_forward=kept + int(tail.kept_forward * tokens),
        loss_backward=kept + int(tail.kept_backward * tokens),
        loss_copied=kept + int((tail.kept_forward - width) * tokens),
        backward=(
            Moment(kept + norm.at(tokens), 0, model.num_layers),
            Moment(before_last + top.at(tokens), top.weight_grads, model.num_layers),
            Moment(fixed + mask + low.at(tokens), low.weight_grads, 1),
            *(
                _where_kept(places, costs, place, tokens, fixed + mask)
                for place in _last_places(places)
                if r.checkpointing is Checkpointing.SELECTIVE_LAYER
            ),
        ),
        autocast_cache=0,
        host=0,
        parts=(
            ("cosines and sines", 1, rotary),
            ("attention masks", 1, masked),
            ("autocast's copies of weights", 1, copies),
            ("embedding dropout's mask", 1, mask),
            ("layers' saved tensors", tokens, (kept - fixed - mask - copies) / max(tokens, 1)),
        ),
        layer_per_token=top.per_token,
    )


Place = tuple[int, OpSettings]
"""A decoder layer's kind and settings."""


def _last_places(places: list[Place]) -> list[int]:
    """Return where the last layer of each kind is."""
    return sorted({key: place for place, key in enumerate(places)}.values())


def _where_kept(
    places: list[Place], costs: dict[Place, KeptCosts], place: int, tokens: int, fixed: int
) -> Moment:
    """Return the moment when a layer runs backward, what is below it still being kept."""
    work = largest(costs[places[place]].backward, tokens)
    below = sum(costs[key].kept.at(tokens) for key in places[:place])
    return Moment(fixed + below + work.at(tokens), work.weight_grads, place + 1)


def _checkpointed(
    model: ModelSpec,
    r: Resolved,
    settings: OpSettings,
    tail: Tail,
    tokens: int,
    rotary: int,
    masked: int,
    plain: int,
) -> Activations:
    """With checkpointing: layer inputs are kept (or wait on the host), one layer is recomputed."""
    costs = [checkpointed_costs(layer, model.hidden, settings) for layer in model.layers]
    fixed = rotary + masked
    layers = model.num_layers
    width = settings.stream(model.hidden)
    one = width * tokens
    offload = r.checkpointing is Checkpointing.OFFLOAD
    every = r.checkpoint_every if r.checkpointing is Checkpointing.EVERY_K else 1
    inputs = -(-layers // every)
    resident = min(layers, r.keep_layers) if offload else inputs
    # a frozen model's embedding output is made a leaf, which its gradient node holds
    hooked = not settings.embedding and r.switches.frozen_embedding_leaf
    leaf = one if offload and hooked and resident < layers else 0
    if model.embedding_scale_copy and model.norm != "rmsnorm_gemma" and hooked:
        leaf += one  # scaled outside the embedding module: the first layer's input is a copy
    mask = 0
    if model.embedding_dropout and (settings.embedding or hooked):
        mask = model.hidden * tokens  # one byte an element; a leaf is what was not dropped out yet
        leaf = one if hooked else 0
    kept = fixed + mask + resident * one + leaf
    widest = max(costs, key=lambda cost: largest(cost.recompute, tokens).total(tokens))
    work = largest(widest.recompute, tokens)
    segment = _rest_of_segment(model, settings, tokens, every)
    if r.switches.reentrant:
        # the recomputed output is a Python variable until the layer's backward is done
        segment += one
    cache = _autocast_cache(model, r, settings)
    low = mask + work.at(tokens) + one
    if offload and resident < layers:
        # the next layer's input is on its way while this one's is used
        low = mask + largest(widest.recompute_fetched, tokens).at(tokens) + leaf
        low += one if layers - resident > 1 else 0
    held = r.placement.holds_frozen_inputs and r.checkpointing is Checkpointing.FULL
    if (
        held
    ):  # all inputs, and their gradients: `work` has one, and the last layer's is nobody's input
        low = work.at(tokens) + (inputs + max(0, inputs - 2)) * one
    lowest = [Moment(fixed + segment + low, work.weight_grads, 1)]
    if len(costs) > 1 and not offload and not held:
        below = fixed + segment + mask
        lowest = [
            _where_it_is_first(model, kind, largest(cost.recompute, tokens), tokens, below, one)
            for kind, cost in enumerate(costs)
        ]
    return Activations(
        kept=kept,
        # the largest layer runs while its own input is already among the kept ones
        forward=max(
            kept + plain - (one if resident else 0),
            kept + largest(tail.forward, tokens).at(tokens),
        )
        # the model's forward holds the embeddings' output, offloaded or dropped out or not
        + (one if not leaf and (mask or (offload and resident < layers)) else 0)
        + cache,
        no_grad=fixed + plain,
        loss_forward=kept + int(tail.kept_forward * tokens),
        loss_backward=kept + int(tail.kept_backward * tokens),
        loss_copied=kept + int((tail.kept_forward - width) * tokens),
        backward=(
            Moment(kept + largest(tail.backward, tokens).at(tokens), 0, layers),
            Moment(kept + segment + work.at(tokens), work.weight_grads, layers),
            *lowest,
        ),
        autocast_cache=cache,
        host=(layers - resident) * pinned(one, r) if offload else 0,
        outliving=_outliving(r, one if hooked else 0, fixed),
        parts=(
            ("cosines and sines", 1, rotary),
            ("attention masks", 1, masked),
            ("embedding dropout's mask", 1, mask),
            ("layer inputs", resident, one),
            ("embeddings' output", 1, leaf),
        ),
        layer_per_token=work.per_token,
    )


def _where_it_is_first(
    model: ModelSpec, kind: int, work: Point, tokens: int, below: int, one: int
) -> Moment:
    """Return the moment when the last layer of a kind to run backward does: most gradients exist."""
    place = model.layer_order.index(kind)
    return Moment(below + work.at(tokens) + (place + 1) * one, work.weight_grads, place + 1)


def _outliving(r: Resolved, leaf: int, arguments: int) -> int:
    """Return what the graph of held outputs keeps: a leaf and its gradient, and the arguments that a
    reentrant checkpoint's function is bound to."""
    if not r.switches.keeps_outputs:
        return 0
    return 2 * leaf + (arguments if r.switches.reentrant else 0)


def _rest_of_segment(model: ModelSpec, settings: OpSettings, tokens: int, every: int) -> int:
    """Return what the other layers of a segment keep while one of them runs backward."""
    if every == 1:
        return 0
    graphs = [kept_costs(layer, model.hidden, settings).kept for layer in model.layers]
    return (every - 1) * max(graph.at(tokens) for graph in graphs)


def _autocast_cache(model: ModelSpec, r: Resolved, settings: OpSettings) -> int:
    """Return the casts of trained fp32 weights that autocast keeps until the forward is over."""
    if not settings.autocast or settings.compiled:  # a graph casts for itself
        return 0
    if not settings.full:
        wide = settings.adapter != settings.act
        return adapters(model, r).parameters * settings.act if wide else 0
    if settings.weight == settings.act:
        return 0
    return sum(
        layer.count * kept_costs(layer, model.hidden, settings).kept.constant
        for layer in model.layers
    )


def pinned(size: int, r: Resolved) -> int:
    """Return host bytes of one offloaded block.

    torch's pinned allocator rounds up to a power of two; one exact registered slab does not.
    """
    if r.switches.exact_host_slab:
        return size
    return 1 << (size - 1).bit_length() if size else 0


def dequantized(model: ModelSpec, r: Resolved) -> int:
    """Return bytes of the largest weight while it is dequantised for a matmul."""
    return base_weights(model, r).largest_quantized * element_bytes(r.compute_dtype)
