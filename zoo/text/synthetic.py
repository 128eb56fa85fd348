"""Synthetic tasks that tell sequence mixers apart: multi-query associative recall, and word problems of groups.

A row is a function of seed and index alone. Datasets with different seeds serve as training and test set.
"""

import itertools

import numpy as np
from jaxtyping import Shaped

_Row = dict[str, Shaped[np.ndarray, "seq"]]

_EVEN_PERMUTATIONS = [
    element
    for element in itertools.permutations(range(4))
    if sum(first > second for first, second in itertools.combinations(element, 2)) % 2 == 0
]
GROUPS: dict[str, list[tuple[int, ...]]] = {
    "parity": list(itertools.permutations(range(2))),
    "s3": list(itertools.permutations(range(3))),
    "a4": _EVEN_PERMUTATIONS,
    "s5": list(itertools.permutations(range(5))),
}
"""Permutation groups by name: the elements in the order of their tokens, the identity first."""


class AssociativeRecall:
    """Multi-query associative recall (MQAR; Arora et al., "Zoology", arXiv:2312.04927, section 4).

    A row starts with `num_pairs` key-value pairs, and later has every key once as a query, whose target is its value.
    `weights` is 1 at queries and 0 elsewhere. Token 0 is filler, keys are in the first half of the vocabulary, values
    in the second; neither repeats within a row.
    """

    def __init__(
        self,
        vocab: int,
        seq_len: int,
        num_pairs: int,
        *,
        gap_exponent: float | int = 0.01,
        seed: int = 0,
        rows: int = 100_000,
    ):
        """- `vocab`: size of the vocabulary; `seq_len`: tokens per row; `rows`: length of the dataset.
        - `gap_exponent`: a gap g before a query has probability proportional to g ** (gap_exponent - 1).

        **Raises** `ValueError` if the pairs and their queries do not fit into a row, or the keys into the vocabulary.
        """
        if num_pairs < 1 or 4 * num_pairs > seq_len or num_pairs >= vocab // 2:
            raise ValueError(
                f"{num_pairs} pairs and as many queries want rows of at least {4 * num_pairs} tokens, not {seq_len}, "
                f"and a vocabulary of more than {2 * num_pairs + 1}, not {vocab}"
            )
        self.vocab, self.seq_len, self.num_pairs, self.seed, self.rows = vocab, seq_len, num_pairs, seed, rows
        gaps = np.arange(1, (seq_len - 2 * num_pairs) // 2 + 1) ** (gap_exponent - 1)
        self.gap_probabilities = gaps / gaps.sum()

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> _Row:
        random, half, pairs = np.random.default_rng((self.seed, index)), self.vocab // 2, self.num_pairs
        keys = 1 + random.choice(half - 1, pairs, replace=False)
        values = half + random.choice(self.vocab - half, pairs, replace=False)
        tokens, targets = np.zeros(self.seq_len, np.int32), np.zeros(self.seq_len, np.int32)
        tokens[: 2 * pairs] = np.stack([keys, values], axis=1).ravel()
        gaps = random.choice(len(self.gap_probabilities), pairs, replace=False, p=self.gap_probabilities)
        queries = 2 * pairs + 2 * gaps
        tokens[queries], targets[queries] = keys, values
        return {"tokens": tokens, "targets": targets, "weights": (targets > 0).astype(np.float32)}


class GroupWords:
    """Word problem of a permutation group (Merrill et al., arXiv:2404.08819, section 3).

    Tokens are uniform elements of the group; the target at a position is the product of all elements up to it, the
    newest applied last. For the group of two elements this is parity.
    """

    def __init__(self, group: str, seq_len: int, *, seed: int = 0, rows: int = 100_000):
        """- `group`: a name of `GROUPS`; `seq_len`: tokens per row; `rows`: length of the dataset.

        **Raises** `ValueError` for another group.
        """
        if group not in GROUPS:
            raise ValueError(f"name one of the groups {', '.join(GROUPS)}, not {group}")
        number = {element: token for token, element in enumerate(GROUPS[group])}
        # products[p][q]: first p, then q
        self.products = [[number[tuple(q[point] for point in p)] for q in number] for p in number]
        self.seq_len, self.seed, self.rows = seq_len, seed, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> _Row:
        tokens = np.random.default_rng((self.seed, index)).integers(0, len(self.products), size=self.seq_len)
        targets = itertools.accumulate(tokens.tolist(), lambda product, token: self.products[product][token])
        return {"tokens": tokens.astype(np.int32), "targets": np.array([*targets], np.int32)}
