"""What the exporters share: the exported file and the words of each tool."""

from dataclasses import dataclass

import yaml

from planner.run.recipe import Attention, Optimizer, RunFile

HF_OPTIMIZERS: dict[Optimizer, str] = {
    Optimizer.ADAMW: "adamw_torch",
    Optimizer.ADAMW_FUSED: "adamw_torch_fused",
    Optimizer.ADAMW_8BIT: "adamw_bnb_8bit",
    Optimizer.PAGED_ADAMW: "paged_adamw_32bit",
    Optimizer.PAGED_ADAMW_8BIT: "paged_adamw_8bit",
    Optimizer.ADAFACTOR: "adafactor",
    Optimizer.LION: "lion_32bit",
    Optimizer.LION_8BIT: "lion_8bit",
    Optimizer.SGD: "sgd",
}
ATTENTION: dict[Attention, str] = {
    Attention.EAGER: "eager",
    Attention.SDPA: "sdpa",
    Attention.FLASH: "flash_attention_2",
}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A run as another tool's settings."""

    tool: str
    version: str
    filename: str
    text: str
    command: str
    """How that tool is started with the file."""
    left_out: tuple[str, ...]
    """What this tool cannot express, in words."""


class Writer:
    """Collects keys, and says what could not be written."""

    def __init__(self, run: RunFile) -> None:
        self.run = run
        self.recipe = run.recipe
        self.keys: dict[str, object] = {}
        self.left_out: list[str] = []

    def put(self, key: str, value: object) -> None:
        """Set a key unless the value is None."""
        if value is not None:
            self.keys[key] = value

    def lost(self, sentence: str, *, when: object = True) -> None:
        """Note what the tool cannot express."""
        if when:
            self.left_out.append(sentence)

    def optimizer(self) -> str | None:
        """Return the Hugging Face name of the optimizer, or None."""
        chosen = self.recipe.optimizer
        if chosen is None:
            return None
        name = HF_OPTIMIZERS.get(chosen)
        self.lost(f"optimizer {chosen.value}", when=name is None)
        return name

    def adapters(self, *said: str) -> None:
        """Note settings of adapters that the tool has no key for; `said` are those that it has."""
        lora = self.recipe.lora
        given = {
            "from": lora.start_from,
            "use_rslora": lora.use_rslora,
            "init": lora.init if lora.init != "default" else "",
            "bias": lora.bias if lora.bias != "none" else "",
            "target_parameters": ", ".join(lora.target_parameters),
        }
        for name, value in given.items():
            self.lost(f"lora.{name} {value}", when=value and name not in said)

    def quantization(self) -> None:
        """Note a base quantization that only the checkpoint's name could say."""
        from planner.importers.names import quantization_in_name

        chosen = self.recipe.quantization
        written = chosen in (None, "none", "nf4", "int8") or chosen == quantization_in_name(
            self.run.model
        )
        self.lost(f"quantization {chosen}", when=not written)

    def context(self) -> int | None:
        """Return tokens of one sequence, if the recipe says."""
        recipe = self.recipe
        if recipe.context:
            return recipe.context
        if recipe.prompt_length and recipe.completion_length:
            return recipe.prompt_length + recipe.completion_length
        return None

    def targets(
        self, *, all_linear: str, attention: tuple[str, ...], mlp: tuple[str, ...]
    ) -> object:
        """Return LoRA targets in the tool's words."""
        targets = self.recipe.lora.targets
        if targets == "all-linear":
            return all_linear
        if targets in ("attention", "mlp"):
            return list(attention if targets == "attention" else mlp)
        return [targets] if isinstance(targets, str) else list(targets)

    def yaml(self, header: str) -> str:
        """Return the file with its header comment."""
        return f"# {header}\n" + yaml.safe_dump(self.keys, sort_keys=False)
