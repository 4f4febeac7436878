"""Property tests: a plan is never negative, grows with what should make it grow, and adds up."""

import json
from dataclasses import replace
from functools import cache
from math import isfinite
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.models.spec import ModelSpec
from planner.plan import Plan, plan
from planner.run.recipe import Attention, Checkpointing, EngineKind, Optimizer, Sharding
from planner.run.runfile import make_recipe
from planner.terms.term import TERM_NAMES

MODELS = ("llama-3.2-1b", "gemma-2-2b", "qwen3-30b-a3b", "deepseek-v2-lite", "mamba2-130m")
EXAMPLES = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@st.composite
def recipes(draw: st.DrawFn) -> dict[str, Any]:
    task = draw(st.sampled_from(["sft", "grpo", "dpo"]))
    fields: dict[str, Any] = {
        "task": task,
        "method": draw(st.sampled_from(["full", "lora", "qlora"])),
        "framework": draw(
            st.sampled_from(["vramwise", "trl", "trl-0.15", "unsloth", "hf-trainer"])
        ),
        "context": draw(st.integers(2, 20_000)),
        "micro_batch_size": draw(st.integers(1, 16)),
        "gradient_accumulation": draw(st.integers(1, 4)),
        "checkpointing": draw(
            st.sampled_from([c for c in Checkpointing if not c.startswith("selective")])
        ),
        "attention": draw(st.sampled_from(list(Attention))),
        "optimizer": draw(st.sampled_from(list(Optimizer))),
        "optimizer_offload": draw(st.booleans()),
        "sharding": draw(st.sampled_from(sorted(set(Sharding) - {Sharding.MEGATRON}))),
        "lora": {"rank": draw(st.integers(1, 128)), "targets": "attention"},
        "loss": draw(st.sampled_from(["full", "chunked"])),
    }
    if task == "grpo":
        kind = draw(st.sampled_from(list(EngineKind)))
        fields["num_generations"] = draw(st.integers(1, 16))
        fields["engine"] = {"kind": kind, "sleep_level": draw(st.integers(0, 2))}
    return fields


@cache
def machine(gpus: int) -> Any:
    return make_machine("h100-sxm", gpus=gpus)


def planned(fields: dict[str, Any], model: str | ModelSpec = "llama-3.2-1b", gpus: int = 1) -> Plan:
    spec = catalogue_model(model) if isinstance(model, str) else model
    return plan(spec, make_recipe(**fields), machine(gpus))


def training_peak(result: Plan) -> int:
    names = ("load", "score", "forward", "loss", "backward", "step")
    return max(phase.total_bytes for phase in result.phases if phase.name in names)


@EXAMPLES
@given(fields=recipes(), gpus=st.sampled_from([1, 2, 8]))
def test_a_plan_adds_up(fields: dict[str, Any], gpus: int) -> None:
    result = planned(fields, gpus=gpus)
    for phase in result.phases:
        assert phase.total_bytes == sum(term.bytes for term in phase.terms)
        for term in phase.terms:
            assert term.name in TERM_NAMES
            assert isinstance(term.bytes, int)
            assert term.bytes > 0
            assert term.formula
    assert result.peak_bytes == max(phase.total_bytes for phase in result.phases)
    assert result.low_bytes <= result.reserved_peak_bytes <= result.high_bytes
    assert result.host_peak_bytes == sum(term.bytes for term in result.host_terms) >= 0
    assert result.headroom_bytes == result.capacity_bytes - result.peak_bytes
    assert result.fits is (result.verdict != "does not fit")


@EXAMPLES
@given(fields=recipes())
def test_the_json_document_survives_a_round_trip(fields: dict[str, Any]) -> None:
    document = planned(fields).to_dict()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    for key, value in document.items():
        if key.endswith("_bytes"):
            assert isinstance(value, int)
            assert isfinite(value)


@EXAMPLES
@given(fields=recipes(), more=st.integers(1, 4000))
def test_more_context_never_needs_less(fields: dict[str, Any], more: int) -> None:
    longer = {**fields, "context": fields["context"] + more}
    assert training_peak(planned(longer)) >= training_peak(planned(fields))


@EXAMPLES
@given(fields=recipes(), more=st.integers(1, 8))
def test_a_larger_batch_never_needs_less(fields: dict[str, Any], more: int) -> None:
    if fields["framework"] == "unsloth":  # rounds the batch to the number of generations
        fields = {**fields, "framework": "vramwise"}
    larger = {**fields, "micro_batch_size": fields["micro_batch_size"] + more}
    assert training_peak(planned(larger)) >= training_peak(planned(fields))


@EXAMPLES
@given(fields=recipes(), more=st.integers(1, 64))
def test_a_higher_rank_never_needs_less(fields: dict[str, Any], more: int) -> None:
    fields = {**fields, "method": "lora"}
    lora = {**fields["lora"], "rank": fields["lora"]["rank"] + more}
    assert training_peak(planned({**fields, "lora": lora})) >= training_peak(planned(fields))


@EXAMPLES
@given(fields=recipes(), more=st.integers(1, 20))
def test_more_layers_never_need_less(fields: dict[str, Any], more: int) -> None:
    model = catalogue_model("llama-3.2-1b")
    layer = replace(model.layers[0], count=model.num_layers + more)
    deeper = replace(model, layers=(layer,), layer_order=(0,) * (model.num_layers + more))
    assert training_peak(planned(fields, deeper)) >= training_peak(planned(fields, model))


@settings(EXAMPLES, max_examples=20)
@given(fields=recipes(), model=st.sampled_from(MODELS))
def test_every_kind_of_layer_plans(fields: dict[str, Any], model: str) -> None:
    if model == "mamba2-130m":
        fields = {**fields, "method": "full"}  # PEFT refuses its projections
    result = planned(fields, model)
    assert result.peak_bytes > 0
    assert json.dumps(result.to_dict(), allow_nan=False)
