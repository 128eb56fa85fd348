"""Random inputs of the checks: separate documents, packed ones with padding at both ends, and left-padded prompts.

Drawn by NumPy, which compiles nothing. Padding holds larger numbers than the documents, so that a leak shows.
"""

import dataclasses
from functools import cached_property

import numpy as np

MOST_PADDING = 3


@dataclasses.dataclass(frozen=True)
class Texts:
    """Two documents per row, `first` and `second`, of `seq_len` tokens each.

    Row r begins with r % 4 tokens of padding. Packed rows are as long as two documents and `MOST_PADDING`, rounded up
    to a multiple of `seq_multiple`, and there is at least one row for each token of them, a multiple of `multiple`.
    """

    seq_len: int
    embed: int
    multiple: int = 8
    seq_multiple: int = 1
    seed: int = 0

    @cached_property
    def rows(self) -> int:
        return -(-self.packed_len // self.multiple) * self.multiple

    @cached_property
    def packed_len(self) -> int:
        return -(-(2 * self.seq_len + MOST_PADDING) // self.seq_multiple) * self.seq_multiple

    @cached_property
    def padding(self) -> np.ndarray:
        """Number of padded tokens at the start of each row."""
        return np.arange(self.rows) % (MOST_PADDING + 1)

    def draw(self, number: int, length: int) -> np.ndarray:
        """Draw the array of this number, "rows length embed", from a normal distribution."""
        rng = np.random.default_rng([self.seed, number])
        return rng.normal(size=(self.rows, length, self.embed)).astype(np.float32)

    @cached_property
    def first(self) -> np.ndarray:
        return self.draw(0, self.seq_len)

    @cached_property
    def second(self) -> np.ndarray:
        return self.draw(1, self.seq_len)

    @cached_property
    def segment_ids(self) -> np.ndarray:
        """Segments of the packed rows: 1 and 2, and 0 for padding."""
        place = np.arange(self.packed_len) - self.padding[:, None]
        return np.select([place < 0, place < self.seq_len, place < 2 * self.seq_len], [0, 1, 2], 0).astype(np.int32)

    @cached_property
    def packed(self) -> dict[str, np.ndarray]:
        """Packed rows `x` with `segment_ids` and `positions`, which restart at each document and at padding."""
        x = 3 * self.draw(2, self.packed_len)
        place = np.arange(self.packed_len) - self.padding[:, None]
        x[self.segment_ids == 1] = self.first.reshape(-1, self.embed)
        x[self.segment_ids == 2] = self.second.reshape(-1, self.embed)
        positions = np.where(place < 0, place + self.padding[:, None], place % self.seq_len)
        return {"x": x, "segment_ids": self.segment_ids, "positions": positions.astype(np.int32)}

    def unpack(self, y: np.ndarray, segment: int) -> np.ndarray:
        """Return the outputs of one document of each packed row."""
        return y[self.segment_ids == segment].reshape(self.rows, self.seq_len, -1)

    def draw_weights(self, features: int) -> np.ndarray:
        """Draw the weights of a loss of packed outputs: 0 at padding."""
        rng = np.random.default_rng([self.seed, 3])
        weights = rng.normal(size=(self.rows, self.packed_len, features))
        return (weights * (self.segment_ids > 0)[..., None]).astype(np.float32)

    def draw_diagonal_weights(self, features: int) -> np.ndarray:
        """Draw weights of a loss to which row i contributes only the output at token i. The gradient with respect to
        row i is then the gradient of this output: a Jacobian in one backward pass."""
        diagonal = np.eye(self.rows, self.packed_len)[..., None]
        return (self.draw_weights(features) * diagonal).astype(np.float32)

    @cached_property
    def prompt(self) -> np.ndarray:
        """The first document after the padding of each row, as long as without padding: the input of a cache."""
        x = 3 * self.draw(4, self.seq_len)
        for row, padding in enumerate(self.padding):
            x[row, padding:] = self.first[row, : self.seq_len - padding]
        return x

    @cached_property
    def prompt_positions(self) -> np.ndarray:
        """Positions of `prompt`: -1 at padding."""
        return np.maximum(np.arange(self.seq_len) - self.padding[:, None], -1).astype(np.int32)

    def pad(self, y: np.ndarray) -> np.ndarray:
        """Shift outputs of `first` to the places of their tokens in `prompt`."""
        return np.stack([np.roll(row, padding, axis=0) for row, padding in zip(y, self.padding, strict=True)])
