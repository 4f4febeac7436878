"""What is wrong with a run of several ranks is told in one line by the first of them, and none hangs."""

import shutil
import socket
from pathlib import Path

import pytest
import yaml

from planner.errors import VramwiseError
from tests.trainer.parallel.gloo import free_port
from tests.trainer.parallel.processes import ended, said, start
from trainer.parallel import agree, worker
from trainer.run import train_run

pytestmark = pytest.mark.xdist_group("ranks")
HOST = socket.gethostname()
SECOND, FIRST = f"rank 1 on {HOST}", f"rank 0 on {HOST}"


def trains(ranks, folder, spoil):
    """Train what is in this rank's folder, on a machine that `spoil` has changed."""
    spoil(ranks, Path(folder))
    train_run(Path(folder) / str(ranks.rank) / "run.yaml", ranks=ranks)


def nothing(ranks, folder):
    pass


def other_run_file(ranks, folder):
    path = folder / "1" / "run.yaml"
    if ranks.rank == 1:
        path.write_text(path.read_text() + "# tuned by hand\n")


def other_code(ranks, folder):
    # as if this rank had imported the packages from a checkout of its own
    module = folder / str(ranks.rank) / "checkout/trainer/parallel/agree.py"
    module.parent.mkdir(parents=True)
    module.write_text(f"HERE = {ranks.rank}\n")
    agree.__file__ = str(module)


def no_reward_file(ranks, folder):
    if ranks.rank == 1:
        (folder / "1" / "judge.py").unlink()


def other_card(ranks, folder):
    agree._gpu = lambda: f"card {ranks.rank}"


def full_disk(ranks, folder):
    usage = shutil.disk_usage(folder)
    if ranks.rank == 0:
        shutil.disk_usage = lambda path: usage._replace(free=2**20)


@pytest.mark.parametrize(
    ("change", "spoil", "size", "line"),
    [
        ({"recipe": {"sharding": "fsdp2", "parallel": {"data_shard": 3}}}, nothing, 2, "parallel: data_shard 3 = 3 ranks, not the 2 of machine.gpus"),
        ({}, other_run_file, 2, f"run file: {SECOND} has another one than {FIRST} (sha256 "),
        ({}, other_code, 2, f"code: {SECOND} has another one than {FIRST} (sha256 "),
        ({}, no_reward_file, 2, f"train.rewards: judge.py: {SECOND} has none"),
        ({}, other_card, 2, f"GPU: {SECOND} has card 1, {FIRST} card 0"),
        ({"machine": {"gpus": 4}}, nothing, 2, "machine.gpus: 4, but 2 ranks run"),
        ({"recipe": {"engine": {"kind": "vllm-push", "tensor_parallel": 2}}}, nothing, 3, "engine.tensor_parallel: 2 does not divide the 3 GPUs"),
        ({}, full_disk, 2, "train.output: no room for a checkpoint in "),
    ],
    ids=["degrees", "run-file", "code", "reward-file", "gpus", "machine", "engine-group", "disk"],
)  # fmt: skip
def test_one_line_by_the_first_rank_and_none_hangs(document, tmp_path, change, spoil, size, line):
    if "engine" in change.get("recipe", {}):
        pytest.importorskip("vllm", reason="vLLM is not installed")
    made = document(
        recipe=change.get("recipe", {}),
        train={"rewards": ["judge.py:judge"], "output": str(tmp_path / "out"), "preflight": False},
    )
    made |= {key: value for key, value in change.items() if key != "recipe"}
    for rank in range(size):
        folder = tmp_path / str(rank)
        folder.mkdir()
        (folder / "run.yaml").write_text(yaml.safe_dump(made), encoding="utf-8")
        (folder / "judge.py").write_text("def judge(completions, **rest): return [1.0]\n")
    codes = ended(start(size, trains, str(tmp_path), spoil, folder=tmp_path))
    assert codes[0] in (1, 2)
    assert codes == codes[:1] * size
    first, *others = said(tmp_path, size)
    told = [each for each in first.splitlines() if each.startswith(("error:", "hint:"))]
    assert told[0].startswith(f"error: {line}")
    assert [each.partition(":")[0] for each in told] == ["error", "hint"][: len(told)]
    assert not any("error:" in each for each in others)
    assert not (tmp_path / "out").exists()


def test_a_port_that_another_program_has_is_named(monkeypatch):
    port = free_port()
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(VramwiseError, match=f"MASTER_PORT: 127.0.0.1:{port} is in use"):
            worker._join()
