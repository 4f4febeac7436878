"""The catalogue: every model plans, exact to the published count, with its sources and aliases."""

import pytest

from planner.answers.model_facts import model_facts
from planner.errors import UnknownNameError
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model, catalogue_names, load_catalogue
from planner.models.hub import find_model
from planner.models.spec import MixerKind
from planner.plan import plan
from planner.run.recipe import Method, Recipe, Task


def test_the_catalogue_has_all_models() -> None:
    assert len(catalogue_names()) == 221
    assert len(set(catalogue_names())) == 221


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", 30_532_122_624),
        ("Qwen/Qwen2-VL-7B-Instruct", 8_291_375_616),
        ("Qwen/Qwen2.5-VL-72B-Instruct", 73_410_777_344),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", 31_070_754_032),
        ("google/gemma-3-12b-it", 12_187_325_040),
        ("Qwen/Qwen1.5-32B-Chat", 32_512_218_112),
        ("codellama/CodeLlama-13b-hf", 13_016_028_160),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", 49_122_681_728),
    ],
)
def test_names_people_use_are_here_offline(name: str, parameters: int) -> None:
    """Totals of the Hub's safetensors headers."""
    assert find_model(name, offline=True).parameters == parameters


@pytest.mark.parametrize("name", catalogue_names())
def test_counts_are_exact_and_sourced(name: str) -> None:
    entry, spec = load_catalogue()[name], catalogue_model(name)
    assert spec.parameters == entry["parameters"] == sum(spec.parameters_by_module.values())
    assert sum(layer.count for layer in spec.layers) == len(spec.layer_order) == spec.num_layers
    assert entry["source"]
    assert entry["retrieved"]
    if entry["agreement"] == "exact":
        assert entry["published_parameters"] == spec.parameters


def test_published_totals_include_the_mtp_block() -> None:
    """The checkpoint's total is the model plus the block that AutoModel does not load."""
    checked = 0
    for name, entry in load_catalogue().items():
        spec = catalogue_model(name)
        if spec.extra and entry["agreement"].startswith("exact, with the MTP block"):
            scales = "scales" in entry["agreement"]
            total = spec.parameters + sum(module.parameters for module in spec.extra)
            assert (
                (total <= entry["published_parameters"])
                if scales
                else (total == entry["published_parameters"])
            ), name
            checked += 1
    assert checked >= 12


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("llama-3.1-8b", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "qwen2.5-0.5b"),
        ("google/gemma-2-2b-it", "gemma-2-2b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
    ],
)
def test_spellings(spelling: str, name: str) -> None:
    assert find_model(spelling).name == name


def test_aliases_name_one_model_each() -> None:
    names = [alias for entry in load_catalogue().values() for alias in entry["aliases"]]
    assert len(names) == len(set(names))
    assert not set(names) & set(catalogue_names())


def test_unknown_name_lists_near_matches() -> None:
    with pytest.raises(UnknownNameError, match=r"lama-3\.1-8b") as caught:
        find_model("lama-3.1-8b")
    assert "llama-3.1-8b" in caught.value.near
    assert "did you mean" in (caught.value.hint or "")


def test_facts_that_a_cache_is_made_of() -> None:
    gemma2 = catalogue_model("gemma-2-2b")
    kinds = [gemma2.layers[index].mixer for index in gemma2.layer_order]
    assert [mixer.window for mixer in kinds[:4]] == [4096, 0, 4096, 0]
    gemma3 = catalogue_model("gemma-3-1b")
    assert [gemma3.layers[i].mixer.window for i in gemma3.layer_order[:7]] == [512] * 5 + [0, 512]
    scout = catalogue_model("llama-4-scout")
    assert [scout.layers[i].mixer.kind for i in scout.layer_order[:4]] == [
        MixerKind.CHUNKED
    ] * 3 + [MixerKind.FULL]
    deepseek = catalogue_model("deepseek-v3").layers[0].mixer
    assert (deepseek.kv_lora_rank, deepseek.qk_rope_head_dim) == (512, 64)
    assert catalogue_model("glm-5.2").layers[0].mixer.index_head_dim == 128
    nemo = catalogue_model("gemma-3n-e4b")
    shared = [nemo.layers[index].mixer.kv_shared for index in nemo.layer_order]
    assert shared == [False] * 20 + [True] * 15
    falcon = catalogue_model("falcon-h1-0.5b").layers[0]
    assert [mixer.kind for mixer in falcon.mixers] == [MixerKind.FULL, MixerKind.MAMBA]
    qwen = catalogue_model("qwen3-next-80b-a3b")
    state = next(la.mixer for la in qwen.layers if la.mixer.kind is MixerKind.LINEAR)
    assert state.state_shapes == ((8192, 3), (32, 128, 128))
    v4 = catalogue_model("deepseek-v4-flash")
    assert [v4.layers[i].mixer.compress_ratio for i in v4.layer_order[:4]] == [0, 0, 4, 128]


def test_active_parameters_of_a_mixture() -> None:
    assert 3.2e9 < catalogue_model("qwen3-30b-a3b").active_parameters < 3.5e9
    assert 12.5e9 < catalogue_model("mixtral-8x7b").active_parameters < 13.2e9
    dense = catalogue_model("llama-3.1-8b")
    assert dense.active_parameters == dense.parameters


def test_facts_for_the_command_line() -> None:
    facts = model_facts(find_model("gemma-3-4b"))
    assert facts["parameters"] == 4300079472
    assert facts["text_parameters"] == 3880263168
    assert sum(facts["parameters_by_module"].values()) == facts["parameters"]
    assert facts["layers"] == 34
    assert facts["layers_by_mixer"] == {"sliding:1024": 29, "full": 5}
    assert facts["checkpoint_dtype"] == "bf16"
    assert facts["tied_head"] is True
    assert facts["config_source"]


@pytest.mark.parametrize(
    ("name", "kv_bytes", "state"),
    [
        ("llama-3.1-8b", 2 * 32 * 8 * 128 * 2, 0),
        ("deepseek-v3", 61 * (512 + 64) * 2, 0),
        # 15 of 35 layers keep a cache of their own
        ("gemma-3n-e4b", 20 * 2 * 2 * 256 * 2, 0),
        # eight of 40 layers attend to the image, not to the text
        ("llama-3.2-11b-vision", 32 * 2 * 8 * 128 * 2, 0),
        ("falcon-h1-0.5b", 36 * 2 * 2 * 64 * 2, 36 * (1792 * 3 + 24 * 64 * 128) * 2),
        ("qwen3-next-80b-a3b", 12 * 2 * 2 * 256 * 2, 36 * (8192 * 3 + 32 * 128 * 128) * 2),
        # a shared latent in every layer, an entry per 4 (with its index key) or 128 tokens
        ("deepseek-v4-flash", 43 * 512 * 2 + 21 * (512 + 128) * 2 // 4 + 20 * 512 * 2 // 128, 0),
    ],
)
def test_cache_facts(name: str, kv_bytes: int, state: int) -> None:
    facts = model_facts(catalogue_model(name))
    assert facts["kv_bytes_per_token"] == kv_bytes
    assert facts["state_bytes_per_sequence"] == state


@pytest.mark.parametrize("method", list(Method))
def test_every_model_plans(method: Method) -> None:
    machine = make_machine("h100", host_ram="512GiB")
    for name in catalogue_names():
        spec = catalogue_model(name)
        peak = plan(spec, Recipe(method=method), machine).peak_bytes
        assert peak > spec.text_parameters // 2, name
        served = plan(spec, Recipe(method=method, task=Task.SERVE), machine).peak_bytes
        assert served > spec.text_parameters // 2, name
