"""Rank search: nearest to the budget, without a call for ranks far beyond."""

from zoo import adapters


def test_find_rank_is_nearest_to_the_budget():
    calls = []

    def count_parameters(rank):
        calls.append(rank)
        return 10 * rank + 3

    for budget, rank in ((1, 1), (13, 1), (18, 1), (19, 2), (57, 5), (59, 6), (253, 25), (10_000, 100)):
        calls.clear()
        assert adapters.find_rank(count_parameters, budget, 100) == rank
        assert max(calls) <= 2 * rank and len(calls) == len(set(calls))
