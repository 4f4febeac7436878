"""Toy models whose sizes are worked out by hand, for the tests named test_hand_*.

LLAMA, the two-hands model: hidden 64, MLP 128, 4 heads of 16 on 2 key heads, 3 layers, vocabulary 1,000.
    q 64x64 = 4,096   k 32x64 = 2,048   v 2,048   o 4,096     gate, up, down 128x64 = 8,192 each
    two norms of 64 = 128: a layer 4,096 + 2,048 + 2,048 + 4,096 + 3 x 8,192 + 128 = 36,992
    embeddings 64,000, head 64,000, final norm 64; all: 3 x 36,992 + 128,064 = 239,040
    linears: 36,864 a layer, 110,592 in three
"""

from dataclasses import replace
from typing import Any

from planner.families import model_spec_from_config
from planner.machines.machine import Machine, make_machine
from planner.models.spec import ModelSpec
from planner.plan import Plan, plan
from planner.run.resolve import resolve
from planner.run.resolved import Resolved
from planner.run.runfile import make_recipe

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
LLAMA = model_spec_from_config(CONFIG, name="toy")
TIED = model_spec_from_config({**CONFIG, "tie_word_embeddings": True}, name="toy-tied")
MIXTRAL = model_spec_from_config(
    {**CONFIG, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    name="toy-mixtral",
)
"""Per layer 4 experts of 3 x 8,192, fused: gate_up [4, 256, 64] = 65,536, down [4, 64, 128] = 32,768."""
WIDER = model_spec_from_config({**CONFIG, "intermediate_size": 256}).layers[0]
MIXED = replace(
    LLAMA,
    layers=(replace(LLAMA.layers[0], count=2), replace(WIDER, count=1)),
    layer_order=(0, 1, 0),
)
"""The toy with a wider second layer: MLP 256, 61,568 parameters; all 263,616."""
PARAMETERS = 239_040
LAYER = 36_992
LINEARS = 110_592
A_GPU = make_machine(vram="64GiB")
CUBLAS = 8_519_680
"""torch: 2 x 4,096 KiB + 8 x 16 KiB a handle and stream, at the first product: none while a run loads."""
TRAINING_CUBLAS = 2 * CUBLAS
"""Forward and backward run in threads of their own, each with a handle."""


def gpus(count: int) -> Machine:
    """Return a machine of so many cards."""
    return make_machine(vram="64GiB", gpus=count)


def choices(
    model: ModelSpec = LLAMA, machine: Machine = A_GPU, switches: Any = None, **fields: Any
) -> Resolved:
    """Return all choices of a recipe under hf-trainer, 16 tokens a sequence, 1 sequence."""
    usual = {"framework": "hf-trainer", "context": 16, "micro_batch_size": 1}
    found = resolve(model, make_recipe(**{**usual, **fields}), machine)
    if not switches:
        return found
    return replace(found, switches=found.switches.model_copy(update=switches))


def planned(model: ModelSpec = LLAMA, machine: Machine = A_GPU, **fields: Any) -> Plan:
    """Return the plan of such a recipe."""
    usual = {"framework": "hf-trainer", "context": 16, "micro_batch_size": 1}
    return plan(model, make_recipe(**{**usual, **fields}), machine)


def terms(result: Plan, phase: str) -> dict[str, int]:
    """Return bytes by term of one phase, terms of one name summed."""
    found: dict[str, int] = {}
    for term in result.phase(phase).terms:
        found[term.name] = found.get(term.name, 0) + term.bytes
    return found


def host(result: Plan) -> dict[str, int]:
    """Return bytes by term on the host."""
    return {term.name: term.bytes for term in result.host_terms}
