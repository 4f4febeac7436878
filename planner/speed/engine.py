"""How fast an engine generates: a prefill that computes, and decoding steps that read weights and cache.

A decoding step reads every weight that some sequence needs and the keys and values of all of them, sums
over tensor ranks, and pays the engine's own time: Python between steps, or eager launches where no graph
is replayed. A batch shrinks as its sequences end.
"""

from dataclasses import replace
from typing import NamedTuple

from planner.dtypes import element_bytes
from planner.models.spec import LayerSpec, ModelSpec, ModuleKind
from planner.quant.table import BITSANDBYTES
from planner.run.recipe import VLLM, Method
from planner.run.resolved import Resolved
from planner.speed.cards import TERA, CardSpeed
from planner.speed.counts import layer_counts
from planner.speed.parameters import Parameters
from planner.speed.roofline import (
    BANDWIDTH,
    COMPUTE,
    HOST,
    LAUNCHES,
    LINK,
    LINK_SHARE,
    SHEET_SHARE,
    Seconds,
)
from planner.speed.spread import kind_of
from planner.speed.work import attention_flops, layer_products, timed_settings
from planner.terms.counts import base_weights
from planner.terms.kv_cache import sequence_bytes
from planner.terms.vllm_weights import expert_bytes, vllm_weights

FUSED = frozenset({"rmsnorm", "swiglu", "rope"})
"""Kernels of vLLM's layers (vllm/model_executor/layers: RMSNorm, SiluAndMul, rotary_embedding)."""
MULTIPROCESSORS = 100
"""Of a data-centre or large consumer card, about (A100 108, H100 132, 3090 82, 4090 128)."""
SAMPLING_LAUNCHES = 12
"""Of a step outside the layers: embedding, norm, head, softmax and sampling."""


EXLLAMA = "gptq-4bit"
"""A scheme whose kernel in transformers multiplies packed weights as they are (ExLlama): one launch, as of
16-bit weights."""


class EngineWork(NamedTuple):
    """What decides an engine's steps; one rank's part."""

    always_bytes: float
    """Weights that every step reads."""
    expert_bytes: float
    """Weights of all routed experts."""
    experts: int
    top_k: int
    graphs_off: bool
    """vLLM without graphs: its own time a step comes on top of the launches'."""
    ahead: bool
    """It schedules the next step while this one runs, so that its own time is hidden behind the device's."""
    moved: float
    """Bytes of activations that a token moves: inputs and outputs of products, and what lies between them."""
    kernels: float
    """Of one step, replayed from a graph; 0: none is."""
    active: float
    """Parameters that a token meets."""
    active_experts: float
    """Those of its routed experts among them."""
    dtype: str
    """Of products: that of packed weights where the card multiplies them as they are, else the 16 bits they are
    unpacked into."""
    launches: float
    """Of one step without a graph."""
    beyond: float
    """The same of a step whose sequences are longer than CAPTURED tokens; 0: graphs cover every length."""
    ranks: int
    stages: int
    """Of a pipeline, one after another."""
    reductions: float
    """Sums over tensor ranks in one step."""
    hidden: int
    unpacked: float
    """Elements that bitsandbytes dequantises in every step, those of experts apart."""
    unpacked_experts: float
    """The same of all routed experts."""
    heads: int
    """Query heads of a layer, where a sequence's attention is one block a head (SDPA); 0: a split kernel."""
    groups: float
    """Query heads a key head, for each of which keys and values are copied."""

    def passes(self, batch: float) -> float:
        """Return how often a step reads or writes the whole cache.

        vLLM's kernels read it once. transformers joins it to the new token (read, written:
        DynamicLayer.update), repeats keys and values for every query head (repeat_kv: read, written), and
        SDPA reads that with one block a head and sequence: fewer blocks than multiprocessors are as slow.
        """
        if not self.heads:
            return 1.0
        reading = max(1.0, MULTIPROCESSORS / (batch * self.heads))
        return 2 + (1 + self.groups if self.groups > 1 else 0) + self.groups * reading


class Engine(NamedTuple):
    """An engine on a card."""

    model: ModelSpec
    r: Resolved
    card: CardSpeed
    p: Parameters
    work: EngineWork
    memo: dict[int, float]
    """Cache bytes of a sequence by its length."""

    @property
    def kind(self) -> str:
        """How well its times are known."""
        w = self.work
        return kind_of(trains=False, gpus=w.ranks, launches=bool(w.launches))

    def decode(self, batch: float, context: float) -> Seconds:
        """Return one step of `batch` sequences that are `context` tokens long."""
        w, p = self.work, self.p
        share = 1.0
        if w.experts:
            at_once = max(1.0, batch / w.stages)
            share = 1 - (1 - min(1.0, w.top_k / w.experts)) ** at_once
        reached = self.card.bandwidth * p.decode_bandwidth
        weights = (w.always_bytes + w.expert_bytes * share) / reached
        elements = w.unpacked + w.unpacked_experts * share
        # one row has a kernel of its own (bitsandbytes matmul_4bit): it looks elements up while it reads them
        if batch > 1:
            weights += self.unpacking(elements)
        elif elements:
            weights = max(weights, self.looking_up(elements))
        # every stage works on a part of the batch: in a round it reads its weights for each of them
        parallel = max(1.0, min(batch, w.stages))
        cache = batch / parallel * self.cache_bytes(context) * w.passes(batch / parallel) / reached
        computing = batch / parallel * self.computing()
        summing = self.summing(batch / parallel)
        own = batch * p.sequence_s
        launches = w.launches or (w.beyond if context > CAPTURED else 0.0)
        if launches:
            steps = w.graphs_off or not w.launches  # vLLM's own time comes on top
            own += launches * p.generate_launch_s + (p.engine_step_s if steps else 0)
            device = max(weights + cache, computing)
            return Seconds(max(own, device) + summing, LAUNCHES if own > device else BANDWIDTH)
        own += p.engine_step_s
        moving = w.moved * batch / parallel / reached
        device = weights + cache + computing + moving + w.kernels * p.kernel_s
        parts = {BANDWIDTH: weights + cache, COMPUTE: computing, LINK: summing, HOST: own}
        bound = max(parts, key=lambda name: parts[name])
        if w.ahead:
            return Seconds(max(device + summing, own), bound)
        return Seconds(device + summing + own, bound)

    def looking_up(self, elements: float) -> float:
        """Return what the cores take to make so many elements of packed weights."""
        cores = self.card.peaks.get("fp32", 0.0) * self.p.unpack
        return elements / (cores or self.card.bandwidth)

    def unpacking(self, elements: float) -> float:
        """Return what a product of several rows pays beside its packed weights: 16-bit ones are written and read."""
        moved = 2 * elements * element_bytes("bf16")
        return self.looking_up(elements) + moved / (self.card.bandwidth * self.p.decode_bandwidth)

    def cache_bytes(self, context: float) -> float:
        """Return what one sequence's keys and values take on a rank."""
        tokens = max(1, int(context))
        if tokens not in self.memo:
            held = sequence_bytes(self.model, tokens, self.r.kv_dtype)
            self.memo[tokens] = held / self.work.ranks
        return self.memo[tokens]

    def computing(self) -> float:
        """Return what one token's products take on a rank, those of its routed experts at their own share."""
        w, p = self.work, self.p
        best, known = self.card.ceiling(w.dtype)
        best *= 1.0 if known else SHEET_SHARE
        dense = w.active - w.active_experts
        return 2 * (dense / p.product + w.active_experts / p.engine_product) / w.ranks / best

    def summing(self, tokens: float) -> float:
        """Return what tensor ranks take to sum in one step of `tokens` tokens."""
        w = self.work
        if w.ranks < 2:
            return 0.0
        link = self.card.link(w.ranks)
        moved = 2 * (w.ranks - 1) / w.ranks * tokens * w.hidden * element_bytes("bf16")
        # over NVLink every rank reads all others' parts at once; over PCIe one after another
        rounds = 1 if link == self.card.nvlink else w.ranks - 1
        return w.reductions * (rounds * self.p.reduce_s + moved / (link * LINK_SHARE))

    def prefill(self, prompts: float, length: float) -> Seconds:
        """Return how long `prompts` prompts of `length` tokens take."""
        w, p, r = self.work, self.p, self.r
        tokens = prompts * length
        if not tokens:
            return Seconds(0.0, COMPUTE)
        attention = sum(
            layer.count * attention_flops(layer, tokens, length) for layer in self.model.layers
        )
        best, known = self.card.ceiling(_product_dtype(r, self.card))
        best *= 1.0 if known else SHEET_SHARE
        computing = tokens * self.computing()
        computing += attention / w.ranks / (min(best * p.attention, p.attention_tflops * TERA))
        chunks = max(1.0, tokens / max(1, r.max_num_batched_tokens or tokens))
        reading = (
            chunks * (w.always_bytes + w.expert_bytes) / (self.card.bandwidth * p.decode_bandwidth)
        )
        reading += chunks * self.unpacking(w.unpacked + w.unpacked_experts)
        reading += tokens * w.moved / (self.card.bandwidth * p.decode_bandwidth)
        own = chunks * (w.launches * p.generate_launch_s or p.engine_step_s)
        total = computing + reading + own + self.summing(tokens)
        total /= max(1.0, min(chunks, w.stages))  # stages read different chunks at once
        return Seconds(total, COMPUTE if computing > reading + own else BANDWIDTH)

    def generate(
        self,
        sequences: int,
        prompt: float,
        lengths: tuple[float, ...],
        *,
        prompts: float,
        at_once: int,
    ) -> tuple[Seconds, Seconds]:
        """Return prefill and decoding of `sequences` completions, whose lengths are spread like `lengths`.

        `prompts`: different ones, each read once. Waves of `at_once` sequences follow each other; in
        each the batch shrinks as sequences end.
        """
        first = self.prefill(prompts, prompt)
        ordered = sorted(lengths)
        at_once = max(1, min(at_once, sequences))
        total = 0.0
        bound: dict[str, float] = {}
        done = 0.0
        # between two quantiles the batch is constant; a free place goes to a waiting sequence
        waiting = max(0, sequences - at_once)
        mean = sum(ordered) / len(ordered)
        if waiting:
            steps = waiting * mean / at_once
            step = self.decode(at_once, prompt + mean / 2)
            total += steps * step.seconds
            bound[step.bound_by] = bound.get(step.bound_by, 0.0) + steps * step.seconds
        for index, length in enumerate(ordered):
            steps = length - done
            if steps <= 0:
                continue
            running = at_once * (len(ordered) - index) / len(ordered)
            step = self.decode(max(1.0, running), prompt + done + steps / 2)
            total += steps * step.seconds
            bound[step.bound_by] = bound.get(step.bound_by, 0.0) + steps * step.seconds
            done = length
        return first, Seconds(
            total, max(bound, key=lambda name: bound[name]) if bound else BANDWIDTH
        )


def engine(model: ModelSpec, r: Resolved, card: CardSpeed, p: Parameters) -> Engine:
    """Return the engine of a run."""
    return Engine(model, r, card, p, engine_work(model, r, card), {})


def engine_work(
    model: ModelSpec, r: Resolved, card: CardSpeed, release: tuple[int, ...] = ()
) -> EngineWork:
    """Return what decides the steps of a run's engine; `release`: vLLM's, of a law that several share."""
    vllm = r.engine in VLLM
    release = release or _least_release(r)
    ranks = max(1, r.tensor_parallel)
    width = element_bytes(r.dtype)
    base = base_weights(model, r)
    routed = sum(
        layer.count * module.parameters
        for layer in model.layers
        for module in layer.modules
        if module.kind is ModuleKind.EXPERTS
    )
    whole: float
    stages = max(1, r.pipeline_parallel) if vllm else 1
    if vllm:
        whole = vllm_weights(model, r).modules * stages
        in_experts = float(expert_bytes(model, r) * stages) if routed else 0.0
    else:
        whole = base.total / ranks
        packed = base.quantized / base.quantized_parameters if base.quantized else 0.0
        in_experts = routed * (packed if routed <= base.quantized_parameters else width) / ranks
    looked_up = sum(module.parameters for module in model.embeddings) * width / ranks
    if not model.tied:
        whole -= looked_up
    whole -= sum(module.parameters for module in model.towers) * width / ranks
    experts = max((layer.mlp.num_experts for layer in model.layers), default=0)
    top_k = max((layer.mlp.top_k for layer in model.layers), default=0)
    chosen_k = top_k  # by the router
    if not vllm and model.model_type in r.switches.linear_expert_models:
        top_k = experts  # unsloth-zoo gpt_oss.py GptOssExpertsBnb4bit: outside of training every expert takes every row
    scheme = r.quantization or model.checkpoint_quantization
    native = _native(scheme, card)
    started = _launches(model, r, fused=vllm)
    graphs = vllm and bool(r.cuda_graphs)
    unpacked = base.quantized_parameters if scheme in BITSANDBYTES else 0
    in_unpacked = routed if routed <= unpacked else 0  # fused experts stay in 16 bits
    met, chosen = (routed * k / experts if experts else 0.0 for k in (top_k, chosen_k))
    read = model.active_parameters - (0 if model.tied else looked_up * ranks / width)
    return EngineWork(
        always_bytes=max(0.0, whole - in_experts),
        expert_bytes=in_experts,
        experts=experts,
        top_k=top_k,
        graphs_off=vllm and not r.cuda_graphs,
        ahead=vllm and release >= SCHEDULES_AHEAD,
        moved=sum(layer.count * _moved(layer, model.hidden, ranks) for layer in model.layers),
        kernels=sum(layer.count * _kernels(layer) for layer in model.layers) if graphs else 0.0,
        active=read + met - chosen,
        active_experts=met,
        dtype=native or _product_dtype(r, card),
        launches=0.0 if graphs else started,
        beyond=started if graphs and release < ANY_LENGTH else 0.0,
        ranks=ranks,
        stages=stages,
        reductions=2.0 * model.num_layers if ranks > 1 else 0.0,
        hidden=model.hidden,
        unpacked=(unpacked - in_unpacked) / ranks,
        unpacked_experts=in_unpacked / ranks,
        heads=0 if vllm else max((m.num_heads for x in model.layers for m in x.mixers), default=0),
        groups=1.0 if vllm else _groups(model),
    )


SCHEDULES_AHEAD = (0, 14)
"""vLLM's release from which asynchronous scheduling is the default."""
ANY_LENGTH = (0, 6)
"""vLLM's release from which graphs are replayed whatever the sequences' length (CAPTURED)."""


CAPTURED = 8192
"""Tokens that graphs of releases before 0.6 cover (max_seq_len_to_capture's default): of longer sequences every
kernel is launched. Rows of 0.6 are flat across that length, so later ones are not held to it."""


def _least_release(r: Resolved) -> tuple[int, ...]:
    """Return the first vLLM release of a run's law; trainers that bring vLLM along have a new one."""
    if not r.framework.name.startswith("vllm"):
        return SCHEDULES_AHEAD
    least = r.framework.versions.removeprefix(">=").split(",")[0].split(".")
    return tuple(int(part) for part in least[:2]) if least[0].isdigit() else SCHEDULES_AHEAD


def _groups(model: ModelSpec) -> float:
    """Return query heads a key head, at most."""
    found = [
        mixer.num_heads / mixer.num_kv_heads
        for layer in model.layers
        for mixer in layer.mixers
        if mixer.num_kv_heads
    ]
    return max(found, default=1.0)


def _moved(layer: LayerSpec, hidden: int, ranks: int) -> float:
    """Return the bytes of activations that one token moves through a layer of vLLM's, on one of `ranks` tensor ranks.

    Of products what they read and write; sums with norms (two, each of two read and two written), rotary on queries
    and keys, SwiGLU, and a mixture's sum over its experts' outputs. What is as wide as the stream is on every rank.
    """
    mlp = layer.mlp
    chosen = mlp.top_k if mlp.num_experts else 0
    whole, inside = float(8 * hidden + (chosen and (chosen + 1) * hidden)), 0.0
    for mixer in layer.mixers:
        inside += 2 * (mixer.num_heads + mixer.num_kv_heads) * mixer.head_dim
    inside += 3 * (mlp.intermediate * max(1, chosen) + mlp.shared_intermediate)
    for each in layer_products(layer, MANY):
        rows = each.rows * each.times / MANY
        for width in (each.into, each.out):
            if width == hidden:
                whole += rows * width
            else:
                inside += rows * width
    return (whole + inside / ranks) * element_bytes("bf16")


def _kernels(layer: LayerSpec) -> int:
    """Return the kernels of one layer in a graph of vLLM's (models/llama.py, layers/fused_moe/fused_moe.py).

    Two norms, the mixer's two products, rotary, cache, attention (or convolution and recurrence), the MLP's two and
    SwiGLU; of a mixture router, choice, order and sum as well; shared experts are an MLP of their own.
    """
    mlp = layer.mlp
    return 10 + 4 * bool(mlp.num_experts) + 3 * bool(mlp.shared_intermediate)


MANY = 8192
"""Tokens of a pass in which every expert has rows."""


def _product_dtype(r: Resolved, card: CardSpeed) -> str:
    """Return the dtype of an engine's products that are not packed: fp16 on cards without bf16 units."""
    without = "bf16" not in card.peaks and "fp16" in card.peaks
    return "fp16" if r.compute_dtype == "bf16" and without else r.compute_dtype


def _native(scheme: str, card: CardSpeed) -> str:
    """Return the dtype in which a card multiplies packed weights as they are; empty: in 16 bits."""
    if "fp8" in scheme and card.peaks.get("fp8"):
        return "fp8"
    if scheme in ("nvfp4", "mxfp4", "fp4") and card.peaks.get("fp4"):
        return "fp4"
    return ""


def _launches(model: ModelSpec, r: Resolved, *, fused: bool) -> float:
    # a policy's adapters stay beside its weights while transformers generate; vLLM's are in its graphs
    adapted = r.trains and r.method is not Method.FULL and not fused
    run = replace(r, lora_dropout=0.0) if adapted else replace(r, trains=False, method=Method.FULL)
    multiplied = run.quantization not in BITSANDBYTES if fused else r.quantization == EXLLAMA
    if multiplied:  # as they are, by one kernel
        run = replace(run, quantization="")
    settings = timed_settings(model, run)
    if fused:
        settings = settings._replace(fused=settings.fused | FUSED)
    elif r.switches.generates_unfused:
        settings = settings._replace(fused=frozenset())
    total = sum(
        layer.count * layer_counts(layer, model.hidden, settings).forward.launches
        for layer in model.layers
    )
    return total + SAMPLING_LAUNCHES
