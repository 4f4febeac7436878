"""The mutants themselves: what is changed, that the known errors are still planted, and a small sample."""

import subprocess
import sys

import pytest

from benchmarks.mutants import FAST_TESTS, ROOT, TELLING, all_mutants, file_mutants, planted, sample
from benchmarks.planted import EXPLAINED, PLANTED

TEXT = '''
SIZE = 4


def total(a, b):
    """Add 3 things."""
    name = f"{a * 2} of {b + 1}"
    return max(a + b, SIZE), name, "no " + "arithmetic"
'''


def changes(text: str) -> dict[str, str]:
    """Return the changed line by change."""
    found = {}
    for mutant in file_mutants("x.py", text):
        old, new = text.splitlines(), mutant.source.splitlines()
        [(before, after)] = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
        assert before == old[mutant.line - 1]
        found[mutant.change] = after.strip()
    return found


def test_every_place_is_changed_once_and_words_are_left_alone() -> None:
    tail = ', SIZE), name, "no " + "arithmetic"'
    assert changes(TEXT) == {
        "4 x1.5": "SIZE = 6",
        "4 x0": "SIZE = 0",
        "max -> min in max(a + b, SIZE)": f"return min(a + b{tail}",
        "Add swapped in a + b": f"return max((a - b){tail}",
        "dropped + b": f"return max((a){tail}",
    }


def test_a_phase_loses_its_terms_one_by_one() -> None:
    assert changes('p = _phase("load", base, adapter)\n') == {
        "term dropped: base": "p = _phase('load', adapter)",
        "term dropped: adapter": "p = _phase('load', base)",
    }


def test_letters_beyond_ascii_do_not_move_the_places() -> None:
    assert changes('a = "größer", 3 * 2\n')["Mult swapped in 3 * 2"] == 'a = "größer", (3 // 2)'


def test_the_known_errors_are_planted_in_code_that_is_there() -> None:
    assert len(list(planted())) == len(PLANTED) >= 11


def test_a_sample_is_the_same_for_the_same_seed() -> None:
    first, again, other = sample(30, 7), sample(30, 7), sample(30, 8)
    assert [m.key for m in first] == [m.key for m in again]
    assert [m.key for m in first] != [m.key for m in other]
    assert len(first) == 30


def test_explanations_are_of_mutants_that_exist() -> None:
    keys = {mutant.key for mutant in all_mutants()}
    assert set(EXPLAINED) <= keys


def test_the_fast_set_exists_and_knows_what_tells() -> None:
    assert all((ROOT / name).exists() for name in FAST_TESTS)
    names = {name.rsplit("/", 1)[-1].removesuffix(".py") for name in FAST_TESTS}
    assert {test for _, test in TELLING} <= names


@pytest.mark.slow
def test_the_known_errors_are_noticed() -> None:
    command = [sys.executable, "-m", "benchmarks.mutants", "--count", str(len(PLANTED) + 1)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout
    assert f"{len(PLANTED) + 1} mutants, 0 survived" in done.stdout
