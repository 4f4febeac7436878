"""torchtitan's TOML job configs as runs."""

from pathlib import Path

import pytest

from planner.errors import UsageError
from planner.importers import import_config, import_subject

JOB = """
[job]
description = "Llama 3 8B training"
[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]
[optimizer]
name = "AdamW"
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
data_parallel_shard_degree = 8
[compile]
enable = true
components = ["model"]
[activation_checkpoint]
mode = "selective"
selective_ac_option = "{option}"
[float8]
enable_fsdp_float8_all_gather = true
"""


def test_a_job_is_read_and_planned_as_what_it_is(tmp_path: Path) -> None:
    file = tmp_path / "llama3_8b.toml"
    file.write_text(JOB.replace("{option}", "op"))
    found = import_subject(str(file))
    assert found is not None
    recipe = found.run.recipe
    assert (found.tool, found.run.model) == ("torchtitan", "meta-llama/Llama-3.1-8B")
    assert (recipe.compile, recipe.compile_loss) == (True, False)
    assert (recipe.float8, recipe.float8_all_gather) == ("tensorwise", True)
    assert (recipe.checkpointing, recipe.sharding) == ("selective-op", "fsdp")
    assert (recipe.context, found.run.machine.gpus) == (8192, 8)
    assert not found.report.not_understood


def test_older_spellings() -> None:
    text = JOB.replace("{option}", "2").replace("local_batch_size", "batch_size")
    text = text.replace('[compile]\nenable = true\ncomponents = ["model"]\n', "")
    text = text.replace("seq_len = 8192", "seq_len = 8192\ncompile = true")
    recipe = import_config(text).run.recipe
    assert (recipe.compile, recipe.compile_loss) == (True, None)
    assert (recipe.checkpointing, recipe.checkpoint_every) == ("selective-layer", 2)


def test_what_is_not_known_is_said() -> None:
    found = import_config(JOB.replace("{option}", "op").replace('"8B"', '"9B"'))
    assert any(each.key == "model.flavor" for each in found.report.not_understood)
    with pytest.raises(UsageError, match="toml: "):
        import_config(JOB.replace("seq_len = 8192", "seq_len ="))
