"""Synthetic tasks that tell sequence mixers apart: associative recall, needle retrieval, word problems of groups.

A row is a function only of seed and index. Datasets with different seeds serve as training and test set.
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
        self.vocab = vocab
        self.seq_len = seq_len
        self.num_pairs = num_pairs
        self.seed = seed
        self.rows = rows
        gaps = np.arange(1, (seq_len - 2 * num_pairs) // 2 + 1) ** (gap_exponent - 1)
        self.gap_probabilities = gaps / gaps.sum()

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> _Row:
        random = np.random.default_rng((self.seed, index))
        half = self.vocab // 2
        pairs = self.num_pairs
        keys = 1 + random.choice(half - 1, pairs, replace=False)
        values = half + random.choice(self.vocab - half, pairs, replace=False)
        tokens = np.zeros(self.seq_len, np.int32)
        targets = np.zeros(self.seq_len, np.int32)
        tokens[: 2 * pairs] = np.stack([keys, values], axis=1).ravel()
        gaps = random.choice(len(self.gap_probabilities), pairs, replace=False, p=self.gap_probabilities)
        queries = 2 * pairs + 2 * gaps
        tokens[queries], targets[queries] = keys, values
        return {"tokens": tokens, "targets": targets, "weights": (targets > 0).astype(np.float32)}


class NeedleRetrieval:
    """Needle retrieval: key-value pairs hidden anywhere in a long filler, and queries for them at the end.

    Filler is uniform over the first half of the vocabulary, keys are in its third quarter, values in its last; neither
    repeats within a document. The last token of a document is a query, and so is every second one before it; their
    targets are the values, and `weights` is 1 at queries and 0 elsewhere.

    A row is one document, or with `min_seq_len` a packed row of documents of equal length: `seq_len` divided by a power
    of two that changes from row to row. A model learns from short documents soon, and carries it over to long ones.
    From only long documents it learns nothing for very long: almost all that attention reads at first is filler.
    """

    def __init__(
        self,
        vocab: int,
        seq_len: int,
        num_pairs: int,
        num_queries: int = 1,
        *,
        min_seq_len: int | None = None,
        seed: int = 0,
        rows: int = 100_000,
    ):
        """- `vocab`: size of the vocabulary; `seq_len`: tokens per row; `rows`: length of the dataset.
        - `num_pairs`: needles per document. `num_queries`: queries, each for any of them.
        - `min_seq_len`: tokens of the shortest documents; `seq_len` by default.

        **Raises** `ValueError` without a pair or a query, if they do not fit into a document, or the keys into the
        vocabulary, and if `seq_len` is not `min_seq_len` times a power of two.
        """
        shortest = seq_len if min_seq_len is None else min_seq_len
        if min(num_pairs, num_queries) < 1:
            raise ValueError(f"a document has at least one pair and one query, not {num_pairs} and {num_queries}")
        if 2 * (num_pairs + num_queries) > shortest or num_pairs > vocab // 4:
            raise ValueError(
                f"{num_pairs} pairs and {num_queries} queries want documents of at least "
                f"{2 * (num_pairs + num_queries)} tokens, not {shortest}, and a vocabulary of at least "
                f"{4 * num_pairs}, not {vocab}"
            )
        lengths = [shortest]
        while lengths[-1] < seq_len:
            lengths.append(2 * lengths[-1])
        if lengths[-1] != seq_len:
            raise ValueError(f"rows hold {shortest} tokens times a power of two, not {seq_len}")
        self.vocab = vocab
        self.seq_len = seq_len
        self.num_pairs = num_pairs
        self.num_queries = num_queries
        self.lengths = lengths
        self.seed = seed
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> _Row:
        random = np.random.default_rng((self.seed, index))
        length = self.lengths[index % len(self.lengths)]
        documents = [self._make_document(random, length) for _ in range(self.seq_len // length)]
        tokens, targets = map(np.concatenate, zip(*documents, strict=True))
        segment_ids, positions = np.divmod(np.arange(self.seq_len, dtype=np.int32), np.int32(length))
        row = {"tokens": tokens, "targets": targets, "weights": (targets > 0).astype(np.float32)}
        return row | {"segment_ids": segment_ids, "positions": positions}

    def _make_document(
        self, random: np.random.Generator, length: int
    ) -> tuple[Shaped[np.ndarray, "tokens"], Shaped[np.ndarray, "tokens"]]:
        quarter = self.vocab // 4
        pairs = self.num_pairs
        haystack = length - 2 * self.num_queries
        tokens = random.integers(0, 2 * quarter, length, dtype=np.int32)
        targets = np.zeros(length, np.int32)
        keys = 2 * quarter + random.choice(quarter, pairs, replace=False)
        values = 3 * quarter + random.choice(self.vocab - 3 * quarter, pairs, replace=False)
        # Distinct places for pairs of width one, moved apart: the pairs, of width two, never overlap.
        places = np.sort(random.choice(haystack - pairs, pairs, replace=False)) + np.arange(pairs)
        tokens[places], tokens[places + 1] = keys, values
        asked = random.integers(0, pairs, self.num_queries)
        tokens[haystack + 1 :: 2], targets[haystack + 1 :: 2] = keys[asked], values[asked]
        return tokens, targets

    @staticmethod
    def measure_depths(
        tokens: Shaped[np.ndarray, "batch seq"], num_queries: int
    ) -> Shaped[np.ndarray, "batch queries"]:
        """Return the place of each query's pair in rows of one document: from 0 at the start of the filler to 1."""
        asked = tokens[:, 1 - 2 * num_queries :: 2]
        return (tokens[:, None] == asked[:, :, None]).argmax(-1) / (tokens.shape[1] - 2 * num_queries)


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
        self.seq_len = seq_len
        self.seed = seed
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> _Row:
        tokens = np.random.default_rng((self.seed, index)).integers(0, len(self.products), size=self.seq_len)
        targets = itertools.accumulate(tokens.tolist(), lambda product, token: self.products[product][token])
        return {"tokens": tokens.astype(np.int32), "targets": np.array([*targets], np.int32)}
