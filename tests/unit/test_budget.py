"""What the repository weighs is what its budget allows."""

from __future__ import annotations

from tests.support import budget


def test_nothing_weighs_more_than_its_budget() -> None:
    found, limits = budget.weights(), budget.read()
    print("", "nearest to their limits:", *budget.nearest(found, limits)[:8], sep="\n")
    assert budget.faults(found, limits) == []


def test_a_budget_names_what_is_over_new_or_gone_and_is_only_lowered() -> None:
    found, limits = {"package": {"width": 101, "new": 3}}, {"package": {"width": 100, "old": 9}}
    assert [fault.partition(": ")[2] for fault in budget.faults(found, limits)] == [
        "package, 'new' = 3 has no limit: give it one in a commit that says why",
        "package, 'old' is gone: python -m tests.support.budget --lower takes its limit out",
        "package, 'width' = 101: expected at most 100; make it less, or edit the budget in a commit that says why",
    ]
    assert budget.lowered({"package": {"width": 81}}, limits) == {"package": {"width": 90}}
    assert budget.lowered({"package": {"width": 120}}, limits) == {"package": {"width": 100}}
