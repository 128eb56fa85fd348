"""Rank search: give adapters of different methods equal numbers of trainable parameters."""

import bisect
import functools
from collections.abc import Callable


def find_rank(count_parameters: Callable[[int], int], budget: int, max_rank: int) -> int:
    """Return the rank from 1 to `max_rank` whose number of trainable parameters is nearest to `budget`.

        def count_parameters(rank):
            return zoo.count(eqx.filter_eval_shape(partial(adapters.dora, rank=rank, key=key), model))

        rank = adapters.find_rank(count_parameters, budget=40_960, max_rank=256)

    `count_parameters` must grow with the rank. It is called once per rank, for ranks up to twice the result: doubling,
    then bisection. Of two ranks that are equally near, the smaller one is returned.
    """
    count_parameters = functools.cache(count_parameters)
    high = 1
    while count_parameters(high) < budget and high < max_rank:
        high = min(2 * high, max_rank)
    ranks = range(1, high + 1)
    above = bisect.bisect_left(ranks, budget, key=count_parameters)
    return min(ranks[max(above - 1, 0) : above + 1], key=lambda rank: abs(count_parameters(rank) - budget))
