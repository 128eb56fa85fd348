"""JSON lines: cut anywhere they hold the same records at the same places, and each fault is named."""

import gzip
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.text.records.reading import read_records
from zoo.text.records import json_lines
from zoo.text.records.json_lines import JsonLines
from zoo.text.records.record_file import RecordError, Unit

OBJECTS = st.dictionaries(st.text(max_size=3), st.text(max_size=8) | st.integers() | st.none(), max_size=3)
LINES = st.one_of(
    OBJECTS.map(lambda value: json.dumps(value, ensure_ascii=False).encode(errors="replace")),
    st.sampled_from([b"", b" \t", b"\r", b'{"a":\r1}\r', '{"a": "\u2028\x85"}'.encode()]),
    st.sampled_from([b"[1]", b'{"a": 1', b'{"a": NaN}', b'{"a": 1, "a": 2}', b'"\xff"', b"\x0c"]),
)


def read_line_by_line(content: bytes, name: str) -> list[tuple[str, object]]:
    """Records of all lines with their places; of a faulty one, the place and None."""
    found = []
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip(b" \t\r"):
            continue
        is_faulty = line in (b"[1]", b'{"a": 1', b'{"a": NaN}', b'{"a": 1, "a": 2}', b'"\xff"', b"\x0c")
        found.append((f"{name}:{number}", None if is_faulty else json.loads(line)))
    return found


@settings(max_examples=60)
@given(st.lists(LINES, max_size=12), st.booleans(), st.booleans(), st.integers(1, 40))
@example([b'{"a": 1}'] * 3, False, True, 9)  # each range would end exactly at a line end
@example([], True, False, 1)
def test_any_unit_size_gives_the_same_records(tmp_path_factory, lines, has_mark, has_end, unit_bytes):
    content = b"\xef\xbb\xbf" * has_mark + b"\n".join(lines) + b"\n" * has_end
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(content)
    file = JsonLines(path, unit_bytes=unit_bytes)
    units = file.split()
    assert sum(unit.num_bytes for unit in units) == len(content)
    assert [unit.start for unit in units] == [0, *(unit.stop for unit in units[:-1])][: len(units)]
    found = [(place, None if isinstance(record, str) else record) for place, record in read_records(file)]
    assert found == read_line_by_line(content, str(path))
    assert len(units) <= -(-len(content) // unit_bytes)


FAULTS = {
    "not UTF-8": (b'{"a": "caf\xe9"}', "expected UTF-8, got 0xe9 as byte 11, in "),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "expected UTF-8, got 0xff as byte 1"),
    "half a character in bytes": (b'{"a": "\xed\xa0\x80"}', "expected UTF-8, got 0xed"),
    "not JSON": (b"{'a': 1}", "expected JSON, got \"{'a': 1}\": Expecting property name"),
    "two values": (b'{"a": 1} {"b": 2}', "Extra data at column 10"),
    "a comma too many": (b'{"a": 1,}', "expected JSON"),
    "a later byte order mark": (b'\xef\xbb\xbf{"a": 1}', "expected JSON"),
    "a list": (b'["a"]', "expected a JSON object, got '[\"a\"]'"),
    "a number": (b"12", "expected a JSON object, got '12'"),
    "NaN": (b'{"a": [NaN]}', "expected a number of JSON, got NaN"),
    "infinity": (b'{"a": -Infinity}', "expected a number of JSON, got -Infinity"),
    "a key twice": (b'{"b": {"role": 1, "role": 1}}', "expected each key once, got 'role' twice"),
    "half a pair": (b'{"a": "x\\ud83d"}', "got half a surrogate pair in"),
    "half a pair as a key": (b'{"\\uDE00": 1}', "got half a surrogate pair in"),
    "too deep": (b'{"a": ' + b"[" * 101 + b"]" * 101 + b"}", "values are nested more than 100 deep"),
    "much too deep": (b'{"a": ' + b"[" * 99_999, "values are nested more than 100 deep"),
    "a long integer": (b'{"a": ' + b"1" * 5000 + b"}", "expected JSON within limits"),
}


@pytest.mark.parametrize(("line", "message"), FAULTS.values(), ids=FAULTS)
def test_fault_is_named_and_reading_goes_on(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n' + line + b'\n{"n": 2}\n')
    (first, fault, last) = read_records(JsonLines(path))
    assert (first, last) == ((f"{path}:1", {"n": 1}), (f"{path}:3", {"n": 2}))
    assert fault[0] == f"{path}:2" and message in fault[1]
    assert len(fault[1]) < 300 and "cut off" not in fault[1]


@pytest.mark.parametrize("encoding", ["UTF-16", "UTF-16LE", "UTF-16BE", "UTF-32"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_another_encoding_is_named(tmp_path, encoding, name):
    content = '{"text": "a"}\n{"text": "b"}\n'.encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    message = rf"{name}: expected UTF-8, and this file is in {encoding}: `iconv -f {encoding} -t UTF-8` converts it"
    with pytest.raises(ValueError, match=message):
        JsonLines(tmp_path / name).split()


def test_whole_surrogate_pairs_and_escaped_escapes(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": "\\ud83d\\ude00"}\n{"a": "\\\\ud83d"}\n')
    assert [record["a"] for _, record in read_records(JsonLines(path))] == ["\U0001f600", "\\ud83d"]


def test_unfinished_last_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": "unfini')
    (place, fault) = read_records(JsonLines(path))[-1]
    assert place == f"{path}:2" and fault.endswith("The file ends in this line: it may have been cut off")


def test_line_above_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "_LINE_BYTES", 20)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": "%s"}\n' % (b"x" * 50) + b'{"a": "0123456789"}\n' + b'{"a": "01234567890"}\n{"a": 1}')
    found = read_records(JsonLines(path, unit_bytes=30))
    assert [place for place, _ in found] == [f"{path}:{line}" for line in (1, 2, 3, 4)]
    too_long = "expected a line of at most 20 bytes, got a longer one"
    assert [record for _, record in found] == [too_long, {"a": "0123456789"}, too_long, {"a": 1}]


TEXT = "".join(f'{{"n": {number}}}\n' for number in range(20_000)).encode() + b'\n[]\n{"n": -1}'


def compress(content: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(content)
    return pytest.importorskip("pyarrow").compress(content, codec="zstd", asbytes=True)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_lines_are_one_unit(tmp_path, suffix):
    plain = tmp_path / "a.jsonl"
    plain.write_bytes(TEXT)
    packed = tmp_path / f"a.jsonl{suffix}"
    half = TEXT.index(b"\n", 70_000) + 3
    packed.write_bytes(compress(TEXT[:half], suffix) + compress(TEXT[half:], suffix))
    size = packed.stat().st_size
    assert JsonLines(packed).split() == [Unit(0, size, size)]
    found = read_records(JsonLines(packed))
    assert found == [(f"{packed}{place.removeprefix(str(plain))}", record) for place, record in read_lines(plain)]


def read_lines(path):
    return read_records(JsonLines(path, unit_bytes=10**6))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "cut by a byte", "no header", "followed by junk", "half of a second part"])
def test_damaged_compressed_file(tmp_path, suffix, damage):
    content = compress(TEXT, suffix)
    damaged = {
        "cut": content[: len(content) // 2],
        "cut by a byte": content[:-1],
        "no header": b"junk" * 9,
        "followed by junk": content + b"junk" * 9,
        "half of a second part": content + content[:40],
    }
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(damaged[damage])
    with pytest.raises(ValueError, match=rf"a.jsonl{suffix} is damaged: ") as caught:
        read_records(JsonLines(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_array_of_objects(tmp_path, suffix, mark):
    path = tmp_path / f"a.json{suffix}"
    values = [{"a": "naïve ]"}, ["b"], {"c": {}}, {"d": float("nan")}]
    content = mark + b" \n" + json.dumps(values, indent=2, ensure_ascii=False).encode() + b"\n"
    path.write_bytes(compress(content, suffix) if suffix else content)
    assert len(JsonLines(path).split()) == 1
    found = read_records(JsonLines(path))
    assert [place for place, _ in found] == [f"{path}, element {number}" for number in range(4)]
    assert [record for _, record in found[::2]] == [values[0], values[2]]
    assert "expected a JSON object, got '[" in found[1][1] and "got NaN" in found[3][1]


@pytest.mark.parametrize("content", [b"[]", b" [ ]\n", b'[{"a": 1}]', b'{"a": 1}\n{"a": 1}\n', b"\n \n", b""])
def test_json_with_few_records(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    assert [record for _, record in read_records(JsonLines(path))] == [{"a": 1}] * content.count(b"a")


ARRAYS = {
    b'[{"a": 1}, ]': "element 1: expected an array of objects, got '\\[{\"a\": 1}, \\]': Expecting value",
    b'[{"a": 1} {"a": 2}]': "element 1: .*: expected `,` or `\\]`",
    b'[{"a": 1}': "element 1: .*: expected `,` or `\\]`",
    b'[{"a": 1}, {"a": ': "element 1: .*: Expecting value",
    b"[": "element 0",
    b'[{"a": 1}] []': "element 1: .* expected the end of the file",
    b"[" * 99_999: "element 0: expected an array of objects",
    b'[{"a": "caf\xe9"}]': "expected UTF-8, got 0xe9",
}


@pytest.mark.parametrize(("content", "message"), ARRAYS.items(), ids=[content[:20] for content in ARRAYS])
def test_damaged_array_is_an_error(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"a.json.*{message}"):
        read_records(JsonLines(path))


@pytest.mark.parametrize("content", [b'{\n "a": 1\n}\n', b'"text"', b"some text\n", b'{"a": 1,\n"b": 2}'])
def test_json_of_anything_else_is_an_error(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="a.json: expected an object on each line, or one array of objects, and"):
        JsonLines(path).split()


def test_array_above_the_limit_says_how_to_write_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "_ARRAY_BYTES", 10)
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"a": 1}, {"a": 2}]')
    with pytest.raises(ValueError, match=r"expected an array of at most 10 B. .* `jq -c '.\[\]' .*a.json > a.jsonl`"):
        read_records(JsonLines(path))


def test_record_is_parsed_as_json_parses_it():
    content = b'{"a": [1, 2.5, true, null, 1e999], "b": "\\n"}'
    assert json_lines.parse_record(content) == json.loads(content)
    with pytest.raises(RecordError):
        json_lines.parse_record(b"")
