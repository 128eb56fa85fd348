"""Global batches, assembled from the batches of several readers in one process."""

from collections.abc import Sequence

import numpy as np

from zoo.text.batches import ShuffledBatches


def read_rows(dataset, batch_size: int, *, seed: int, processes: int, start: int, steps: int) -> list[dict]:
    """The rows of `steps` global batches from row `start` on, which `processes` readers share."""
    readers = [ShuffledBatches(dataset, batch_size, seed=seed, process=(i, processes)) for i in range(processes)]
    return read_all(readers, start, steps)


def read_all(readers: Sequence[ShuffledBatches], start: int, steps: int) -> list[dict]:
    """The rows of `steps` global batches from row `start` on, of which each reader has its part."""
    rows = []
    batch_size = readers[0].batch_size
    for reader in readers:
        reader.restore(start)
    for _ in range(steps):
        shards = [next(reader) for reader in readers]
        batch = {name: np.concatenate([shard[name] for shard in shards]) for name in shards[0]}
        rows += [{name: x[row] for name, x in batch.items()} for row in range(batch_size)]
    for reader in readers:
        assert reader.state == start + steps * batch_size
        reader.close()
    return rows


def are_same(rows: list[dict], others: list[dict]) -> bool:
    return all(
        row.keys() == other.keys() and all(np.array_equal(row[name], other[name]) for name in row)
        for row, other in zip(rows, others, strict=True)
    )
