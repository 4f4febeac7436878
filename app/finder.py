"""What fits where: recommendations for a machine and machines for a model, filtered. No Streamlit here."""

from typing import Any

from app.runs import Sent, received
from planner.answers.recommend import Recommendation, recommend
from planner.errors import VramwiseError
from planner.machines.machine import GpuSpec, gpu_catalogue, make_machine
from planner.models.spec import ModelSpec
from planner.plan import plan
from planner.run.recipe import MachineSection
from planner.run.runfile import machine_of, make_recipe
from planner.units import format_bytes

METHODS = ("qlora", "lora", "full")
SIZES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0)
"""Steps of the slider of sizes, each twice the one before: most models are small."""
KINDS = ("consumer", "workstation", "datacenter", "unified", "embedded", "mig")


def recommended(
    section: str,
    task: str,
    least: int,
    framework: str,
    search: str = "",
    sizes: tuple[float, float] = (0.0, float("inf")),
    limit: int = 40,
) -> list[Recommendation]:
    """Return the best rows that fit a machine (a MachineSection as JSON), of models by name and size (billions).

    The job of a worker.
    """
    machine = machine_of(MachineSection.model_validate_json(section))
    words = search.lower().split()
    low, high = sizes

    def wanted(name: str, model: ModelSpec) -> bool:
        return low <= model.parameters / 1e9 <= high and all(word in name for word in words)

    return recommend(
        machine, task=task, least_context=least, framework=framework, wanted=wanted, limit=limit
    )


def heat_rows(found: list[Recommendation]) -> list[dict[str, Any]]:
    """Return the heat map's cells."""
    lengths = [row.context for row in found]
    middle = (min(lengths, default=1) * max(lengths, default=1)) ** 0.5
    return [
        {
            "model": row.model,
            "method": row.method,
            "context": row.context,
            "batch": row.batch,
            "peak": format_bytes(row.peak_bytes),
            "settings": row.settings,
            "said": tokens_label(row.context),
            # dark text on the bright half of the scale
            "bright": row.context >= middle,
        }
        for row in found
    ]


def tokens_label(tokens: int) -> str:
    """Return 32768 as "32K"."""
    return f"{tokens // 1024}K" if tokens >= 1024 else str(tokens)


def every_machine(sent: Sent, context: int) -> list[dict[str, Any]]:
    """Return the cells of a run's model, task and framework; the job of a worker."""
    run = received(sent)
    task, framework, gpus = run.recipe.task.value, run.recipe.framework, run.section.gpus
    methods = METHODS if task != "serve" else ("lora",)
    cells = []
    cards = [gpu for gpu in gpu_catalogue().values() if gpu.torch_total_bytes]
    for gpu in sorted(cards, key=lambda card: (card.torch_total_bytes or 0, card.id)):
        for method in methods:
            cell = _cell(run.model, gpu, gpus, task, method, context, framework)
            if cell is not None:
                cells.append(cell)
    return cells


def _cell(
    model: ModelSpec,
    gpu: GpuSpec,
    gpus: int,
    task: str,
    method: str,
    context: int,
    framework: str,
) -> dict[str, Any] | None:
    sharding = "fsdp" if gpus > 1 and task != "serve" else "none"
    try:
        recipe = make_recipe(
            task=task, method=method, framework=framework, context=context, sharding=sharding
        )
        result = plan(model, recipe, make_machine(gpu.id, gpus=gpus))
    except VramwiseError:
        return None
    return {
        "gpu": gpu.id,
        "kind": gpu.kind,
        "method": method if task != "serve" else "serve",
        "verdict": result.verdict,
        "peak": format_bytes(result.peak_bytes, digits=1),
        "headroom": format_bytes(result.headroom_bytes, digits=1),
        "said": _signed(result.headroom_bytes),
        "memory": format_bytes(gpu.torch_total_bytes or 0, digits=1),
        "name": gpu.name,
    }


def _signed(num_bytes: int) -> str:
    """Return headroom with its sign: what is left, or what is missing."""
    return ("+" if num_bytes >= 0 else "") + format_bytes(num_bytes, digits=1)
