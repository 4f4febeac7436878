"""Fifty people at once: nobody gets an error, and the server stays small."""

import pytest

from benchmarks.app_load import CHANGES, SESSIONS, measure

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.xdist_group("browser")]
MOST_MIB = 600


def test_fifty_visitors_get_their_answers_without_errors() -> None:
    found = measure(SESSIONS, 5.0)
    assert found["messages"] == []
    assert found["changes"] == SESSIONS * CHANGES
    assert found["memory_mib"] <= MOST_MIB
