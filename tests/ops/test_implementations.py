"""The table of an operation's implementations: what `"auto"` chooses, what a name gets, what is said of others."""

import pytest

from zoo.ops.implementations import Choice, Implementation, Operation, observe_decisions, refuse_other_platforms
from zoo.ops.platform import target_platform

SORT = Operation[int](
    "sort",
    (
        Implementation("radix", sorted, find_obstacle=lambda n: "keys are long" if n > 64 else None),
        Implementation("bubble", sorted, find_drawback=lambda n: "it is slow" if n > 8 else None),
        Implementation("merge", sorted),
        Implementation("chip", sorted, find_obstacle=lambda n: refuse_other_platforms("tpu", "gpu")),
    ),
)


@pytest.mark.parametrize(("request_", "chosen"), [(4, "radix"), (65, "merge")])
def test_auto_takes_the_first_without_obstacle_or_drawback(request_, chosen):
    assert SORT.select("auto", request_).name == chosen
    assert [choice.name for choice in SORT.explain(request_) if choice.is_chosen] == [chosen]


def test_explain_says_why_not_another():
    assert SORT.explain(65) == (
        Choice("radix", False, "keys are long", False),
        Choice("bubble", False, "it is slow", True),
        Choice("merge", True, None, True),
        Choice("chip", False, "it runs on TPU and GPU, and this is compiled for CPU", False),
    )


def test_name_with_an_obstacle_is_refused():
    assert SORT.select("bubble", 65).name == "bubble"
    with pytest.raises(ValueError, match="'radix' cannot compute this, because keys are long. These can: bubble, mer"):
        SORT.select("radix", 65)
    with pytest.raises(ValueError, match="sort has no implementation 'quick': there are auto, radix, bubble, merge"):
        SORT.select("quick", 1)


def test_auto_takes_one_with_a_drawback_before_none():
    slow = Operation[int]("sort", (SORT.implementations[0], SORT.implementations[1]))
    assert slow.select("auto", 65).name == "bubble"
    with pytest.raises(ValueError, match="no implementation can compute this: not radix because keys are long"):
        Operation[int]("sort", SORT.implementations[:1]).select("auto", 65)


def test_platform_is_the_one_compiled_for():
    with target_platform("tpu"):
        assert SORT.select("chip", 65).name == "chip"


def test_decisions_are_observed_and_a_function_is_one():
    found = []
    with observe_decisions(found.append):
        SORT.select("auto", 65)
        assert SORT.select(max, 65).function is max
    SORT.select("auto", 65)
    assert [(decision.chosen, decision.is_auto) for decision in found] == [("merge", True), ("max", False)]
    assert found[0].choices == SORT.explain(65)
