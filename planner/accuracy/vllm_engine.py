"""A vLLM log's columns -> the engine it describes: weights, activations, KV pool."""

import re
from dataclasses import dataclass

from planner.accuracy.names import machine_named, model_named
from planner.accuracy.prediction import NotCovered
from planner.accuracy.rows import Row
from planner.machines.machine import Machine
from planner.models.spec import MixerKind, ModelSpec
from planner.run.recipe import LoraSection, Method, Recipe, Task
from planner.run.resolve import resolve
from planner.terms.counts import adapters, base_weights
from planner.terms.vllm_blocks import VllmKv, vllm_kv
from planner.units import GiB

_SCHEMES = (
    (r"nvfp4", "nvfp4"),
    (r"mxfp4", "mxfp4"),
    (r"gptq|auto_round|autoround|int4|kimi-k2-think", "gptq-4bit"),
    (r"awq", "awq-4bit"),
    (r"bitsandbytes|bnb|nf4|4.?bit", "nf4"),
    (r"fp8", "fp8"),
)
GGUF_BYTES = {"q8_0": 34 / 32, "q4_k_m": 4.85 / 8, "q4_0": 18 / 32}
"""Bytes per weight, embeddings included: q8_0 and q4_0 blocks of 32 with an fp16 scale; q4_k_m mixes
4.5-bit and 6.6-bit blocks (llama.cpp's own table)."""
SAMPLER_BYTES_OLD = 39
"""Per sequence and vocabulary entry: fp32 logits, sort keys, int64 indices and probabilities of the
full-batch sampler run of the profile (before 0.13)."""
SAMPLER_BYTES_NEW = 8.6
_LATENT_DOWN = frozenset({"q_a_proj", "kv_a_proj_with_mqa"})
DEFAULT_LORA_RANK = 16
PADDED_LATENT = 640
"""V0 of early 2025 padded MLA rows of 576 to a multiple of 128."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What a log says about its engine."""

    model: ModelSpec
    text: str
    scheme: str
    tp: int
    pp: int
    version: str
    v1: bool
    max_len: int
    max_seqs: int
    batched_tokens: int
    block: int
    kv_dtype: str
    lora_rank: int
    total_bytes: int | None
    utilisation: float | None
    notes: str
    online: bool = False
    """Quantised while loading, every linear of the model."""

    def weights_bytes(self) -> int:
        """Return the weights one GPU holds after loading, LoRA slots and rotary cache included."""
        model = self.model
        for name, per_weight in GGUF_BYTES.items():
            if name in self.text.lower():
                return int(model.parameters * per_weight / self.tp) + self._rotary()
        machine = Machine(vram_bytes=80 * GiB)
        recipe = Recipe(task=Task.SERVE, quantization=self.scheme or "none", framework="vllm")
        resolved = resolve(model, recipe, machine)
        total = base_weights(model, resolved).total
        if self.online:
            total -= sum(tower.parameters for tower in model.towers)  # towers' linears too
        share = int(total / (self.tp * self.pp))
        return share + self._latent() + self._rotary() + self._lora()

    def _latent(self) -> int:
        """Return what MLA adds on one rank: unsharded down-projections and absorbed matrices."""
        element, size = (1 if self.scheme.startswith("fp8") else 2), 0
        for layer in self.model.layers:
            mixer = layer.mixer
            if mixer.kind is not MixerKind.MLA:
                continue
            down = sum(m.parameters for m in layer.modules if m.leaf in _LATENT_DOWN)
            size += layer.count * element * down * (self.tp - 1) // self.tp
            heads, rank = mixer.num_heads // self.tp, mixer.kv_lora_rank
            # W_UK and W_UV, 16-bit, taken out of kv_b_proj
            nope = mixer.qk_nope_head_dim + mixer.v_head_dim
            size += layer.count * 2 * heads * rank * nope
            if not self.v1 and self.version.startswith("0.7"):
                # that release multiplied them into the query and output projections
                inputs = mixer.q_lora_rank or self.model.hidden
                size += layer.count * element * heads * rank * (inputs + self.model.hidden)
        return size

    def _rotary(self) -> int:
        mixer = self.model.layers[self.model.layer_order[-1]].mixer
        width = mixer.qk_rope_head_dim or mixer.head_dim
        return 2 * self.model.max_position * width

    def _lora(self) -> int:
        if not self.lora_rank:
            return 0
        section = LoraSection(rank=self.lora_rank, targets="all-linear")
        recipe = Recipe(task=Task.SFT, method=Method.LORA, lora=section)
        resolved = resolve(self.model, recipe, Machine(vram_bytes=80 * GiB))
        return 2 * adapters(self.model, resolved).parameters // self.tp

    def activation_bytes(self) -> int:
        """Return the profile run's activations: prefill or sampler, whichever is larger."""
        model = self.model
        widest = max((layer.mlp.intermediate for layer in model.layers), default=0)
        widest = widest or 4 * model.hidden
        prefill = self.batched_tokens * 2 * (2 * model.hidden + 3 * widest // self.tp)
        per_entry = SAMPLER_BYTES_NEW if self._newer(0, 13) else SAMPLER_BYTES_OLD
        return max(prefill, int(per_entry * self.max_seqs * model.vocab))

    def _newer(self, major: int, minor: int) -> bool:
        found = re.search(r"(\d+)\.(\d+)", self.version)
        return found is not None and (int(found[1]), int(found[2])) >= (major, minor)

    def pool(self, kv_bytes: float) -> VllmKv:
        """Return how vLLM cuts a pool of `kv_bytes` on one GPU."""
        model, share = self.model, 1.0
        mixers = [layer.mixer for layer in model.layers]
        heads = max((m.num_kv_heads or m.num_heads for m in mixers), default=1)
        if not any(m.kind is MixerKind.MLA for m in mixers):
            share = min(self.tp, heads)
            if "bigcode" in model.model_type and self.version.startswith("0.1"):
                share = self.tp / max(m.num_heads for m in mixers)  # MQA stored as full heads
        elif not self.v1 and "ALIGN_KV_CACHE=0" not in self.notes:
            mixer = next(m for m in mixers if m.kind is MixerKind.MLA)
            share = (mixer.kv_lora_rank + mixer.qk_rope_head_dim) / PADDED_LATENT
        if "EAGLE" in self.text:
            share *= model.num_layers / (model.num_layers + 1)  # the draft's one layer
        return vllm_kv(
            model,
            kv_bytes=int(kv_bytes * share * self.pp),
            max_model_len=self.max_len,
            kv_dtype=self.kv_dtype,
            block_size=self.block,
            in_flight_tokens=self.batched_tokens * (2 if self.v1 else 1),
        )

    def budget_bytes(self) -> float:
        """Return utilisation x total; raises NotCovered when the log has no card."""
        if self.total_bytes is None:
            raise NotCovered("the log names neither a card nor its memory")
        return self.total_bytes * (self.utilisation or (0.92 if self._newer(0, 17) else 0.9))


def engine_of(row: Row) -> Engine:
    """Return the engine of a log row (vllm.csv, or a GRPO notebook's row of rl.csv)."""
    text = row["model"]
    model = model_named(text)
    version = row["vllm_version"].lstrip("~")
    v1 = row["engine"] == "V1"
    max_len = row.integer("max_model_len") or row.integer("seq_len") or model.max_position
    batched = row.integer("max_num_batched_tokens") or _batched_tokens(v1, max_len)
    total = row.number("total_gpu_memory_gib") or _printed_total(row["gpu"])
    named = row["gpu"] and not re.search(r"not named|class|^\(|AMD|WSL|size not", row["gpu"])
    if total is None and named:
        total = machine_named(row["gpu"]).vram_bytes / GiB
    return Engine(
        model=model,
        text=text,
        scheme=_scheme(row, text),
        tp=row.integer("tp") or 1,
        pp=row.integer("pp") or 1,
        version=version,
        v1=v1,
        max_len=max_len,
        max_seqs=row.integer("max_num_seqs") or 256,
        batched_tokens=batched,
        block=row.integer("block_size") or 16,
        kv_dtype="fp8" if row["kv_cache_dtype"].startswith("fp8") else "bf16",
        lora_rank=_lora_rank(row),
        total_bytes=int(total * GiB) if total else None,
        utilisation=row.number("gpu_memory_utilization") or row.number("vllm_gpu_mem_util"),
        notes=row["notes"],
        online="online" in row["quantization"] or "--quantization" in text,
    )


def _batched_tokens(v1: bool, max_len: int) -> int:
    """Return the default of the profile's batch: V0 chunks prompts only above 32K."""
    if v1:
        return 8192
    return 2048 if max_len > 32768 else max(max_len, 2048)


def _printed_total(text: str) -> float | None:
    found = re.search(r"\(([\d.]+) GiB\)", text)
    return float(found[1]) if found else None


def _scheme(row: Row, text: str) -> str:
    words = f"{row['quantization']} {row['dtype']} {text}".lower()
    return next((scheme for pattern, scheme in _SCHEMES if re.search(pattern, words)), "")


def _lora_rank(row: Row) -> int:
    stated = re.search(r"max_lora_rank=(\d+)", row["notes"])
    if stated:
        return int(stated[1])
    return DEFAULT_LORA_RANK if row["lora_enabled"] == "True" else 0
