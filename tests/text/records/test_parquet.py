"""Parquet: row groups are units, rows come as Python objects, and damage is an error with the file's name."""

import datetime
import decimal
import sys

import pytest

from tests.text.records.reading import read_records
from zoo.text.records.parquet import Parquet

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = [
    {"text": f"naïve {number}", "messages": [{"role": "user", "content": None}] * (number % 3)}
    for number in range(3000)
]


def write(path, table, **options):
    parquet.write_table(table, path, **options)
    return Parquet(path)


@pytest.mark.parametrize("rows", [700, 2500, 3000, 10_000])
def test_row_groups_are_units(tmp_path, rows):
    file = write(tmp_path / "a.parquet", pyarrow.Table.from_pylist(ROWS), row_group_size=rows)
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
    file = write(tmp_path / "a.parquet", pyarrow.Table.from_pylist([row]))
    assert [record for _, record in read_records(file)] == [row]


def test_row_without_a_value_in_python_is_a_fault(tmp_path):
    times = pyarrow.array([0, 10**17, 1], pyarrow.timestamp("ms"))
    file = write(tmp_path / "a.parquet", pyarrow.table({"text": ["a", "b", "c"], "when": times}))
    (first, fault, last) = read_records(file)
    assert first[1]["text"] == "a" and last[1]["text"] == "c"
    assert fault[0].endswith("a.parquet, row 1")
    assert fault[1].startswith("a value that converts to Python was expected in column 'when' (timestamp[")


def test_text_that_is_not_utf8_is_a_fault(tmp_path):
    texts = pyarrow.array([b"fine", b"caf\xe9"]).cast(pyarrow.binary()).view(pyarrow.string())
    file = write(tmp_path / "a.parquet", pyarrow.table({"text": texts}))
    (first, fault) = read_records(file)
    assert first[1] == {"text": "fine"}
    assert "in column 'text' (string): 'utf-8' codec can't decode byte 0xe9" in fault[1]


def test_two_columns_of_one_name_are_an_error(tmp_path):
    file = write(tmp_path / "a.parquet", pyarrow.table([["a"], ["b"]], names=["text", "text"]))
    with pytest.raises(ValueError, match="a.parquet is damaged: each column once was expected, .* two named 'text'"):
        file.split()


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "a bit of the data"])
def test_damaged_file_is_an_error(tmp_path, damage):
    table = pyarrow.table({"text": [f"{number:01000}" for number in range(100)]})
    options = dict(compression="none", use_dictionary=False, write_page_checksum=True)
    file = write(tmp_path / "a.parquet", table, **options)
    content = file.path.read_bytes()
    flipped = bytearray(content)
    flipped[5000] ^= 1
    changed = {"cut": content[:-100], "empty": b"", "text": b'{"a": 1}\n' * 9, "a bit of the data": bytes(flipped)}
    file.path.write_bytes(changed[damage])
    with pytest.raises(ValueError, match="a.parquet is damaged: ") as caught:
        read_records(file)
    assert "\n" not in str(caught.value)


def test_missing_package_names_the_extra(tmp_path, monkeypatch):
    file = write(tmp_path / "a.parquet", pyarrow.table({"text": ["a"]}))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"pip install 'equizoo\[data\]'"):
        file.split()
