"""Arrow: streams and files, in ranges of whole record batches."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.records.reading import read_records
from zoo.text.records import arrow
from zoo.text.records.arrow import ArrowTable

pyarrow = pytest.importorskip("pyarrow")
ipc = pytest.importorskip("pyarrow.ipc")

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
        patch.setattr(arrow, "ROWS", rows_of_unit)
        patch.setattr(arrow, "_BATCH_ROWS", 7)
        units = file.split()
        assert read_records(file) == [(f"{path}, row {number}", row) for number, row in enumerate(rows)]
    counts = [sum(1 for _ in file.read(unit)) for unit in units]
    assert all(count >= rows_of_unit for count in counts[:-1])
    assert all(unit.num_bytes == unit.stop - unit.start for unit in units)


def test_compressed_batches(tmp_path):
    rows, batches = make_batches([100, 50])
    file = write(tmp_path / "a.arrow", "stream", batches, options=ipc.IpcWriteOptions(compression="lz4"))
    assert [row for _, row in read_records(file)] == rows


def test_dictionary_columns_are_refused_by_name(tmp_path):
    batch = pyarrow.record_batch({"text": pyarrow.array(["a", "b", "a"]).dictionary_encode()})
    file = write(tmp_path / "a.arrow", "stream", [batch])
    with pytest.raises(ValueError, match="a.arrow .* a message of type dictionary came"):
        file.split()


@pytest.mark.parametrize("damage", ["empty", "no end mark", "in a batch", "in the schema", "offsets", "not UTF-8"])
def test_damaged_file_is_an_error(tmp_path, damage):
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
