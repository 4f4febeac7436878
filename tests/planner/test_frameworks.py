"""Framework files are complete and say only what differs; one function picks a version's law."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from planner.datafiles import data_dir
from planner.errors import UnknownNameError, UnsupportedError, UsageError
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model, catalogue_names
from planner.plan import plan
from planner.report import text as plan_text
from planner.run.framework import families, frameworks, pick, spelled
from planner.run.framework_files import load_frameworks
from planner.run.logits_law import LogitsLaw, width
from planner.run.recipe import EngineSection, Recipe, Task
from planner.run.runfile import make_recipe

ENGINE_KEYS = {"engine", *EngineSection.model_fields}
MODEL = catalogue_model("llama-3.2-1b")
CARD = make_machine("h100-sxm")


@pytest.mark.parametrize("name", sorted(frameworks()))
def test_a_framework_file_is_complete(name: str) -> None:
    framework = frameworks()[name]
    assert framework.source
    assert framework.retrieved
    framework.matches(Version("1.0"))  # its range is a set of PEP 440 specifiers
    for defaults in framework.defaults.values():
        for key, value in defaults.items():
            if key not in ENGINE_KEYS and key != "dtype":
                make_recipe(**{key: value})  # values are those of a recipe
    for law in framework.logits.values():
        assert isinstance(law, LogitsLaw)
        assert law.source
        for _, dtype in (*law.forward, *law.backward, *law.chunk, *law.hidden, *law.head_grad):
            assert width(dtype, 2) >= 0


@pytest.mark.parametrize("name", sorted(set(frameworks()) - {"vllm"}))
@pytest.mark.parametrize("task", ["sft", "grpo", "dpo"])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_every_framework_plans_every_task(name: str, task: str, method: str) -> None:
    recipe = make_recipe(task=task, method=method, framework=name)
    if name.startswith("megatron") and method != "full":
        with pytest.raises(UnsupportedError, match=f"method: {method} cannot be planned"):
            plan(MODEL, recipe, CARD)
        return
    result = plan(MODEL, recipe, CARD)
    assert result.peak_bytes > MODEL.parameters // 2
    assert result.resolved.framework.name == name


@pytest.mark.parametrize("family", sorted(families()))
def test_the_name_of_a_family_is_its_newest_law_and_no_version_has_two(family: str) -> None:
    laws = families()[family]
    assert laws[0].name == family
    releases = [Version(f"{major}.{minor}") for major in range(6) for minor in range(60)]
    for one, other in combinations(laws, 2):
        if one.variant == other.variant:
            both = [str(r) for r in releases if one.matches(r) and other.matches(r)]
            assert not both, f"{one.name} and {other.name}"


def test_extends_leaves_nothing_repeated() -> None:
    folder = data_dir() / "frameworks"
    for law in frameworks().values():
        row = json.loads((folder / Path(law.file).name).read_text(encoding="utf-8"))
        if not law.extends:
            continue
        parent = frameworks()[law.extends]
        for task, fields in row.get("defaults", {}).items():
            for key, value in fields.items():
                assert parent.defaults.get(task, {}).get(key) != value, f"{law.name}: {task}.{key}"
        for key, value in row.get("switches", {}).items():
            assert parent.switches.model_dump(mode="json")[key] != value, f"{law.name}: {key}"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("trl", "trl"),
        ("trl==1.9.0", "trl-1.9"),
        ("trl@1.9", "trl-1.9"),
        ("trl=1.9", "trl-1.9"),
        ("TRL 1.9.2", "trl-1.9"),
        ("trl-1.9.2", "trl-1.9"),
        ("trl-1.9", "trl-1.9"),
        ("trl==1.16.0.dev0", "trl"),
        ("trl-1.16", "trl"),
        ("trl-0.15", "trl-0.15"),
        ("hf==5.19", "hf-trainer"),
        ("fms-hf-tuning-kbit==4.45.0", "fms-hf-tuning-kbit-4.45"),
        ("fms-hf-tuning-2024-kbit", "fms-hf-tuning-kbit"),
        ("peft-loop==7", "peft-loop"),
        ("ms-swift==3.2.0", "ms-swift-3.1"),
        ("ms-swift==3.12.6", "ms-swift-3.3"),
        ("ms-swift~3.12", "ms-swift-3.3"),
        ("ms-swift~2.6", "ms-swift-1.5"),
        ("ms-swift~9.1", "ms-swift"),
    ],
)
def test_every_spelling_goes_through_one_function(text: str, name: str) -> None:
    assert pick(text).name == name


def test_a_version_beside_the_name_is_the_same() -> None:
    assert pick("trl", "1.9.2") is pick("trl==1.9.2")
    assert spelled("trl==1.9.2").version == "1.9.2"
    assert spelled("trl-1.9").version == ""  # a law's own name


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("trl==0.7", "no law covers trl 0.7", "trl-0.15 (>=0.14"),
        ("ms-swift==2.6", "no law covers ms-swift 2.6", "ms-swift-1.5 (<2); `ms-swift~2.6`"),
        ("trl==", "'trl==' names no version", "trl==1.9"),
        ("trl==new", "'new' is not a version", "like 1.9"),
        ("unslth", "unknown framework 'unslth'", "unsloth"),
        ("trll==1.9", "unknown framework 'trll'", "trl"),
    ],
)
def test_a_version_without_a_law_is_one_line(text: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        pick(text)
    assert message in caught.value.message
    assert "\n" not in caught.value.message
    assert hint in (caught.value.hint or "")


def test_name_and_version_may_not_contradict() -> None:
    with pytest.raises(UsageError, match="contradict"):
        pick("trl==1.9", "1.16")


def test_an_unknown_framework_lists_near_names() -> None:
    with pytest.raises(UnknownNameError) as caught:
        pick("unslth")
    assert "unsloth" in (caught.value.hint or "")


def test_the_version_is_part_of_the_answer() -> None:
    result = plan(MODEL, make_recipe(framework="trl==1.9.2", task="grpo"), CARD)
    law = frameworks()["trl-1.9"]
    said = result.to_dict()["framework"]
    assert (said["name"], said["family"]) == ("trl-1.9", "trl")
    assert (said["version_asked"], said["versions"]) == ("1.9.2", law.versions)
    assert f"planned as {law.title} ({law.versions}), asked for 1.9.2" in plan_text(result)


def test_the_nearest_law_is_said() -> None:
    result = plan(MODEL, make_recipe(framework="ms-swift~2.6"), CARD)
    assert any("no law covers ms-swift 2.6" in note for note in result.assumptions)
    exact = plan(MODEL, make_recipe(framework="ms-swift~4.1"), CARD)
    assert not any("no law covers" in note for note in exact.assumptions)


def test_what_trl_means_depends_on_its_version() -> None:
    fields = {"task": "grpo", "method": "lora", "context": 8192, "micro_batch_size": 4}
    old = plan(MODEL, make_recipe(framework="trl-0.15", **fields), CARD)
    new = plan(MODEL, make_recipe(framework="trl", checkpointing="none", **fields), CARD)
    assert old.peak_bytes > 1.3 * new.peak_bytes


def test_the_default_dtype_of_trl_is_kept() -> None:
    resolved = plan(MODEL, Recipe(task=Task.SFT, framework="trl"), CARD).resolved
    assert (resolved.dtype, resolved.autocast) == ("fp32", "bf16")


@pytest.mark.parametrize("family", ["trl", "ms-swift"])
def test_the_page_lists_the_laws_of(family: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in text.splitlines() if line.startswith(f"| {family}")]
    listed = {row[1].strip(): row[2].strip() for row in rows}
    assert listed == {law.name: law.versions for law in families()[family]}


@pytest.mark.parametrize(("major", "minors"), [(0, range(14, 30)), (1, range(17))])
def test_every_release_of_trl_has_a_law(major: int, minors: range) -> None:
    for minor in minors:
        assert pick("trl", f"{major}.{minor}.0").family == "trl"


def test_the_bytes_of_a_grpo_logit_by_release_of_trl() -> None:
    # under bf16 autocast, at the largest moment of the backward, as each release's code keeps them
    expected = {"0.15": 16, "0.16": 12, "0.29": 12, "1.0": 16, "1.9": 16, "1.10": 12, "1.14": 8}
    for version, size in expected.items():
        law = pick("trl", version).law("grpo", "full-fp32")
        assert sum(width(dtype, 2) for _, dtype in law.backward) == size, version


@pytest.mark.parametrize(("dtype", "head_copy"), [("bf16", 4), ("fp32", 0)])
def test_sft_of_trl_1_9_takes_chunks_and_an_fp32_copy_of_the_head(
    dtype: str, head_copy: int
) -> None:
    # trl 1.9's _chunked_cross_entropy_loss on a CPU, frozen head: 163 MiB for 256 x 32,768 logits in
    # bf16 with 256 x 32,768 x 4 B for the head, 132 MiB without it in fp32: 16 B a logit of a chunk
    recipe = make_recipe(framework="trl==1.9", dtype=dtype, mixed_precision="none", context=2048)
    result = plan(MODEL, recipe, CARD)
    head = next(term.bytes for term in result.phase("loss").terms if term.name == "logits")
    rows, width_bytes = 8 * 2048, {"bf16": 2, "fp32": 4}[dtype]
    kept = rows * MODEL.hidden * 2 * width_bytes
    assert head == 256 * MODEL.vocab * 16 + MODEL.vocab * MODEL.hidden * head_copy + kept


def test_what_changed_between_releases_of_trl() -> None:
    def setting(version: str, task: str, key: str) -> Any:
        return pick("trl", version).task_defaults(task).get(key)

    assert [setting(v, "grpo", "beta") for v in ("0.18", "0.19")] == [0.04, 0.0]
    assert [setting(v, "grpo", "completion_length") for v in ("1.9", "1.10")] == [256, 512]
    assert [setting(v, "sft", "checkpointing") for v in ("0.21", "0.22")] == ["none", "full"]
    assert [setting(v, "sft", "loss") for v in ("1.6", "1.7")] == ["full", "chunked"]
    assert [setting(v, "grpo", "loss") for v in ("1.14", "1.15")] == ["full", "chunked"]
    switches = [pick("trl", v).switches_of("grpo") for v in ("0.21", "0.22", "0.26")]
    assert [s.kbit_upcast for s in switches] == ["none", "norms", "none"]
    assert [s.adapter_dtype_quantized for s in switches] == ["fp32", "bf16", "bf16"]
    assert pick("trl", "0.15").switches_of("sft").kbit_upcast == "norms"
    assert pick("trl", "0.28").switches_of("dpo").kbit_upcast == "norms"
    assert pick("trl", "0.29").switches_of("dpo").kbit_upcast == "none"
    assert [pick("trl", v).switches.reentrant for v in ("0.26", "0.27")] == [True, False]


def test_shared_losses_name_their_source() -> None:
    text = (data_dir() / "frameworks" / "_losses.json").read_text(encoding="utf-8")
    document = json.loads(text)
    assert document["source"]
    assert document["retrieved"]
    assert all(law["source"] for law in document["laws"].values())


ROW = {"title": "Toy", "versions": ">=1", "source": "its code", "retrieved": "2026-11-30"}


def write(folder: Path, **rows: dict[str, Any]) -> Path:
    text = (data_dir() / "frameworks" / "_losses.json").read_text(encoding="utf-8")
    (folder / "_losses.json").write_text(text, encoding="utf-8")
    for name, row in rows.items():
        document = {"name": name, **ROW, **row}
        (folder / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


def test_a_file_takes_from_its_parent_what_it_does_not_say(tmp_path: Path) -> None:
    base = {
        "defaults": {"all": {"loss": "full", "dtype": "bf16"}, "sft": {"context": 512}},
        "switches": {"reentrant": True, "saved_input": 2},
        "logits": {"full": "full"},
    }
    newer = {
        "extends": "toy",
        "family": "toy",
        "defaults": {"all": {"dtype": None, "optimizer": "adamw"}},
        "switches": {"saved_input": 4},
        "task_switches": {"grpo": {"reentrant": False}},
    }
    laws = load_frameworks(write(tmp_path, toy=base, toy2=newer))
    assert laws["toy2"].defaults == {
        "all": {"loss": "full", "optimizer": "adamw"},
        "sft": {"context": 512},
    }
    assert laws["toy2"].switches.reentrant
    assert laws["toy2"].switches.saved_input == 4
    assert laws["toy2"].switches_of("grpo").saved_input == 4
    assert not laws["toy2"].switches_of("grpo").reentrant
    assert laws["toy2"].logits == laws["toy"].logits
    assert laws["toy"].switches.saved_input == 2


@pytest.mark.parametrize(
    ("row", "message", "hint"),
    [
        ({"switches": {"reentrnt": True}}, "switches: reentrnt: unknown key", "reentrant"),
        ({"task_switches": {"sft": {"fuzed": []}}}, "task_switches.sft: fuzed", "fused"),
        ({"extends": "toi"}, "extends: unknown framework 'toi'", "toy"),
        ({"extends": "toy"}, "extends: toy -> toy goes in a circle", ""),
        ({"defaults": {"sfft": {}}}, "defaults.sfft: unknown task", "sft"),
        ({"defaults": {"all": {"dtyp": "bf16"}}}, "defaults.all.dtyp: unknown key", "dtype"),
        ({"logits": {"full": "ful"}}, "logits.full: unknown law 'ful'", "full"),
        ({"logits": {"full": {"kind": "ful"}}}, "logits.full: kind: 'ful'", "full"),
        ({"version": ">=1"}, "version: unknown key", "versions"),
        ({"source": None}, "source: is missing", ""),
    ],
)
def test_a_mistake_in_a_file_is_one_line_with_the_near_match(
    tmp_path: Path, row: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        load_frameworks(write(tmp_path, toy=row))
    assert f"{tmp_path.name}/toy.json: {message}" in caught.value.message
    assert "\n" not in caught.value.message
    assert hint in (caught.value.hint or "")


def test_a_wrong_range_names_the_file(tmp_path: Path) -> None:
    law = load_frameworks(write(tmp_path, toy={"versions": "5.x (read: 5.19)"}))["toy"]
    with pytest.raises(UsageError, match=r"toy\.json: versions: '5\.x \(read: 5\.19\)'"):
        law.matches(Version("5.0"))


@pytest.mark.parametrize("name", ["hf-trainer", "llamafactory", "ms-swift", "trl~0.29", "trl~1.0"])
def test_a_chunked_loss_is_ligers_where_no_other_is_there(name: str) -> None:
    law = pick(name).law("sft", "chunked")
    assert law == pick("liger").law("sft", "chunked")
    assert law.head_grad == (("fp32 gradient of the head", "fp32"),)


def test_megatron_plans_every_model_of_attention_and_refuses_the_others_by_name() -> None:
    recipe = make_recipe(framework="megatron", method="full", context=512)
    refused = set()
    for name in catalogue_names():
        try:
            plan(catalogue_model(name), recipe, CARD)
        except UnsupportedError:
            refused.add(name)
    assert {name.partition("-")[0] for name in refused} == {
        *("falcon", "mamba", "mamba2", "nemotron")
    }
    with pytest.raises(UnsupportedError, match="not one token mixer and one MLP"):
        plan(catalogue_model("mamba2-130m"), recipe, CARD)


def test_a_task_that_a_framework_does_not_have_is_said() -> None:
    made = plan(
        catalogue_model("qwen3-0.6b"),
        make_recipe(task="grpo", framework="litgpt", method="lora"),
        CARD,
    )
    assert any(
        note.startswith("LitGPT has no grpo of its own (axolotl, ") for note in made.assumptions
    )
    for family in ("trl", "peft-loop"):
        other = plan(
            catalogue_model("qwen3-0.6b"),
            make_recipe(task="grpo", framework=family, method="lora"),
            CARD,
        )
        assert not any("of its own" in note for note in other.assumptions)


def test_every_family_states_its_tasks_or_has_none() -> None:
    loops = {name for name in families() if not frameworks()[name].tasks}
    assert loops == {"fused-logp-loop", "peft-loop"}
    for law in frameworks().values():
        assert law.has(Task.SFT) or law.family == "vllm"
