"""Parquet by row groups, Arrow streams and files by whole record batches; damage is an error with the file's name."""

import datetime
import decimal
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.records.reading import read_records
from zoo.text.records import tables
from zoo.text.records.tables import ArrowTable, Parquet

pyarrow = pytest.importorskip("pyarrow")
ipc = pytest.importorskip("pyarrow.ipc")
parquet = pytest.importorskip("pyarrow.parquet")

FORMATS = {"stream": ipc.new_stream, "file": ipc.new_file}


def write(path, kind, batches, **options):
    with pyarrow.OSFile(str(path), "wb") as sink, FORMATS[kind](sink, batches[0].schema, **options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return ArrowTable(path)


def make_batches(sizes):
    rows = [{"text": f"naïve {number}", "n": number, "list": [{"a": number}]} for number in range(sum(sizes))]
    table = pyarrow.Table.from_pylist(rows)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    batches = [
        table.slice(start, size).combine_chunks().to_batches() for start, size in zip(starts, sizes, strict=True)
    ]
    return rows, [batch for parts in batches for batch in parts]


@settings(max_examples=8)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 50), st.sampled_from(sorted(FORMATS)))
def test_any_batches_and_units_give_the_same_rows(tmp_path_factory, sizes, rows_of_unit, kind):
    rows, batches = make_batches(sizes)
    path = tmp_path_factory.mktemp("arrow") / "a.arrow"
    file = write(path, kind, batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "ROWS", rows_of_unit)
        patch.setattr(tables, "_BATCH_ROWS", 7)
        units = file.split()
        assert read_records(file) == [(f"{path}, row {number}", row) for number, row in enumerate(rows)]
    counts = [sum(1 for _ in file.read(unit)) for unit in units]
    assert all(count >= rows_of_unit for count in counts[:-1])
    assert sum(unit.num_bytes for unit in units) == path.stat().st_size


def test_compressed_batches(tmp_path):
    rows, batches = make_batches([100, 50])
    file = write(tmp_path / "a.arrow", "stream", batches, options=ipc.IpcWriteOptions(compression="lz4"))
    assert [row for _, row in read_records(file)] == rows


def test_dictionary_columns_come_as_their_values(tmp_path):
    batch = pyarrow.record_batch({"text": pyarrow.array(["a", "b", "a"]).dictionary_encode()})
    file = write(tmp_path / "a.arrow", "stream", [batch])
    assert [row["text"] for _, row in read_records(file)] == ["a", "b", "a"]


@pytest.mark.parametrize("damage", ["empty", "no end mark", "in a batch", "in the schema", "offsets", "not UTF-8"])
def test_damaged_arrow_is_an_error(tmp_path, damage):
    _, batches = make_batches([100, 100])
    file = write(tmp_path / "a.arrow", "stream", batches)
    content = file.path.read_bytes()
    at = content.index("naïve 3".encode())
    changed = {
        "empty": b"",
        "no end mark": content[:-8],
        "in a batch": content[: len(content) // 2],
        "in the schema": content[:100],
        "offsets": content.replace((8 * 2).to_bytes(4, "little"), (2**30).to_bytes(4, "little"), 3),
        "not UTF-8": content[: at + 2] + b"\xff" + content[at + 3 :],
    }
    assert changed[damage] != content
    file.path.write_bytes(changed[damage])
    with pytest.raises(ValueError, match="a.arrow is damaged: ") as caught:
        read_records(file)
    assert "\n" not in str(caught.value)


@pytest.mark.neighbors("datasets")
def test_rows_of_a_dataset_saved_to_disk(tmp_path):
    import datasets

    rows = [{"text": f"{number}", "messages": [{"role": "user", "content": "x"}]} for number in range(9000)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    (path,) = (tmp_path / "saved").glob("*.arrow")
    file = ArrowTable(path)
    assert [sum(1 for _ in file.read(unit)) for unit in file.split()] == [5000, 4000]
    assert [record for _, record in read_records(file)] == rows


ROWS = [
    {"text": f"naïve {number}", "messages": [{"role": "user", "content": None}] * (number % 3)}
    for number in range(3000)
]


def write_parquet(path, table, **options):
    parquet.write_table(table, path, **options)
    return Parquet(path)


@pytest.mark.parametrize("rows", [700, 2500, 3000, 10_000])
def test_row_groups_are_units(tmp_path, rows):
    file = write_parquet(tmp_path / "a.parquet", pyarrow.Table.from_pylist(ROWS), row_group_size=rows)
    units = file.split()
    assert [(unit.start, unit.stop) for unit in units] == [(group, group + 1) for group in range(-(-3000 // rows))]
    assert all(unit.num_bytes > 0 for unit in units)
    assert sum(unit.num_bytes for unit in units) == pytest.approx(file.path.stat().st_size, abs=len(units))
    assert [(record) for _, record in read_records(file)] == ROWS
    last = units[-1]
    numbers = [number for number, _ in file.read(last)]
    assert numbers == list(range(len(numbers)))
    assert file.locate(last, numbers[-1]) == f"{file.path}, row 2999" and file.locate(units[0], 5).endswith(", row 5")


def test_values_are_python_objects(tmp_path):
    row = {
        "price": decimal.Decimal("1.50"),
        "time": datetime.datetime(2024, 1, 2, 3, 4, 5),
        "image": b"\xff\0",
        "scores": [1.5, None],
        "nothing": None,
    }
    file = write_parquet(tmp_path / "a.parquet", pyarrow.Table.from_pylist([row]))
    assert [record for _, record in read_records(file)] == [row]


def test_row_without_a_value_in_python_is_a_fault(tmp_path):
    times = pyarrow.array([0, 10**17, 1], pyarrow.timestamp("ms"))
    file = write_parquet(tmp_path / "a.parquet", pyarrow.table({"text": ["a", "b", "c"], "when": times}))
    (first, fault, last) = read_records(file)
    assert first[1]["text"] == "a" and last[1]["text"] == "c"
    assert fault[0].endswith("a.parquet, row 1")
    assert fault[1].startswith("expected a value that converts to Python in column 'when' (timestamp[")


def test_text_that_is_not_utf8_is_a_fault(tmp_path):
    texts = pyarrow.array([b"fine", b"caf\xe9"]).cast(pyarrow.binary()).view(pyarrow.string())
    file = write_parquet(tmp_path / "a.parquet", pyarrow.table({"text": texts}))
    (first, fault) = read_records(file)
    assert first[1] == {"text": "fine"}
    assert "in column 'text' (string): 'utf-8' codec can't decode byte 0xe9" in fault[1]


def test_two_columns_of_one_name_are_an_error(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", pyarrow.table([["a"], ["b"]], names=["text", "text"]))
    with pytest.raises(ValueError, match="a.parquet is damaged: expected each column once, .* two named 'text'"):
        file.split()


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "a bit of the data"])
def test_damaged_parquet_is_an_error(tmp_path, damage):
    table = pyarrow.table({"text": [f"{number:01000}" for number in range(100)]})
    options = dict(compression="none", use_dictionary=False, write_page_checksum=True)
    file = write_parquet(tmp_path / "a.parquet", table, **options)
    content = file.path.read_bytes()
    flipped = bytearray(content)
    flipped[5000] ^= 1
    changed = {"cut": content[:-100], "empty": b"", "text": b'{"a": 1}\n' * 9, "a bit of the data": bytes(flipped)}
    file.path.write_bytes(changed[damage])
    with pytest.raises(ValueError, match="a.parquet is damaged: ") as caught:
        read_records(file)
    assert "\n" not in str(caught.value)


def test_missing_package_names_the_extra(tmp_path, monkeypatch):
    file = write_parquet(tmp_path / "a.parquet", pyarrow.table({"text": ["a"]}))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"pip install 'equizoo\[data\]'"):
        file.split()
