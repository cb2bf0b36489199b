from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from awexd_transports import holders
from awexd_transports.holders import together
from awexd_transports.joined import Joined, classes, runs
from awexd_transports.layout import Manifest
from awexd_transports.share import share
from tests.transports.strategies import manifest, meshes, one, specs

ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=12)


@pytest.mark.parametrize("mix", [None, 0])
@given(ROWS)
def test_equal_rows_stand_together_whatever_they_are_mixed_to(mix: int | None, rows: list[tuple[int, int]]) -> None:
    """With 0, all rows are mixed to one number, or a few: still nothing is taken for equal that is not."""
    columns = list(np.array(rows, np.int64).T)
    with pytest.MonkeyPatch.context() as patch:
        if mix is not None:
            patch.setattr(holders, "_MIX", np.uint64(mix))
        order, begin = together(columns)
    groups = [part.tolist() for part in np.split(order, begin[1:])]
    assert sorted(at for group in groups for at in group) == list(range(len(rows)))
    assert all(group == sorted(group) and len({rows[at] for at in group}) == 1 for group in groups)
    assert len(groups) == len(set(rows))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_sets_that_are_mixed_to_one_number_are_told_apart(data: st.DataObject) -> None:
    registered = data.draw(meshes(data.draw(specs())))
    expected = [m.digest for m in share(registered)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holders, "_mixed", lambda values: np.zeros(len(values), np.uint64))
        assert [m.digest for m in share(registered)] == expected


@settings(deadline=None)
@given(st.data())
def test_names_one_at_a_time_are_shared_as_all_together(data: st.DataObject) -> None:
    """The two ways to look at names agree: here every name is taken for irregular."""
    registered = data.draw(meshes(data.draw(specs())))
    expected = [m.digest for m in share(registered)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Joined, "aliased", lambda joined: np.arange(len(joined.place)))
        assert [m.digest for m in share(registered)] == expected


def test_manifests_are_told_apart_by_what_they_say_not_by_what_they_are() -> None:
    a, b = manifest(one("a", (2,))), manifest(one("b", (2,)))
    distinct, of_rank = classes([a, b, Manifest.decode(a.encoded), a])
    assert distinct == [a, b]
    assert of_rank.tolist() == [0, 1, 0, 0]


def test_runs_follow_one_another() -> None:
    assert runs(np.array([5, 0, 7]), np.array([2, 0, 3])).tolist() == [5, 6, 7, 8, 9]
