"""A model that computes with one decoder layer's weights in memory at a time, read from its safetensors.

Shapes: R rows of T tokens each, H hidden, V vocabulary. It computes in fp32: a bf16 weight is exact in it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from planner.errors import UnsupportedError, UsageError

INDEX_FILE = "model.safetensors.index.json"
Weights = Mapping[str, Tensor]


class Files:
    """The tensors of a checkpoint's folder by name, read one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / INDEX_FILE
        try:
            if index.exists():
                where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                files = sorted(set(where.values()))
            else:
                files = sorted(path.name for path in folder.glob("*.safetensors"))
            self._open = {
                name: safe_open(str(folder / name), framework="pt", device="cpu") for name in files
            }
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            raise UsageError(
                f"model: cannot read the weights in {folder}: {str(error)[:160]}"
            ) from None
        if not self._open:
            raise UsageError(f"model: no safetensors in {folder}")
        self._of = {name: file for file in self._open.values() for name in file.keys()}  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._of[name].get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        return tuple(self._of[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return a tensor's dtype as safetensors names it ("BF16")."""
        return str(self._of[name].get_slice(name).get_dtype())


class Streamed:
    """A causal language model whose decoder layers get their weights when they compute."""

    def __init__(self, source: Path, *, device: torch.device) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.device, self.files = device, Files(source)
        try:
            config = AutoConfig.from_pretrained(str(source))
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(
                    config, dtype=torch.float32, attn_implementation="sdpa"
                )
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            raise UsageError(
                f"model: cannot build {str(source)!r} ({str(error).splitlines()[0][:200]})"
            ) from None
        self.model = model.eval().requires_grad_(False)
        self._make_buffers()
        decoder = model.get_decoder()
        layers = getattr(decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise UnsupportedError(
                f"model: {type(model).__name__} has no list of decoder layers to go through"
            )
        self._decoder, self.layers = decoder, list(layers)
        named = {module: name for name, module in model.named_modules()}
        self.layer_names = [named[layer] for layer in self.layers]
        self._check_names()

    @property
    def head(self) -> str:
        """The name of the module that makes logits."""
        module = self.model.get_output_embeddings()
        return next(
            (name for name, each in self.model.named_modules() if each is module), "lm_head"
        )

    def linears(self, layer: int) -> dict[str, nn.Linear]:
        """Return the linears of one layer by their full names."""
        name = self.layer_names[layer]
        return {
            f"{name}.{inside}": module
            for inside, module in self.layers[layer].named_modules()
            if isinstance(module, nn.Linear)
        }

    def embedded(self, rows: Tensor, changed: Weights | None = None) -> Tensor:
        """Return what the first layer gets [R, T, H] for token ids [R, T]."""
        seen: list[Tensor] = []

        def keep(hidden: Tensor, _number: int, _given: Any) -> Tensor:
            seen.append(hidden)
            return hidden

        with torch.no_grad(), self._outside(changed):
            for row in rows:
                self._through(_first_only(keep), input_ids=row.to(self.device).unsqueeze(0))
        return torch.cat(seen)

    def inputs(self, tokens: int) -> list[dict[str, Any]]:
        """Return what each layer is given beside the hidden states of a row of `tokens` tokens.

        Raises UnsupportedError where that depends on the text.
        """
        found: list[list[dict[str, Any]]] = []
        for start in (0, 1):
            given: list[dict[str, Any]] = []

            def keep(hidden: Tensor, _number: int, own: Any, into: list[Any] = given) -> Tensor:
                into.append(own)
                return hidden

            ids = (torch.arange(tokens, device=self.device) + start) % self.model.vocab_size
            with torch.no_grad(), self._outside(None):
                self._through(keep, input_ids=ids.unsqueeze(0))
            found.append(given)
        if not all(_same(*pair) for pair in zip(*found, strict=True)):
            raise UnsupportedError(
                f"model: the layers of {type(self.model).__name__} are given more of each text than its "
                "hidden states, which is not quantised layer by layer"
            )
        return found[0]

    @contextmanager
    def loaded(self, layer: int, changed: Weights | None = None) -> Iterator[nn.Module]:
        """Have one layer's weights in memory inside; those of `changed`, by full name, instead of the files'."""
        with self._held([self.layer_names[layer]], changed):
            yield self.layers[layer]

    def logits(self, hidden: Tensor, changed: Weights | None = None) -> Tensor:
        """Return the logits [T, V] of a row's last hidden states [T, H]; hold `with_head` around many rows."""
        output = self._through(
            lambda _hidden, _number, _own: hidden.unsqueeze(0),
            inputs_embeds=torch.zeros_like(hidden).unsqueeze(0),
        )
        logits: Tensor = output.logits[0]
        return logits.float()

    @contextmanager
    def with_head(self, changed: Weights | None = None) -> Iterator[None]:
        """Have what is outside the layers in memory: final norm and head."""
        with self._outside(changed):
            yield

    def _through(self, instead: Callable[[Tensor, int, Any], Tensor], **inputs: Any) -> Any:
        """Run the model with `instead` in place of each layer."""
        own = self._decoder.layers
        self._decoder.layers = nn.ModuleList(
            _InPlace(instead, number, layer) for number, layer in enumerate(self.layers)
        )
        try:
            return self.model(**inputs, use_cache=False)
        finally:
            self._decoder.layers = own

    def _outside(self, changed: Weights | None) -> Any:
        prefixes = tuple(f"{name}." for name in self.layer_names)
        names = [
            name
            for name, module in self.model.named_modules()
            if module._parameters and not f"{name}.".startswith(prefixes)
        ]
        return self._held(names, changed, deep=False)

    @contextmanager
    def _held(
        self, modules: list[str], changed: Weights | None, *, deep: bool = True
    ) -> Iterator[None]:
        before: list[tuple[nn.Module, str, Any]] = []
        loaded: dict[str, nn.Parameter] = {}
        for root in modules:
            base = self.model.get_submodule(root)
            for inside, module in base.named_modules() if deep else [("", base)]:
                for name, parameter in list(module._parameters.items()):
                    if parameter is None:
                        continue
                    full = self.stored_name(".".join(filter(None, (root, inside, name))))
                    if full not in loaded:
                        tensor = (changed or {}).get(full)
                        tensor = self.files[full] if tensor is None else tensor
                        loaded[full] = nn.Parameter(
                            tensor.to(self.device, torch.float32), requires_grad=False
                        )
                    before.append((module, name, parameter))
                    module._parameters[name] = loaded[full]
        try:
            yield
        finally:
            for module, name, parameter in before:
                module._parameters[name] = parameter

    def stored_name(self, name: str) -> str:
        """Return the name in the files of a parameter: tied ones are there once."""
        if name in self.files:
            return name
        tied = getattr(self.model, "all_tied_weights_keys", {})
        return str(tied.get(name, name))

    def _make_buffers(self) -> None:
        """Make what no file holds: rotary frequencies and the like."""
        for module in self.model.modules():
            if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
                for name, buffer in module.named_buffers(recurse=False):
                    module._buffers[name] = torch.empty_like(buffer, device=self.device)
                self.model._init_weights(module)

    def _check_names(self) -> None:
        for name, parameter in self.model.named_parameters():
            stored = self.stored_name(name)
            if stored not in self.files or self.files.shape(stored) != tuple(parameter.shape):
                raise UnsupportedError(
                    f"model: {name} of {type(self.model).__name__} is stored in another form than it "
                    "computes in (fused experts, or an older checkpoint)",
                    hint="dense models whose files hold each linear by its own name are quantised",
                )


class _InPlace(nn.Module):
    """Stands where a decoder layer is, and tells what the layer would have been given."""

    def __init__(
        self, instead: Callable[[Tensor, int, Any], Tensor], number: int, layer: nn.Module
    ):
        super().__init__()
        self._instead, self._number = instead, number
        # models read such words of their layers: which mask a layer wants
        for word in ("attention_type", "layer_type"):
            if hasattr(layer, word):
                setattr(self, word, getattr(layer, word))

    def forward(self, hidden: Tensor, *args: Any, **given: Any) -> Tensor:
        if args:
            raise UnsupportedError("model: its layers are given more than keywords")
        return self._instead(hidden, self._number, given)


def _first_only(keep: Callable[[Tensor, int, Any], Tensor]) -> Callable[[Tensor, int, Any], Tensor]:
    """Return `keep` for the first layer; the others do nothing."""
    return lambda hidden, number, given: keep(hidden, number, given) if number == 0 else hidden


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping):
        return set(one) == set(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other)
