"""Lag is counted in optimizer steps along the lineage, never in version numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.algo.staleness import Node, Tree, sample_lag, span_lags, summarise, version_lag

# One trainer reached step 4, the next resumed from step 2 (version 2) and published 5 and 6.
TREE = Tree(
    {
        0: Node(-1, 0),
        1: Node(0, 1),
        2: Node(1, 2),
        3: Node(2, 3),
        4: Node(3, 4),
        5: Node(2, 2),
        6: Node(5, 3),
    }
)


@pytest.mark.parametrize(
    ("then", "now", "step_now", "lag"),
    [
        (4, 4, 4, 0),
        (2, 4, 4, 2),
        (2, 4, 6, 4),  # two steps done since version 4 was published
        (2, 5, 2, 0),  # the resumed weights are those of version 2
        (2, 6, 3, 1),  # not 6 - 2
        (4, 6, 3, 3),  # two steps back to version 2, one forward
        (3, 5, 2, 1),
    ],
)
def test_the_lag_follows_the_branches(then: int, now: int, step_now: int, lag: int):
    assert version_lag(TREE, then, now, step_now) == lag


def test_an_unknown_version_is_an_error():
    with pytest.raises(KeyError):
        version_lag(TREE, 9, 6, 3)


def test_versions_without_a_common_root_are_an_error():
    with pytest.raises(KeyError, match="no common ancestor"):
        version_lag(Tree({0: Node(-1, 0), 1: Node(-1, 0)}), 0, 1, 0)


@pytest.mark.parametrize("parent", [3, 7])
def test_a_version_that_follows_itself_or_a_later_one_is_an_error_and_no_endless_way(parent: int):
    tree = Tree({0: Node(-1, 0), 3: Node(parent, 1), 7: Node(3, 2)})
    with pytest.raises(KeyError, match="can't have followed"):
        version_lag(tree, 0, 3, 1)


def test_a_sample_is_as_old_as_its_oldest_token():
    lags = span_lags([(3, 10), (4, 1)], TREE, 4, 4)
    assert lags == [(1, 10), (0, 1)]
    assert sample_lag(lags) == 1


def test_a_span_without_tokens_does_not_age_a_sample():
    assert sample_lag([(7, 0), (1, 5)]) == 1
    assert sample_lag([]) == 0


def test_the_summary_of_no_samples_is_zero():
    assert summarise([]) == (0.0, 0.0, 0.0, 0)
    assert summarise([0, 0, 1, 3]).max == 3
    assert summarise([0, 0, 1, 3]).mean == 1.0


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    tree = Tree({0: Node(-1, 0)})
    for version in range(1, draw(st.integers(1, 20))):
        parent = draw(st.integers(0, version - 1))
        tree.add(version, Node(parent, tree[parent].step + draw(st.integers(0, 3))))
    return tree


@given(trees(), st.data())
def test_lag_is_a_distance_on_the_tree(tree: Tree, data: st.DataObject):
    versions = st.sampled_from(sorted(tree))
    a, b, c = data.draw(versions), data.draw(versions), data.draw(versions)

    def lag(x: int, y: int) -> int:
        return version_lag(tree, x, y, tree[y].step)

    assert lag(a, a) == 0
    assert lag(a, b) == lag(b, a) >= abs(tree[a].step - tree[b].step)
    assert lag(a, c) <= lag(a, b) + lag(b, c)


def test_steps_that_were_repeated_to_the_same_weights_are_one_branch_again():
    """Versions 5, 6 and 7 repeat steps 2, 3 and 4; the last one came out otherwise."""
    tree = Tree({0: Node(-1, 0, "a"), 1: Node(0, 1, "b"), 2: Node(1, 2, "c"), 3: Node(2, 3, "d")})
    tree.add(4, Node(3, 4, "e"))
    tree.add(5, Node(2, 2, "c"))
    assert version_lag(tree, 4, 5, 2) == 2, "two steps back: version 5 is version 2"
    tree.add(6, Node(5, 3, "d"))
    assert version_lag(tree, 3, 6, 3) == 0 and version_lag(tree, 4, 6, 3) == 1
    tree.add(7, Node(6, 4, "other"))
    assert version_lag(tree, 4, 7, 4) == 2, "one step back to version 3, one forward"
    assert version_lag(tree, 6, 7, 4) == version_lag(tree, 3, 7, 4) == 1


def test_equal_weights_of_another_step_are_another_policy():
    """A refused step changes nothing, and is a step all the same."""
    tree = Tree({0: Node(-1, 0, "a"), 1: Node(0, 1, "a")})
    assert version_lag(tree, 0, 1, 1) == 1
