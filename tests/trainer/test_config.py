import pytest

from planner.errors import UnsupportedError, UsageError
from trainer.config import parse_run, read_run


def test_a_run_document_is_read_whole(document, tmp_path):
    run, train = parse_run(
        document(train={"dataset": "arithmetic", "rewards": ["exact", {"name": "numeric"}]}),
        root=tmp_path,
    )
    assert run.recipe.num_generations == 4
    assert train.dataset.name == "arithmetic"
    assert [reward.name for reward in train.rewards] == ["exact", "numeric"]
    assert train.output == str(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "said", "hint"),
    [
        ({"train": {"step": 3}}, "train: step: unknown key", "steps"),
        (
            {"recipe": {"num_generation": 3}},
            "recipe.num_generation: unknown key",
            "num_generations",
        ),
        ({"train": {"sampling": {"temperatur": 1}}}, "sampling.temperatur", "temperature"),
        ({"train": {"rewards": [{"name": "exact", "wieght": 1}]}}, "rewards.0.wieght", "weight"),
        ({"train": {"dataset": {"name": "x", "splti": "a"}}}, "dataset.splti", "split"),
    ],
    ids=["train", "recipe", "nested", "in a list", "dataset"],
)
def test_an_unknown_key_names_its_near_match(document, tmp_path, change, said, hint):
    with pytest.raises(UsageError, match=r"unknown key") as caught:
        parse_run(document(**change), root=tmp_path)
    assert said in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"train": {"lr": -1}}, "lr"),
        ({"train": {"lr": float("nan")}}, "lr"),
        ({"train": {"steps": 0}}, "steps"),
        ({"train": {"steps": "many"}}, "steps"),
        ({"train": {"warmup_steps": 2}}, "warmup_steps"),
        ({"train": {"loss": {"type": "ppo"}}}, "loss.type"),
        ({"train": {"sampling": {"top_p": 0}}}, "top_p"),
        ({"train": {"adam_betas": [0.9, 1.0]}}, "adam_betas"),
        ({"train": {"rewards": []}}, "train.rewards"),
        ({"recipe": {"num_generations": 1}}, "num_generations"),
        ({"recipe": {"task": "dpo"}}, "recipe.task"),
        ({"recipe": {"beta": 0.1, "method": "full"}}, "recipe.beta"),
        ({"recipe": {"sharding": "fsdp"}}, "recipe.sharding"),
        ({"recipe": {"mixed_precision": "bf16"}}, "recipe.mixed_precision"),
        ({"recipe": {"loss": "full"}}, "recipe.loss"),
        ({"recipe": {"method": "qlora", "quantization": "gptq-4bit"}}, "recipe.quantization"),
        ({"train": {"loss": {"kl": "forward"}}}, "train.loss.kl"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_is_refused_by_field(document, tmp_path, change, field):
    with pytest.raises((UsageError, UnsupportedError)) as caught:
        parse_run(document(**change), root=tmp_path)
    assert field in caught.value.message
    assert "\n" not in caught.value.message


def test_a_missing_train_section_is_said(document, tmp_path):
    made = document()
    del made["train"]
    with pytest.raises(UsageError, match="no train: section"):
        parse_run(made, root=tmp_path)


def test_a_file_that_is_not_yaml_is_one_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: [", encoding="utf-8")
    with pytest.raises(UsageError, match=r"run\.yaml") as caught:
        read_run(path)
    assert "\n" not in caught.value.message


def test_relative_output_counts_from_the_run_file(document, tmp_path):
    import yaml

    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(document(train={"output": "here"})), encoding="utf-8")
    assert read_run(path)[1].output == str(tmp_path / "here")
