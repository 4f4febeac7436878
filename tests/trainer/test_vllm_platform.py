"""Every branch follows vLLM's own platform; what cannot start is one line, before anything loads.

vLLM's real CUDA platform class stands in for a GPU here: its kernel library is an empty module, and
torch states a capability. torch.cuda.is_available() stays False, as it would for a branch that asks it.
"""

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from transformers import AutoModelForCausalLM, LlamaConfig

from planner.errors import MissingExtraError, UsageError
from planner.machines.machine import Machine
from planner.models.hub import find_model
from planner.plan import plan
from planner.run.recipe import EngineKind, Method, Recipe
from planner.terms.vllm_blocks import vllm_kv
from planner.units import GiB, MiB
from trainer.config import parse_run
from trainer.engines import vllm_cpu_build, vllm_llm, vllm_platform, vllm_settings
from trainer.engines.vllm_settings import settings_for, settle_engine
from trainer.model import Policy

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]

TURING, AMPERE = (7, 5), (8, 0)


@pytest.fixture
def cuda_platform(monkeypatch):
    """Return a function that makes vLLM's real CUDA platform, of a stated capability, the current one."""
    import vllm.platforms

    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("kernels"))
    monkeypatch.delitem(sys.modules, "vllm.platforms.cuda", raising=False)
    from vllm.platforms.cuda import CudaPlatform

    def be(capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
        monkeypatch.setattr(vllm.platforms, "_current_platform", CudaPlatform())

    yield be
    sys.modules.pop("vllm.platforms.cuda", None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    AutoModelForCausalLM.from_config(config).float().save_pretrained(path)
    return str(path)


def policy_on(folder, device, dtype=torch.bfloat16):
    return Policy(
        model=None,
        tokenizer=SimpleNamespace(eos_token_id=1),
        method=Method.LORA,
        source=folder,
        revision=None,
        dtype=dtype,
        device=torch.device(device),
    )


def recipe(kind="vllm-shared", method="lora", **engine):
    return Recipe(task="grpo", method=method, context=256, engine={"kind": kind, **engine})


def one_line(error):
    return "\n" not in error.message and "\n" not in (error.hint or "")


def test_a_cuda_vllm_takes_the_cuda_branches_whatever_torch_says(
    cuda_platform, folder, monkeypatch
):
    from vllm.model_executor.layers import linear

    cuda_platform(AMPERE)
    monkeypatch.setattr(vllm_settings, "free_and_total", lambda: (30 * GiB, 80 * GiB))
    assert not torch.cuda.is_available()
    assert (vllm_platform.runs_on_cpu(), vllm_platform.can_sleep()) == (False, True)
    made = settings_for(
        policy_on(folder, "cuda"), recipe=recipe(), plan=None, kind=EngineKind.VLLM_SHARED
    )
    assert made.sleep_level == 1
    assert (
        made.kv_bytes % (16 * 2 * 4 * 32 * 2) == 0
    )  # blocks of 16 tokens: K, V, 4 heads, 32, bf16
    on_gpu = vllm_kv(find_model(folder), kv_bytes=0, max_model_len=256, block_size=16)
    assert made.kv_bytes == on_gpu.bytes_per_sequence + on_gpu.bytes_per_block
    assert 0 < made.memory_share < 30 / 80
    assert made.cuda_graphs
    packs = linear.dispatch_unquantized_gemm
    with vllm_cpu_build.unpacked_cpu_linears():
        assert linear.dispatch_unquantized_gemm is packs


def test_a_cpu_vllm_beside_a_cuda_torch_takes_the_cpu_branches(folder, monkeypatch):
    from vllm.model_executor.layers import utils

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (vllm_platform.runs_on_cpu(), vllm_platform.can_sleep()) == (True, False)
    made = settings_for(
        policy_on(folder, "cpu"), recipe=recipe(), plan=None, kind=EngineKind.VLLM_SHARED
    )
    assert (made.sleep_level, made.memory_share) == (0, None)
    packs = utils.dispatch_cpu_unquantized_gemm
    with vllm_cpu_build.unpacked_cpu_linears():
        assert utils.dispatch_cpu_unquantized_gemm is not packs
    assert utils.dispatch_cpu_unquantized_gemm is packs


def test_graphs_are_planned_and_asked_for_where_there_are_some(cuda_platform):
    with pytest.raises(UsageError, match="cuda_graphs: true, but vLLM on cpu has none"):
        vllm_settings.settle_engine(recipe(cuda_graphs=True))
    assert vllm_settings.settle_engine(recipe()).engine.cuda_graphs is False
    cuda_platform(AMPERE)
    assert vllm_settings.settle_engine(recipe()).engine.cuda_graphs is None


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_device_with_and_without_its_index_is_vllms_first_card(cuda_platform, device):
    cuda_platform(AMPERE)
    vllm_platform.check_device(torch.device(device))


@pytest.mark.parametrize(
    ("device", "said"), [("cpu", "runs on cuda, the policy on cpu"), ("cuda:1", "takes cuda:0")]
)
def test_a_policy_elsewhere_is_refused(cuda_platform, device, said):
    cuda_platform(AMPERE)
    with pytest.raises(UsageError, match=said) as caught:
        vllm_platform.check_device(torch.device(device))
    assert one_line(caught.value)


def test_bf16_without_bf16_hardware_is_refused_before_anything_starts(cuda_platform):
    cuda_platform(TURING)
    with pytest.raises(UsageError, match=r"bf16 on Some GPU \(compute capability 7.5\)") as no:
        settle_engine(recipe())
    assert no.value.hint.startswith("fp16 or fp32 there")
    assert one_line(no.value)
    settle_engine(recipe().model_copy(update={"dtype": "fp16"}))


@pytest.mark.parametrize(
    ("kind", "method", "asked", "level"),
    [
        ("vllm-shared", "lora", None, 1),
        ("vllm-shared", "full", None, 1),
        ("vllm-push", "lora", None, 1),
        ("vllm-push", "full", None, 2),
        ("vllm-push", "full", 1, 1),
        ("vllm-push", "lora", 0, 0),
    ],
)
def test_the_plan_hears_how_deep_the_engine_sleeps(cuda_platform, kind, method, asked, level):
    cuda_platform(AMPERE)
    assert settle_engine(recipe(kind, method, sleep_level=asked)).engine.sleep_level == level


def test_shared_weights_cannot_be_dropped(cuda_platform):
    cuda_platform(AMPERE)
    with pytest.raises(UsageError, match="sleep_level: 2 would drop"):
        settle_engine(recipe(sleep_level=2))


@pytest.mark.parametrize("kind", ["vllm-shared", "vllm-push"])
def test_what_is_not_released_is_planned_as_there(folder, kind):
    """On the CPU build nothing sleeps: KV cache and copy stay in every phase of training; nor has it graphs."""
    machine, spec = Machine(vram_bytes=8 * GiB, context_bytes=0), find_model(folder)
    asked = recipe(kind, kv_bytes=64 * MiB)
    eager = recipe(kind, kv_bytes=64 * MiB, cuda_graphs=False)
    awake = plan(spec, settle_engine(asked), machine)
    copy = spec.parameters * 2 if kind == "vllm-push" else 0
    for phase in ("score", "forward", "backward", "step"):
        sleeping = plan(spec, eager, machine).phase(phase).total_bytes
        assert awake.phase(phase).total_bytes == sleeping + 64 * MiB + copy
    with pytest.raises(UsageError, match="sleep_level: 1, but vLLM on cpu cannot"):
        settle_engine(recipe(kind, sleep_level=1))


@pytest.mark.parametrize("kind", ["vllm-shared", "vllm-push"])
def test_a_four_bit_policy_is_refused_where_the_run_file_is_read(document, tmp_path, kind):
    made = document(recipe={"method": "qlora", "engine": {"kind": kind}})
    with pytest.raises(UsageError, match=f"{kind} cannot generate with a 4-bit policy") as caught:
        parse_run(made, root=tmp_path)
    assert "transformers" in caught.value.hint
    assert "vllm" not in caught.value.hint
    parse_run(document(recipe={"method": "qlora"}), root=tmp_path)


@pytest.mark.parametrize("kind", ["vllm-shared", "vllm-push"])
def test_no_hint_advises_the_engine_in_use(kind):
    assert kind not in vllm_llm.OTHERS[kind]


def test_a_vllm_for_another_torch_is_one_line(monkeypatch):
    """vLLM's own CUDA platform module imports its kernels first; here they are really missing."""
    import vllm.platforms

    monkeypatch.setattr(vllm.platforms, "_current_platform", None)
    monkeypatch.setattr(
        vllm.platforms,
        "resolve_current_platform_cls_qualname",
        lambda: "vllm.platforms.cuda.CudaPlatform",
    )
    with pytest.raises(UsageError, match="does not load beside torch 2") as caught:
        settle_engine(recipe())
    assert "_C_stable_libtorch" in caught.value.message
    assert "built for torch==" in caught.value.hint
    assert one_line(caught.value)


def test_a_cpu_vllm_whose_kernels_do_not_load_is_one_line():
    blocked = "".join(
        f"sys.modules['vllm.{name}'] = None\n" for name in ("_C", "_C_AVX2", "_C_AVX512")
    )
    script = (
        f"import sys\n{blocked}"
        "from planner.errors import UsageError\n"
        "from trainer.engines.vllm_platform import vllm_platform\n"
        "try:\n    vllm_platform()\n"
        "except UsageError as error:\n    print(error.message)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.count("\n") == 1
    assert "does not load beside torch" in done.stdout


def test_a_vllm_for_a_gpu_without_one_is_one_line(monkeypatch):
    import vllm.platforms
    from vllm.platforms.interface import UnspecifiedPlatform

    monkeypatch.setattr(vllm.platforms, "_current_platform", UnspecifiedPlatform())
    with pytest.raises(UsageError, match="finds no device") as caught:
        settle_engine(recipe())
    assert one_line(caught.value)


def test_without_vllm_the_extra_is_named(monkeypatch):
    def missing(name):
        raise vllm_platform.PackageNotFoundError(name)

    monkeypatch.setattr(vllm_platform, "version", missing)
    with pytest.raises(MissingExtraError) as caught:
        settle_engine(recipe())
    assert (caught.value.exit_code, "vllm" in caught.value.hint) == (5, True)


@pytest.mark.parametrize("old", ["0.8.5.post1", "0.30.0"])
def test_a_vllm_that_cannot_give_kv_memory_back_alone_is_refused(monkeypatch, old):
    monkeypatch.setattr(vllm_platform, "version", lambda name: old)
    with pytest.raises(UsageError, match="too old") as caught:
        settle_engine(recipe())
    assert "0.31" in caught.value.hint
