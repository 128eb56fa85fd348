"""The choice of `torch.topk` on a CPU among equal scores, which is the order that std::nth_element of libstdc++ leaves.

It depends on the number of scores, masked ones included: other lengths of a text, or padding, choose otherwise. The
library chooses the first of equal scores.
"""

import jax
import jax.numpy as jnp
import numpy as np


def select_as_torch(scores, mask, top):
    """Select as `zoo.ops.attention.indexer.select_highest` does, but of equal scores those that PyTorch selects."""
    masked = jnp.where(mask, scores, -jnp.inf)
    shape = jax.ShapeDtypeStruct(masked.shape, bool)
    return jax.pure_callback(lambda x: mark_highest(np.asarray(x), top), shape, masked)


def select_visible_as_torch(scores, mask, top):
    """Select as `select_as_torch` does, from a list of the allowed scores only."""

    def select(scores, mask):
        marks = np.zeros(scores.shape, bool)
        for row in np.ndindex(scores.shape[:-1]):
            allowed = np.flatnonzero(mask[row])
            if len(allowed):
                marks[row][allowed] = mark_highest(scores[row][allowed], min(top, len(allowed)))
        return marks

    mask = jnp.broadcast_to(mask, scores.shape)
    shape = jax.ShapeDtypeStruct(scores.shape, bool)
    return jax.pure_callback(lambda *arrays: select(*map(np.asarray, arrays)), shape, scores, mask)


def mark_highest(scores, top):
    """Return True at the scores of each row that `torch.topk` selects, if `top` is over 1/64 of them."""
    marks = np.zeros(scores.shape, bool)
    for row in np.ndindex(scores.shape[:-1]):
        pairs = [(float(score), index) for index, score in enumerate(scores[row])]
        put_nth_element(pairs, top - 1)
        marks[row][[index for _, index in pairs[:top]]] = True
    return marks


def put_nth_element(pairs, nth):
    """Partition pairs of score and index in place: introselect, without its fallback for unlucky pivots."""
    first, last = 0, len(pairs)
    while last - first > 3:
        cut = partition(pairs, first, last)
        if cut <= nth:
            first = cut
        else:
            last = cut
    pairs[first:last] = sorted(pairs[first:last], key=lambda pair: -pair[0])  # stable, as insertion is


def partition(pairs, first, last):
    """Partition by the median of three, which is put first; return the first of the lower part."""
    by_score = lambda index: pairs[index][0]
    swap_median_to_first(pairs, first, (first + 1, first + (last - first) // 2, last - 1))
    pivot = by_score(first)
    low, high = first + 1, last
    while True:
        while by_score(low) > pivot:
            low += 1
        high -= 1
        while pivot > by_score(high):
            high -= 1
        if low >= high:
            return low
        pairs[low], pairs[high] = pairs[high], pairs[low]
        low += 1


def swap_median_to_first(pairs, first, places):
    """Swap the median of three places with the first pair. Of equal scores the order of comparisons decides."""
    a, b, c = places
    above = lambda i, j: pairs[i][0] > pairs[j][0]
    if not above(a, b):
        a, b = b, a
    if above(b, c):
        median = b
    elif above(a, c):
        median = c
    else:
        median = a
    pairs[first], pairs[median] = pairs[median], pairs[first]
