"""Streams have the rows of loaded records, go on where they stopped, and say what they leave out."""

import functools
import json
import logging
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import multihost_utils

from zoo.text import ChatTemplate
from zoo.text.batches import BatchIterator
from zoo.text.chat.template import PLAIN_TEMPLATE
from zoo.text.records import find_files
from zoo.text.records.json_lines import JsonLines
from zoo.text.records.token_store import RecordsError
from zoo.text.tokenizers import ByteTokenizer, FileTokenizer, train_bpe
from zoo.train import load_records, stream_records

TEMPLATE = ChatTemplate(PLAIN_TEMPLATE, {"eos_token": "\0"})
OPTIONS = {"tokenizer": ByteTokenizer(), "template": TEMPLATE, "seq_len": 48}
TEXTS = [{"text": f"{number}: " + "ab c" * (number * 7 % 30)} for number in range(120)]
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"{n} + 1?"},
            {"role": "assistant", "content": f"{n + 1} " * (n % 4 + 1)},
        ]
    }
    for n in range(60)
]
PAIRS = [{"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": "no" * (n % 5 + 1)} for n in range(60)]


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with files of texts; lines are read in units of about 400 bytes."""
    monkeypatch.setitem(find_files._READERS, ".jsonl", functools.partial(JsonLines, unit_bytes=400))
    for number in range(3):
        write_lines(tmp_path / f"{number}.jsonl", TEXTS[40 * number : 40 * number + 40])
    return tmp_path


def stream(source, **options):
    return stream_records(source, **{"batch_size": 1, **OPTIONS, **options})


def list_segments(rows):
    """Return tokens, targets and weights of each segment; of a pair, of both."""
    found = []
    for row in rows:
        starts = np.flatnonzero((row["positions"] == 0) & (row["segment_ids"] > 0))
        used = int((row["segment_ids"] > 0).sum())
        for start, stop in zip(starts, [*starts[1:], used], strict=True):
            assert len(set(row["segment_ids"][start:stop])) == 1
            assert row["positions"][start:stop].tolist() == list(range(stop - start))
            found.append(tuple(tuple(row[name][start:stop].tolist()) for name in ("tokens", "targets", "weights")))
        assert (row["targets"][used:] == -1).all() and not row["weights"][used:].any()
    return found


def take_rows(batches, until):
    """Read rows up to the one with which `until` texts or parts of texts are there."""
    rows = []
    while len(list_segments(rows)) < until:
        batch = next(batches)
        rows += [{name: x[row] for name, x in batch.items()} for row in range(len(batch["tokens"]))]
    return rows


def are_same(batch, other):
    return batch.keys() == other.keys() and all(
        np.array_equal(batch[name], other[name]) and batch[name].dtype == other[name].dtype for name in batch
    )


@pytest.mark.parametrize(("records", "too_long"), [(TEXTS, "cut"), (TEXTS, "drop"), (CHATS, "drop"), (PAIRS, "drop")])
def test_a_pass_has_the_texts_of_loaded_records(tmp_path, records, too_long):
    options = {"too_long": too_long}
    data = load_records(records, validation=0.0, cache=tmp_path, **OPTIONS, **options)
    loaded = [data.train.rows[number] for number in range(len(data.train.rows))]
    wanted = list_segments(loaded)
    items = len(records) - data.counts["dropped"]
    with_window = stream(records, window=items, **options)
    rows = take_rows(with_window, until=len(wanted))
    with_window.close()
    assert Counter(list_segments(rows)) == Counter(wanted), "each target once, with its weight, and nothing else"
    assert len(rows) == len(loaded), "packed as tightly"
    assert {name: (x.shape, x.dtype) for name, x in rows[0].items()} == {
        name: (x.shape, x.dtype) for name, x in loaded[0].items()
    }
    assert isinstance(with_window, BatchIterator) and with_window.kind == data.kind
    passes = with_window.counts["records"] / len(records)
    assert with_window.counts["dropped"] == passes * data.counts["dropped"]
    assert with_window.counts["cut"] == passes * data.counts["cut"]


def test_pairs_of_as_many_targets_as_a_row_has_are_kept():
    """Each of both texts has its prompt of 1 byte, its answer, and the end after the separator."""
    answers = {"fits": ("a" * 21, "b" * 23), "long": ("a" * 21, "b" * 24)}
    pairs = {name: {"prompt": "?", "chosen": chosen, "rejected": other} for name, (chosen, other) in answers.items()}
    batches = stream([pairs["fits"], pairs["long"]], window=1)
    (row,) = take_rows(batches, 1)
    batches.close()
    assert (row["segment_ids"] > 0).sum() == 48 and b"b" * 24 not in row["targets"].astype(np.uint8).tobytes()
    assert batches.counts["dropped"] >= 1
    batches = stream([pairs["fits"]] * 2, window=1)
    next(batches)
    batches.close()
    assert batches.counts["dropped"] == 0


def test_pairs_stay_together():
    batches = stream(PAIRS, seq_len=96, batch_size=4, window=20)
    for _ in range(4):
        batch = next(batches)
        for tokens, segments in zip(batch["tokens"], batch["segment_ids"], strict=True):
            assert segments.max() % 2 == 0
            asked = [tokens[segments == segment].tobytes().split(b"?")[0] for segment in range(1, segments.max() + 1)]
            assert asked[::2] == asked[1::2]
    batches.close()


@given(st.integers(0, 40), st.integers(0, 3), st.sampled_from([5, 37, 500]))
@settings(deadline=None, max_examples=8)
def test_a_stream_goes_on_bit_for_bit(taken, other, window):
    options = {"window": window, "seed": other, "batch_size": 2}
    first = stream(TEXTS, **options)
    for _ in range(taken):
        next(first)
    state = json.loads(json.dumps(first.state))
    again = stream(TEXTS, **options)
    for _ in range(other):
        next(again)
    again.restore(state)
    assert again.state == state
    for _ in range(20):
        assert are_same(next(again), next(first))
    assert again.state == first.state
    for batches in (first, again):
        batches.close()


def test_units_are_resumed_and_a_closed_stream_goes_on(folder):
    batches = stream(folder, window=7, batch_size=3)
    for _ in range(11):
        next(batches)
    state = batches.state
    wanted = [next(batches) for _ in range(30)]
    assert state["positions"]["0"] != batches.state["positions"]["0"]
    batches.restore(state)
    for number, batch in enumerate(wanted):
        if number % 10 == 5:
            batches.close()
        assert are_same(next(batches), batch)
    batches.close()
    single = stream(folder, window=7, batch_size=1)
    single.restore(state)
    for batch in wanted[:3]:
        rows = [next(single) for _ in range(3)]
        assert are_same({name: np.concatenate([row[name] for row in rows]) for name in rows[0]}, batch)
    single.close()


def test_the_next_pass_has_another_order(folder):
    batches = stream(folder, window=120, too_long="drop", seq_len=200)
    passes = [[segment[0] for segment in list_segments(take_rows(batches, until=120))] for _ in range(2)]
    batches.close()
    assert sorted(passes[0]) == sorted(passes[1]) and passes[0] != passes[1]
    other = stream(folder, window=120, too_long="drop", seq_len=200, seed=1)
    assert [segment[0] for segment in list_segments(take_rows(other, until=120))] not in passes
    other.close()


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_read_different_units_and_together_all(folder, processes):
    units = {}
    for file in find_files.find_record_files(folder):
        for unit in file.split():
            for _, record in file.read(unit):
                assert isinstance(record, dict)
                units[record["text"].encode()] = file.path, unit
    num_units = len(set(units.values()))
    assert num_units > 6
    seen = []
    for index in range(processes):
        batches = stream(folder, window=1, seq_len=200, batch_size=processes, process=(index, processes))
        read = []
        while len(read) <= len(range(index, num_units, processes)):
            ((_, targets, _),) = list_segments([{name: x[0] for name, x in next(batches).items()}])
            unit = units[bytes(targets)]
            if unit not in read[-1:]:
                read.append(unit)
        seen += read[:-1]  # one pass
        batches.close()
    assert len(seen) == num_units and set(seen) == set(units.values())


def test_another_number_of_processes_is_refused(folder):
    batches = stream(folder, batch_size=2, process=(0, 2), window=8)
    next(batches)
    state = batches.state
    assert state["processes"] == 2 and set(state["positions"]) == {"0"}
    batches.close()
    with pytest.raises(
        ValueError, match=r"saved on 2 processes, and this run has 1.*write the tokens once instead: tr"
    ):
        stream(folder, batch_size=2).restore(state)
    with pytest.raises(ValueError, match="none of process 1"):
        stream(folder, batch_size=2, process=(1, 2), window=8).restore(state)
    for options, said in (
        ({"seed": 1}, "seed=0, and this one has 1"),
        ({"window": 9}, "window=8, and this one has 9"),
    ):
        with pytest.raises(ValueError, match=said):
            stream(folder, batch_size=2, process=(0, 2), **{"window": 8, **options}).restore(state)
    with pytest.raises(ValueError, match="expected the state of a stream of records, got '24'"):
        stream(folder).restore(24)


def test_the_state_has_the_positions_of_all_processes(folder, monkeypatch):
    given = {}
    here = threading.local()
    meeting = threading.Barrier(2, timeout=60)

    def process_allgather(x):
        given[here.index] = x
        meeting.wait()
        both = np.stack([given[0], given[1]])
        meeting.wait()
        return both

    def read(index):
        here.index = index
        batches = stream(folder, batch_size=2, window=8, process=(index, 2))
        for _ in range(150 * index):  # so that one position is longer to write
            next(batches)
        position = batches._position
        batches.close()
        return position, batches.state

    monkeypatch.setattr(multihost_utils, "process_allgather", process_allgather)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with ThreadPoolExecutor(2) as pool:
        (first, state), (second, other) = pool.map(read, range(2))
    assert state == other and first is None and second is not None
    assert state["positions"] == {"0": first, "1": second} and state["processes"] == 2


def test_too_few_units_and_bad_arguments_are_named(folder):
    with pytest.raises(ValueError, match="records: 1 units for 2 processes, and each process reads units of its own"):
        stream(TEXTS, batch_size=2, process=(0, 2))
    with pytest.raises(ValueError, match="cannot be shared evenly by 2 processes"):
        stream(folder, batch_size=3, process=(0, 2))
    for name, value in {"seq_len": 0, "window": 0, "workers": -1}.items():
        with pytest.raises(ValueError, match=f"{name} is {value}: expected at least"):
            stream(folder, **{name: value})
    for records in [{"prompt": "a", "completion": "b", "label": 1}], [{"prompt": "a", "answer": 1}]:
        with pytest.raises(NotImplementedError, match="are not streamed: write the tokens once instead"):
            stream(records)
    for mixture in {"a.jsonl": 1.0}, ((0, {"a.jsonl": 1.0}),):
        with pytest.raises(NotImplementedError, match="a mixture of sources is not streamed"):
            stream(mixture)
    with pytest.raises(ValueError, match="too_long='cut' would cut a preference record"):
        stream(PAIRS, too_long="cut")


def test_a_fault_stops_the_stream_with_its_place(folder):
    (folder / "3.jsonl").write_text('{"text": "a"}\n{"text": 1}\n{"text": "b"\n')
    batches = stream(folder, window=3)
    with pytest.raises(RecordsError) as raised:
        for _ in range(1000):
            next(batches)
    first, second, advice = str(raised.value).split("\n")
    assert first == f"{folder / '3.jsonl'}:2: `text` is a number, expected text: 1"
    assert second.startswith(f"{folder / '3.jsonl'}:3: ") and "bad_records='skip'" in advice
    with pytest.raises(RecordsError):  # again: it is not passed over
        for _ in range(1000):
            next(batches)
    with pytest.raises(RecordsError, match=r"records?.*the record has the fields `body`"):
        stream([{"body": "a"}])


def test_faults_may_be_left_out_and_are_counted(tmp_path, caplog):
    records = [{"text": number if number % 2 else f"text {number}"} for number in range(100)]
    path = write_lines(tmp_path / "a.jsonl", records)
    with caplog.at_level(logging.WARNING, "zoo"):
        batches = stream(path, bad_records="skip", window=50)
        rows = take_rows(batches, until=50)
        batches.close()
    assert len({segment[1] for segment in list_segments(rows)}) == 50
    passes = batches.counts["records"] // 100
    assert passes >= 1 and batches.counts["rejected"] == 50 * passes
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:20] == [
        f"left out {path}:{2 * n + 2}: `text` is a number, expected text: {2 * n + 1}" for n in range(20)
    ]
    assert lines[20] == "left out 50 of 100 records so far"
    assert len(lines) <= 20 + passes.bit_length() + 1


@pytest.mark.parametrize("options", [{"bad_records": "skip"}, {"too_long": "drop"}])
def test_a_source_without_a_row_is_an_error(folder, options):
    for number in range(3):
        text = number if "bad_records" in options else "x" * 90
        write_lines(folder / f"{number}.jsonl", [{"text": text}] * 50)
    with pytest.raises(ValueError, match="no records there that make a row: of 150, .* are longer than 48 targets"):
        next(stream(folder, kind="text", **options))


def test_workers_give_the_same_batches(folder):
    path = folder / "tokenizer.json"
    train_bpe([text["text"].encode() for text in TEXTS], 300, path)
    options = {"tokenizer": FileTokenizer(path, 300), "window": 30, "batch_size": 2}
    here = stream(folder / "0.jsonl", **options)
    wanted = [next(here) for _ in range(20)]
    elsewhere = stream(folder / "0.jsonl", workers=1, **options)
    assert all(are_same(next(elsewhere), batch) for batch in wanted)
    elsewhere.restore(here.state)
    assert elsewhere.digest == here.digest and are_same(next(elsewhere), next(here))
    assert elsewhere._pool is not None
    for process in elsewhere._pool._processes.values():
        process.kill()
    with pytest.raises(
        RuntimeError, match="a worker that tokenizes records ended: out of memory.* workers=0 takes none"
    ):
        for _ in range(1000):
            next(elsewhere)
    for batches in (here, elsewhere):
        batches.close()


def test_the_digest_depends_on_what_the_tokens_depend_on(folder):
    def digest(**options):
        return stream(folder, **options).digest

    first = digest()
    assert digest(seed=1, window=3, batch_size=4) == first
    template = ChatTemplate(PLAIN_TEMPLATE + " ", {"eos_token": "\0"})
    others = {digest(seq_len=9), digest(too_long="drop"), digest(bad_records="skip"), digest(template=template)}
    write_lines(folder / "2.jsonl", TEXTS[80:119])
    assert len({first, *others, digest(), stream(TEXTS).digest, stream(TEXTS[1:]).digest}) == 8
