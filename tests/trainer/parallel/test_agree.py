"""What must be alike on all ranks is told before anything is loaded, the same on all of them."""

import shutil
import socket
from pathlib import Path

import pytest
import yaml

from planner.errors import UsageError
from tests.trainer.parallel.gloo import on_ranks
from trainer.foreign import read_given
from trainer.parallel import agree
from trainer.parallel.ranks import ALONE, Ranks

pytestmark = pytest.mark.xdist_group("ranks")


def refusal(work):
    try:
        work()
    except UsageError as error:
        return error.message
    return ""


def compared(ranks, folders):
    """Return what each pair of folders is refused for, a rank in each."""
    found = []
    for pair in folders:
        path = Path(pair[ranks.rank]) / "run.yaml"
        found.append(refusal(lambda path=path: agree.check_alike(ranks, path, read_given(path))))
    path = Path(folders[0][0]) / "run.yaml"
    agree._gpu = lambda: f"card {ranks.rank}"
    found.append(refusal(lambda: agree.check_alike(ranks, path, read_given(path))))
    agree.SHARED_FOLDER_S = 0.5
    own = Path(folders[1][ranks.rank])
    found.append(refusal(lambda: agree.check_shared(ranks, own)))
    found.append(refusal(lambda: agree.check_shared(ranks, Path(folders[0][0]))))
    return found


def test_what_differs_is_named_with_its_rank(document, tmp_path):
    made = document(train={"rewards": ["judge.py:judge"], "dataset": "rows.jsonl"})
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    (one / "run.yaml").write_text(yaml.safe_dump(made), encoding="utf-8")
    (one / "judge.py").write_text("def judge(completions, **rest): return [1.0]\n")
    (one / "rows.jsonl").write_text('{"prompt": "1+1="}\n')
    shutil.copytree(one, two)
    (two / "run.yaml").write_text(yaml.safe_dump(made | {"revision": "old"}), encoding="utf-8")
    other, without = tmp_path / "other", tmp_path / "without"
    shutil.copytree(one, other)
    (other / "judge.py").write_text("def judge(completions, **rest): return [0.0]\n")
    shutil.copytree(one, without)
    (without / "judge.py").unlink()
    longer, no_data = tmp_path / "longer", tmp_path / "no-data"
    shutil.copytree(one, longer)
    (longer / "rows.jsonl").write_text('{"prompt": "1+1="}\n' * 2)
    shutil.copytree(one, no_data)
    (no_data / "rows.jsonl").unlink()
    pairs = [(one, one), (one, two), (one, other), (one, without), (without, one)]
    pairs += [(one, longer), (one, no_data)]
    first, second = on_ranks(2, compared, [[str(path) for path in pair] for pair in pairs])
    assert first == second, "the same on every rank"
    host = socket.gethostname()
    alike, run_file, changed, absent, absent_first, data, no_rows, cards, apart, shared = first
    assert alike == shared == ""
    assert run_file.startswith(
        f"run file: rank 1 on {host} has another one than rank 0 on {host} (sha256 "
    )
    assert changed.startswith(f"train.rewards: judge.py: rank 1 on {host} has another one")
    assert absent == f"train.rewards: judge.py: rank 1 on {host} has none"
    assert absent_first == f"train.rewards: judge.py: rank 0 on {host} has none"
    assert data.startswith(f"train.dataset: rows.jsonl: rank 1 on {host} has another one")
    assert no_rows == f"train.dataset: rows.jsonl: rank 1 on {host} has none"
    assert cards == f"GPU: rank 1 on {host} has card 1, rank 0 on {host} card 0"
    assert apart.startswith(f"train.output: rank 1 on {host} does not see {one} of the first rank")
    assert [path.name for path in one.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("stated", "size", "said"),
    [
        (None, 1, ""),
        (None, 4, ""),
        (4, 4, ""),
        (8, 1, "machine.gpus: 8, but 1 rank runs"),
        (2, 4, "machine.gpus: 2, but 4 ranks run"),
        (1, 2, "machine.gpus: 1, but 2 ranks run"),
    ],
)
def test_a_machine_of_another_size_is_refused(document, tmp_path, stated, size, said):
    made = document() | ({} if stated is None else {"machine": {"gpus": stated}})
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(made), encoding="utf-8")
    ranks = ALONE if size == 1 else Ranks(size=size)
    assert refusal(lambda: agree.check_world(read_given(path).run, ranks)) == said
