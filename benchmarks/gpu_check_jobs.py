"""What gpu_check runs and in which order: cases (whole runs) and probes (one question each).

Standard library only: the script reads this before it knows whether torch can be used.
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

PROBE_MODULES = (
    "gpu_check_probe_step",
    "gpu_check_probe_run",
    "gpu_check_probe_device",
    "gpu_check_probe_vllm",
)

RESTART_CODE = 75
"""A worker's exit code after a row: its CUDA context is lost, the next job wants another process."""


class LeftOutError(Exception):
    """This machine cannot run the job; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run to plan, trace and record, in a process of its own."""

    name: str
    kind: str
    """hf-sft, trl-grpo, vramwise-sft or vramwise-grpo."""
    model: str
    method: str
    length: int
    batch: int
    checkpointing: str = "full"
    completion: int = 0
    steps: int = 3
    engine: str = "transformers"
    """Of vramwise-grpo: what generates."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Packages beyond torch and the light set."""
        found = ["transformers", "accelerate"]
        found += ["peft"] * (self.method != "full")
        found += ["bitsandbytes"] * (self.method == "qlora")
        found += ["datasets", "trl"] * (self.kind == "trl-grpo")
        found += ["vllm"] * self.engine.startswith("vllm")
        return tuple(found)

    @property
    def fields(self) -> dict[str, Any]:
        """Everything but the name, JSON-ready."""
        return {key: value for key, value in asdict(self).items() if key != "name"}

    def toy(self) -> "Case":
        """Return the case at a size for a CPU, which has no host to offload to."""
        return replace(
            self,
            length=64,
            completion=8 if self.completion else 0,
            batch=min(self.batch, 4),
            checkpointing="full" if self.checkpointing == "offload" else self.checkpointing,
            steps=2,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One question to the device: the function of that name in one of PROBE_MODULES."""

    name: str
    needs: tuple[str, ...] = ("transformers",)
    gpu_only: bool = False
    alone: bool = False
    """Must be the first in its process to touch CUDA."""
    bf16: bool = True
    """Asks about bf16, which a GPU before compute capability 8 computes only in emulation."""


@dataclass(kw_only=True)
class Outcome:
    """What running a case gave."""

    plan: Any
    recording: Any
    traced_phases: dict[str, int]
    """Phase -> peak of the same step on fake tensors; empty if no traced step expresses the case."""
    step_seconds: list[float]
    """Of every step, the first included."""
    not_compared: dict[str, str] = field(default_factory=dict)
    """Phase (or "*", all of them) -> why a CPU does it otherwise than the planned GPU."""
    more: dict[str, Any] = field(default_factory=dict)


OURS = (
    Case(
        name="grpo-vramwise",
        kind="vramwise-grpo",
        model="llama-3.2-1b",
        method="lora",
        length=512,
        batch=8,
        completion=256,
    ),
    Case(
        name="sft-vramwise",
        kind="vramwise-sft",
        model="llama-3.2-1b",
        method="lora",
        length=4096,
        batch=2,
        steps=5,
    ),
    Case(
        name="sft-vramwise-qlora",
        kind="vramwise-sft",
        model="llama-3.2-1b",
        method="qlora",
        length=8192,
        batch=1,
        checkpointing="offload",
    ),
    Case(
        name="sft-vramwise-full",
        kind="vramwise-sft",
        model="qwen3-0.6b",
        method="full",
        length=2048,
        batch=2,
        checkpointing="offload",
    ),
)
THEIRS = (
    Case(name="sft-full", kind="hf-sft", model="qwen3-0.6b", method="full", length=1024, batch=2),
    Case(name="sft-lora", kind="hf-sft", model="llama-3.2-1b", method="lora", length=2048, batch=4),
    Case(
        name="sft-lora-plain",
        kind="hf-sft",
        model="tinyllama-1.1b",
        method="lora",
        length=1024,
        batch=2,
        checkpointing="none",
    ),
    Case(
        name="sft-qlora", kind="hf-sft", model="llama-3.2-1b", method="qlora", length=2048, batch=4
    ),
    Case(
        name="grpo-trl",
        kind="trl-grpo",
        model="qwen3-0.6b",
        method="full",
        length=512,
        batch=8,
        completion=128,
        steps=2,
    ),
)
CASES = OURS + THEIRS
PROBES = (
    Probe(name="checkpointing"),
    Probe(name="head"),
    Probe(name="out_of_memory", needs=("transformers", "accelerate")),
    Probe(name="optimizer_state", needs=(), bf16=False),
    Probe(name="int8_state", needs=("bitsandbytes",), bf16=False),
    Probe(name="stochastic_rounding", needs=()),
    Probe(name="nf4", needs=("transformers", "accelerate", "peft", "bitsandbytes")),
    Probe(name="generation"),
    Probe(name="host_slab", needs=(), bf16=False),
    Probe(name="recorder", needs=(), bf16=False),
    Probe(name="shared_prefix"),
    Probe(name="profile_run", needs=(), bf16=False),
    Probe(name="workspaces", needs=(), gpu_only=True, alone=True),
    Probe(name="calibration", needs=(), gpu_only=True, alone=True),
)
# ours first: a machine that is taken away keeps what was asked by then
JOBS: tuple[Case | Probe, ...] = (*OURS, *PROBES, *THEIRS)

VLLM_NEEDS = ("vllm", "transformers", "accelerate")
VLLM_JOBS: tuple[Case | Probe, ...] = (
    Probe(name="vllm_shared_full", needs=VLLM_NEEDS, alone=True),
    Probe(name="vllm_shared_lora", needs=(*VLLM_NEEDS, "peft"), alone=True),
    Probe(name="vllm_push_full", needs=VLLM_NEEDS, alone=True),
    Probe(name="vllm_push_lora", needs=(*VLLM_NEEDS, "peft"), alone=True),
    Case(
        name="grpo-vllm-shared",
        kind="vramwise-grpo",
        model="llama-3.2-1b",
        method="lora",
        length=512,
        batch=8,
        completion=256,
        engine="vllm-shared",
    ),
    Case(
        name="grpo-vllm-push",
        kind="vramwise-grpo",
        model="qwen3-0.6b",
        method="full",
        length=512,
        batch=8,
        completion=256,
        engine="vllm-push",
    ),
    Probe(name="vllm_shared_graphs", needs=(*VLLM_NEEDS, "peft"), alone=True, gpu_only=True),
)
"""Of gpu_check_vllm."""


def by_name(name: str) -> Case | Probe:
    """Return the case or probe of that name."""
    return next(job for job in (*JOBS, *VLLM_JOBS) if job.name == name)
