"""What ends one rank ends all of them, in one line; on real gloo processes that die."""

import socket
import time

import pytest

from planner.errors import UsageError
from tests.trainer.parallel.processes import ended, kill, said, start
from trainer.parallel import watch
from trainer.parallel.watch import in_unison

pytestmark = pytest.mark.xdist_group("ranks")


def one_fails(ranks):
    if ranks.rank == 1:
        raise UsageError("train.rewards: no such file: judge.py", hint="put it there")
    ranks.barrier()  # waits in C++ for a rank that will not come


def all_fail(ranks):
    raise UsageError("recipe.dtype: 'int3' cannot be trained")


def has_a_bug(ranks):
    ranks.barrier()
    if ranks.rank == 0:
        raise ZeroDivisionError("zero")
    ranks.barrier()


def waits(ranks, folder, victim):
    ranks.barrier()
    (folder / f"waits-{ranks.rank}").touch()
    if ranks.rank == victim:
        time.sleep(600)
    ranks.barrier()


def works(ranks, folder, victim):
    watch.SILENCE_S = 3.0
    waits(ranks, folder, victim=1 - victim)  # the one that lives on is in no collective


def agree_on_an_end(ranks, folder):
    alike = in_unison(ranks, "the same", wait_s=20.0)
    other = in_unison(ranks, f"rank {ranks.rank}", wait_s=1.0)
    (folder / f"unison-{ranks.rank}").write_text(f"{alike} {other}")


@pytest.mark.parametrize(
    ("work", "code", "line"),
    [
        (one_fails, 2, "error: rank 1 of 2 on HOST: train.rewards: no such file: judge.py\nhint: put it there\n"),
        (all_fail, 2, "error: recipe.dtype: 'int3' cannot be trained\n"),
        (has_a_bug, 1, "error: ZeroDivisionError: zero\nhint: this is a bug or a broken installation; VRAMWISE_DEBUG=1 shows where\n"),
    ],
    ids=["one", "all", "bug"],
)  # fmt: skip
def test_an_error_is_said_once_by_the_first_rank(work, code, line, tmp_path):
    assert ended(start(2, work, folder=tmp_path)) == [code, code]
    first, second = said(tmp_path, 2)
    assert first == line.replace("HOST", socket.gethostname())
    assert second == ""


def killed(work, victim, folder, **environment):
    """Return (exit codes, what each said) after rank `victim` of two was killed in `work`."""
    processes = start(2, work, folder, victim, folder=folder, **environment)
    while not all((folder / f"waits-{rank}").exists() for rank in range(2)):
        time.sleep(0.1)
    time.sleep(0.5)
    kill(processes[victim])
    return ended(processes), said(folder, 2)


@pytest.mark.parametrize(
    ("work", "victim"), [(waits, 0), (waits, 1), (works, 0)], ids=["first", "second", "working"]
)
def test_a_killed_rank_ends_the_others_and_one_names_it(work, victim, tmp_path):
    codes, spoken = killed(work, victim, tmp_path)
    assert codes[victim] == -9
    assert codes[1 - victim] == 1
    assert spoken[1 - victim] == (
        f"error: rank {victim} of 2 on {socket.gethostname()} is gone: killed, or its machine is lost\n"
        "hint: go on with: vramwise train run.yaml --nproc 2 --resume\n"
    )


def test_its_own_launcher_tells_of_a_killed_rank(tmp_path):
    codes, spoken = killed(waits, 1, tmp_path, VRAMWISE_LAUNCHER="a")
    assert codes == [1, -9]
    assert spoken == ["", ""]


def test_ranks_act_together_after_an_error_only_if_it_was_the_same(tmp_path):
    assert ended(start(2, agree_on_an_end, tmp_path, folder=tmp_path)) == [0, 0]
    assert [(tmp_path / f"unison-{rank}").read_text() for rank in (0, 1)] == ["True False"] * 2
