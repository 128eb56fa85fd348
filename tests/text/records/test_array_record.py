"""ArrayRecord: units of 4,096 records, each a JSON object."""

import json
from pathlib import Path

import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from tests.text.records.reading import read_records
from zoo.text.records import array_record
from zoo.text.records.array_record import ArrayRecords


def write(path, contents):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for content in contents:
        writer.write(content)
    writer.close()
    return ArrayRecords(path)


@pytest.mark.parametrize("count", [0, 1, 99, 100, 301])
def test_records_come_in_order_with_their_places(tmp_path, monkeypatch, count):
    monkeypatch.setattr(array_record, "ROWS", 100)
    monkeypatch.setattr(array_record, "_BATCH_ROWS", 30)
    rows = [{"text": f"naïve {number}"} for number in range(count)]
    file = write(tmp_path / "a.array_record", [json.dumps(row, ensure_ascii=False).encode() for row in rows])
    units = file.split()
    assert len(units) == -(-count // 100)
    assert sum(unit.num_bytes for unit in units) == (file.path.stat().st_size if count else 0)
    assert read_records(file) == [(f"{file.path}, record {number}", row) for number, row in enumerate(rows)]


def test_faults_are_named_and_reading_goes_on(tmp_path):
    found = read_records(write(tmp_path / "a.array_record", [b'{"n": 1}', b"\x08\xff", b"", b"[1]", b'{"n": 2}']))
    assert found[0][1] == {"n": 1} and found[4][1] == {"n": 2}
    assert "expected UTF-8" in found[1][1] and "expected JSON" in found[2][1]
    assert found[3] == (f"{tmp_path}/a.array_record, record 3", "expected a JSON object, got '[1]'")


@pytest.mark.parametrize("damage", ["cut", "a bit", "text", "empty"])
def test_damaged_file_is_an_error(tmp_path, damage):
    file = write(tmp_path / "a.array_record", [b'{"n": "%d"}' % number for number in range(2000)])
    content = file.path.read_bytes()
    flipped = bytearray(content)
    flipped[1000] ^= 1
    changed = {"cut": content[:-1000], "a bit": bytes(flipped), "text": b'{"a": 1}\n' * 9, "empty": b""}
    file.path.write_bytes(changed[damage])
    with pytest.raises(ValueError, match="a.array_record is damaged: ") as caught:
        read_records(file)
    assert "\n" not in str(caught.value)


def test_files_are_closed(tmp_path):
    file = write(tmp_path / "a.array_record", [b"{}"] * 9)
    descriptors = Path("/proc/self/fd")
    if not descriptors.exists():
        pytest.skip("open files are counted in /proc")
    before = len(list(descriptors.iterdir()))
    for _ in range(5):
        assert len(read_records(file)) == 9
    assert len(list(descriptors.iterdir())) == before
