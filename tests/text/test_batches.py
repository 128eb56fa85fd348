"""Windows and batches: every token once, weights on text only, one global batch for any number of processes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zoo
from zoo.text.batches import (
    BatchIterator,
    CorpusSplit,
    Dataset,
    OrderedBatches,
    compute_segments,
    pad_left,
    spread_rows,
)
from zoo.train import Mixture, ShuffledBatches, TokenWindows, bits_per_byte

LENGTHS = (np.arange(256) != 0).astype(np.int64)


def split_of(tokens) -> CorpusSplit:
    tokens = np.asarray(tokens, np.uint8)
    return CorpusSplit("train", tokens, LENGTHS, *[int(np.count_nonzero(tokens))] * 2)


def random_split(size: int, seed: int = 0) -> CorpusSplit:
    return split_of(np.random.default_rng(seed).integers(0, 20, size))


def take(batches, count: int) -> list[dict[str, np.ndarray]]:
    return [next(batches) for _ in range(count)]


def same(a, b) -> bool:
    return len(a) == len(b) and all(np.array_equal(x[name], y[name]) for x, y in zip(a, b, strict=True) for name in x)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.integers(1, 9))
@settings(deadline=None)
def test_windows_cover_every_token_once(tokens, seq):
    windows = TokenWindows(np.array(tokens, np.uint8), seq)
    rows = [windows[i] for i in range(len(windows) + 1)]
    joined = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    assert joined["tokens"][: len(tokens)].tolist() == tokens
    assert joined["targets"][: len(tokens) - 1].tolist() == tokens[1:]
    assert not joined["targets"][len(tokens) - 1 :].any() and not rows[-1]["weights"].any()
    assert np.array_equal(joined["weights"], (joined["targets"] != 0).astype(np.float32))
    assert [row[name].dtype for row in rows[:1] for name in row] == [np.int32, np.int32, np.float32]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40))
@settings(deadline=None)
def test_segments_start_at_separators(tokens):
    row = compute_segments(np.array(tokens, np.int32))
    segment, position = 0, 0
    for i, token in enumerate(tokens):
        starts = token == 0 or i == 0
        segment, position = (segment + 1, 0) if starts else (segment, position + 1)
        assert (row["segment_ids"][i], row["positions"][i]) == (segment, position)


def test_batches_visit_every_window_once_per_epoch():
    split = split_of(np.arange(1, 241) % 256)
    batches = split.batches(seq_len=10, batch_size=1)
    first, second = ([int(batch["tokens"][0, 0]) for batch in take(batches, 23)] for _ in range(2))
    assert sorted(first) == sorted(second) == [1 + 10 * i for i in range(23)]
    assert first != second and first != sorted(first)


@given(st.integers(0, 12), st.integers(0, 3))
@settings(deadline=None, max_examples=10)
def test_batches_resume_from_one_integer(taken, seed):
    split = random_split(2000)
    batches = split.batches(seq_len=16, batch_size=8, seed=seed)
    take(batches, taken)
    state = batches.state
    assert state == 8 * taken
    again = split.batches(seq_len=16, batch_size=8, seed=seed)
    take(again, 2)
    again.restore(state)
    assert same(take(again, 20), take(batches, 20)) and again.state == batches.state


def test_batches_differ_by_seed():
    split = random_split(2000)
    assert not same(take(split.batches(16, 8, seed=0), 2), take(split.batches(16, 8, seed=1), 2))


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_batches_are_sharded_over_processes_in_order(processes):
    split = random_split(3000)
    whole = split.batches(seq_len=16, batch_size=8)
    take(whole, 5)
    shares = [split.batches(seq_len=16, batch_size=8, process=(i, processes)) for i in range(processes)]
    for share in shares:
        share.restore(whole.state)
    for wanted in take(whole, 30):
        parts = [next(share) for share in shares]
        assert same([{name: np.concatenate([part[name] for part in parts]) for name in wanted}], [wanted])
    assert {share.state for share in shares} == {whole.state}


def test_ordered_batches_cover_the_text_once_and_pad():
    split = random_split(1000)
    ordered = split.ordered(seq_len=16, batch_size=8)
    batches = list(ordered)
    assert len(ordered) == len(batches) == math.ceil(999 / 16 / 8) and same(batches, list(ordered))
    assert np.concatenate([b["tokens"].ravel() for b in batches])[:1000].tolist() == split.tokens.tolist()
    assert sum(b["weights"].sum() for b in batches) == np.count_nonzero(split.tokens[1:])
    assert all(batch["tokens"].shape == (8, 16) for batch in batches)


def test_ordered_batches_with_a_limit_are_spread():
    split = split_of(np.repeat(np.arange(1, 101), 16))
    seen = np.concatenate([batch["tokens"][:, 0] for batch in split.ordered(seq_len=16, batch_size=5, limit=2)])
    assert seen.tolist() == [1 + 10 * i for i in range(10)]
    halves = [split.ordered(seq_len=16, batch_size=2, limit=3).with_process((i, 2)) for i in range(2)]
    rows = [row for pair in zip(*halves, strict=True) for batch in pair for row in batch["tokens"][:, 0]]
    assert rows == sorted(rows) and len(rows) == 6


def test_batches_have_segments_on_request():
    batch = next(random_split(1000).batches(seq_len=16, batch_size=4, with_segments=True))
    assert {"segment_ids", "positions"} < set(batch)
    assert all(value.shape == (4, 16) for value in batch.values())
    assert (batch["segment_ids"] >= 1).all() and (batch["positions"][batch["tokens"] == 0] == 0).all()


def test_bits_per_byte_counts_targets_of_nonzero_weight():
    token_bytes = np.array([0, 1, 3])
    split = CorpusSplit("train", np.array([0, 1, 2, 2, 0, 1], np.uint8), token_bytes, text_bytes=8, text_tokens=4)
    ordered = split.ordered(seq_len=2, batch_size=1)
    assert split.bytes_per_token == 2.0 and ordered.bytes_per_token == 2.0
    assert bits_per_byte(2 * math.log(2), ordered) == pytest.approx(1.0)
    assert float(bits_per_byte(jnp.array(math.log(2)), split)) == pytest.approx(0.5)


class Answers:
    """Seven rows with targets of weight 1, 0.5 and 0 and, in odd rows, of -1."""

    def __len__(self):
        return 7

    def __getitem__(self, index):
        targets = np.array([index, 1, 2, -1 if index % 2 else 3], np.int32)
        weights = np.array([1, 0.5, 0, 0], np.float32)
        return dict(tokens=targets + 1, targets=targets, weights=weights, segment_ids=np.ones(4, np.int32))


@pytest.mark.parametrize("indices", [None, spread_rows(7, 4)])
def test_ordered_batches_of_any_dataset_are_padded(indices):
    ordered = OrderedBatches(Answers(), 4, indices)
    batches = list(ordered)
    assert len(ordered) == len(batches) == 2 and ordered.vocab is None
    joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    assert all(np.array_equal(joined[name][i], Answers()[i][name]) for name in joined for i in range(7))
    padding = {name: set(x[7].tolist()) for name, x in joined.items()}
    assert padding == {"tokens": {0}, "targets": {-1}, "weights": {0}, "segment_ids": {0}}
    halves = [list(ordered.with_process((i, 2))) for i in range(2)]
    assert same(
        [{name: np.concatenate([a[name], b[name]]) for name in a} for a, b in zip(*halves, strict=True)], batches
    )
    count = sum(float(np.sum(batch["weights"])) for batch in batches)
    model = zoo.models.Transformer(vocab=16, embed=8, layers=1, heads=1, mlp=8, key=jax.random.key(0))
    placed = [zoo.place_batch(batch, zoo.make_mesh(devices=jax.devices()[:1]), vocab=16) for batch in batches]
    losses = [zoo.cross_entropy(model, batch) for batch in placed]
    assert sum(float(weight) for _, weight in losses) == count == 10.5
    assert all(np.isfinite(float(loss)) for loss, _ in losses)


def test_bytes_per_token_need_the_bytes_of_tokens():
    token_bytes = np.array([1, 2, 40, 80, 4, 5, 6, 7])
    ordered = OrderedBatches(Answers(), 4, token_bytes=token_bytes)
    assert ordered.vocab == 8 and ordered.bytes_per_token == (1 + 2 + 40 + 80 + 4 + 5 + 6 + 7 * 2) / 14
    with pytest.raises(ValueError, match="bytes per token are not known: these batches need `token_bytes`"):
        bits_per_byte(1.0, OrderedBatches(Answers(), 4))


@given(st.integers(0, 50), st.integers(1, 9), st.none() | st.integers(1, 9))
def test_spread_rows_are_in_order_and_cover_all(num_rows, batch_size, limit):
    indices = spread_rows(num_rows, batch_size, limit)
    assert len(indices) == batch_size * min(math.ceil(num_rows / batch_size), limit or 50)
    assert (np.diff(indices) >= 0).all()
    if limit is None or limit * batch_size >= num_rows:
        assert set(range(num_rows)) <= set(indices)
    else:
        assert len(set(indices)) == len(indices) and indices[-1] < num_rows
        assert np.diff(indices).max(initial=0) <= math.ceil(num_rows / len(indices))


class Images:
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return dict(image=np.full((3, 4, 4), index, np.float32), label=np.int64(index) * np.ones((), np.int64))


def test_batches_of_any_dataset():
    assert isinstance(Images(), Dataset) and isinstance(ShuffledBatches(Images(), 4), BatchIterator)
    batches = take(ShuffledBatches(Images(), 4, seed=1), 3)
    assert batches[0]["image"].shape == (4, 3, 4, 4) and batches[0]["label"].shape == (4,)
    assert sorted(int(label) for batch in batches for label in batch["label"]) == list(range(12))


def test_steps_of_a_number_of_passes():
    batches = split_of(np.arange(1, 241) % 256).batches(seq_len=10, batch_size=4)
    assert str(batches) == "23 rows: a pass is 6 steps"
    assert [batches.count_steps(epochs) for epochs in (1, 2, 3.0, 0.1, 4)] == [6, 12, 18, 1, 23]
    assert ShuffledBatches(range(30), 10).count_steps(1.1) == 4 and ShuffledBatches(range(10), 10).count_steps(1.1) == 2
    assert ShuffledBatches(range(110), 11).count_steps(1.1) == 11  # and 1.1 * 110 is above 121 in floats
    assert str(ShuffledBatches(range(4), 4)) == "4 rows: a pass is 1 step"
    mixture = ShuffledBatches(Mixture({"a": [{"x": np.zeros(1)}]}, {"a": 1.0}), 2)
    assert str(mixture) == "a mixture, without an end"
    with pytest.raises(ValueError, match=r"3 epochs of a mixture: it has no end, so give a number of steps"):
        mixture.count_steps(3)


def test_batches_errors_name_the_numbers():
    split = random_split(10)
    with pytest.raises(ValueError, match=r"the train text has 10 tokens, too few for one window of 16"):
        split.batches(seq_len=16, batch_size=1)
    with pytest.raises(ValueError, match=r"a batch of 6 windows cannot be shared evenly by 4 processes"):
        split.batches(seq_len=2, batch_size=6, process=(0, 4))
    with pytest.raises(ValueError, match=r"the train text is empty"):
        split_of([]).ordered(seq_len=2, batch_size=1)
    with pytest.raises(ValueError, match=r"the dataset has no rows"):
        ShuffledBatches([], 2)


def test_pad_left():
    batch, mask = pad_left([(1, 2, 3), (4,)])
    assert batch.tolist() == [[1, 2, 3], [0, 0, 4]]
    assert mask.tolist() == [[True] * 3, [False, False, True]]
