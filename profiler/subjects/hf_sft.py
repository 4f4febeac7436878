"""The SFT step of the Hugging Face Trainer.

transformers/trainer.py, `training_step`: inputs go to the device, the forward pass runs under
accelerate's autocast and its conversion of the outputs to fp32, `compute_loss` returns the loss and
drops the outputs, then backward; after the last micro-batch clipping, `optimizer.step`, `zero_grad`.
"""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch

from planner.run.recipe import Checkpointing
from planner.terms.overhead import handles
from profiler.materialise import materialise
from profiler.sharded import Shard, allocate, by_kind, divide, on_host, share_layers, synced
from profiler.storages import StorageTracker
from profiler.subjects.autocast import FakeScaler, autocast
from profiler.subjects.build import build
from profiler.subjects.offload import OffloadedCheckpoints
from profiler.subjects.older_versions import matmul_keeps_input, sdpa_repeats_kv, use_loss_of
from profiler.subjects.optimizers import keep_embeddings_in_32_bit, make_optimizer, tag_states
from profiler.subjects.options import StepOptions


class HfSft:
    """Supervised fine-tuning as the HF Trainer runs it."""

    name = "hf-sft"

    def __init__(self, options: StepOptions) -> None:
        self.options = options
        said = "outputs kept alive until the next forward has made new ones"
        self.notes: tuple[str, ...] = (said,) if options.keep_outputs else ()
        config = options.config.get("text_config") or options.config
        self.vocab = int(config.get("vocab_size", 0))
        self.outputs: Any = None
        self.trained_embedding: tuple[int, ...] = ()
        self.padded = options.padded
        self.shard = options.shard
        self.standing_bytes = (options.workspace_bytes,) * handles(trains=True)

    def build(self) -> torch.nn.Module:
        """Return the model on the meta device."""
        model = build(self.options)
        inner: Any = model
        self.vocab = int(inner.config.get_text_config().vocab_size)
        use_loss_of(model, self.options)
        embedding = inner.get_input_embeddings().weight
        self.trained_embedding = tuple(embedding.shape) if embedding.requires_grad else ()
        return model

    def divide(self, model: torch.nn.Module) -> None:
        """Make units of the decoder's layers."""
        if self.shard is not None and self.shard.tensor > 1:
            share_layers(model, self.shard)
        elif self.shard is not None:
            decoder: Any = decoder_of(model)
            divide(model, list(decoder.layers), self.shard)

    def allocate(self, model: torch.nn.Module, tracker: StorageTracker) -> None:
        """Give the model, or this rank's shard of it, memory."""
        if self.shard is None:
            materialise(model, tracker)
        else:
            allocate(model, tracker, self.shard)

    def run(self, model: torch.nn.Module, tracker: StorageTracker) -> None:
        """Run the optimizer steps."""
        options = self.options
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = make_optimizer(options.optimizer, by_kind(trained), tracker)
        keep_embeddings_in_32_bit(model, optimizer)
        if options.checkpointing is Checkpointing.OFFLOAD:
            OffloadedCheckpoints(model)
        scaler = FakeScaler() if options.autocast == "fp16" else None
        if options.warm_optimizer:
            make_state(trained, optimizer, tracker, self.shard)
        kept = matmul_keeps_input(on=options.keeps_matmul_input)
        repeated = sdpa_repeats_kv(on=options.sdpa_repeats_kv)
        with loss_phase(model, tracker), kept, repeated:
            for _ in range(options.steps):
                for number in range(1, options.gradient_accumulation + 1):
                    synced(model, self.shard, last=number == options.gradient_accumulation)
                    self.micro_step(model, tracker, scaler)
                finish_step(options, trained, optimizer, scaler, tracker)
            if options.eval_batches:
                self.outputs = None
                with tracker.in_phase("evaluate"), torch.no_grad():
                    self.evaluate(model.eval())

    def evaluate(self, model: Any) -> None:
        """Run an evaluation as the Trainer's evaluation_loop does, with its own container of logits."""
        from transformers.trainer_pt_utils import EvalLoopContainer

        options = self.options
        kept = EvalLoopContainer(do_nested_concat=True)
        for number in range(1, options.eval_batches + 1):
            shape = (options.eval_rows, options.length)
            tokens = torch.zeros(shape, dtype=torch.long)
            inputs = {"input_ids": tokens, "labels": torch.zeros(shape, dtype=torch.long)}
            if options.padded:
                inputs["attention_mask"] = torch.ones(shape, dtype=torch.long)
            with autocast(options):
                outputs = model(**inputs)
            logits = outputs.logits.float() if options.converts_outputs else outputs.logits
            del outputs
            if not options.eval_logits:  # prediction_step returns the loss alone
                del logits
                continue
            kept.add(logits)
            if options.eval_accumulation and number % options.eval_accumulation == 0:
                kept.tensors = None  # they are on the host now
                del logits

    def inputs(self) -> dict[str, Any]:
        """Return one micro-batch."""
        shape = (self.options.micro_batch, self.options.length)
        made = {
            "input_ids": torch.zeros(shape, dtype=torch.long),
            "labels": torch.zeros(shape, dtype=torch.long),
        }
        if self.options.padded:
            made["attention_mask"] = torch.ones(shape, dtype=torch.long)
        return made

    def micro_step(self, model: Any, tracker: StorageTracker, scaler: FakeScaler | None) -> None:
        """Run forward and backward of one micro-batch."""
        options = self.options
        tracker.phase = "forward"
        inputs = self.inputs()
        with autocast(options):
            outputs = model(**inputs)
        if options.converts_outputs:
            outputs.logits = outputs.logits.float()
        loss = outputs.loss
        self.outputs = outputs if options.keep_outputs else None  # until it is bound again
        del outputs
        del inputs
        loss = loss / options.gradient_accumulation
        if scaler is not None:
            loss = scaler.scale(loss)
        loss.backward()


def make_state(
    trained: list[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    tracker: StorageTracker,
    shard: Shard | None = None,
) -> None:
    """Step once on gradients of zero."""
    with tracker.in_phase("step"), on_host(tracker, shard):
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
            tracker.adopt(parameter.grad, term="gradients", module="")
        optimizer.step()
        tag_states(optimizer, tracker)
        optimizer.zero_grad(set_to_none=True)


def finish_step(
    options: StepOptions,
    trained: list[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    scaler: FakeScaler | None,
    tracker: StorageTracker,
) -> None:
    """Clip, step and drop the gradients, as the Trainer does."""
    with tracker.in_phase("step"), on_host(tracker, options.shard):
        for parameter in trained if options.shard is not None else ():
            if parameter.grad is not None:  # a view of what the reduction left
                tracker.adopt(parameter.grad, term="gradients", module="")
        if scaler is not None:
            scaler.unscale_(optimizer)
        if options.max_grad_norm > 0:
            for group in by_kind(trained):
                torch.nn.utils.clip_grad_norm_(group, options.max_grad_norm, foreach=True)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        tag_states(optimizer, tracker)
        optimizer.zero_grad(set_to_none=True)
        gc.collect()


@contextlib.contextmanager
def loss_phase(model: Any, tracker: StorageTracker) -> Iterator[None]:
    """Make the phase "loss" once the decoder has returned, "backward" once its gradient arrives.

    So the loss phase holds the head and the loss, forward and backward: where logits are alive.
    """
    decoder = decoder_of(model)

    def after(_module: Any, _inputs: Any, output: Any) -> None:
        hidden = output[0]
        if not hidden.requires_grad:
            return
        tracker.phase = "loss"
        hidden.register_hook(lambda _grad: setattr(tracker, "phase", "backward"))

    handle = decoder.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


def decoder_of(model: Any) -> torch.nn.Module:
    """Return the decoder stack under adapters and head."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    named = getattr(inner, inner.base_model_prefix, None)
    if named is None and not hasattr(inner, "get_output_embeddings"):
        named = inner
    bare = named is None and inner.get_output_embeddings() is None
    decoder: torch.nn.Module = (
        inner if bare else named if named is not None else inner.get_decoder()
    )
    return decoder
