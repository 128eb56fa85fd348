"""Tokens of records are the same bytes for any number of workers, and a writer that is killed leaves no cache."""

import functools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.processes import make_environment
from zoo.text import ChatTemplate
from zoo.text.chat.template import PLAIN_TEMPLATE
from zoo.text.records import find_files
from zoo.text.records.json_lines import JsonLines
from zoo.text.records.record_kinds import KINDS, Encoding
from zoo.text.records.token_store import MAX_LISTED, RecordsError, TokenStore, write_store
from zoo.text.tokenizers import ByteTokenizer
from zoo.train import load_records

TEMPLATE = ChatTemplate(PLAIN_TEMPLATE, {"eos_token": "\0"})
ENCODING = Encoding(ByteTokenizer(), TEMPLATE, "text", "all", {})


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write(path, out, kind="text", processes=1, **options):
    """Write a store, of units of some lines."""
    out.mkdir()
    return write_store(out, [JsonLines(path, 200)], KINDS[kind], ENCODING, processes=processes, **options)


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.ci)])
def test_bytes_do_not_depend_on_the_number_of_workers(tmp_path, processes):
    path = write_lines(tmp_path / "a.jsonl", [{"text": f"text {number} é" * (number % 5 + 1)} for number in range(60)])
    assert len(JsonLines(path, 200).split()) > 5
    assert write(path, tmp_path / "one") == write(path, tmp_path / "more", processes=processes)
    names = sorted(file.name for file in (tmp_path / "one").iterdir())
    assert names == ["mask.bin", "shares.npy", "starts.npy", "tokens.bin"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "more" / name).read_bytes()


def test_a_store_holds_the_texts_one_behind_another(tmp_path):
    records = [{"prompt": f"{number}?", "completion": f"{number}!", "label": number % 2} for number in range(4)]
    path = write_lines(tmp_path / "a.jsonl", records)
    assert write(path, tmp_path / "store", "labeled") == {"records": 4, "rejected": 0}
    store = TokenStore.open(tmp_path / "store", 256, is_labeled=True)
    for number in range(4):
        text = slice(store.starts[number], store.starts[number + 1])
        assert store.tokens[text].tobytes() == f"\0{number}?{number}!\0".encode()
        assert store.mask[text].tolist() == [0, 0, 0, 1, 1, 1]
    assert store.labels is not None and store.labels.tolist() == [0, 1, 0, 1]
    assert ((0 <= store.shares) & (store.shares < 1)).all() and len(set(store.shares.tolist())) == 4


def test_fields_of_prompts_are_kept(tmp_path):
    records = [{"prompt": "a", "answer": [1, "é"]}, {"prompt": "bb"}, {"prompt": "c", "answer": None}]
    write(write_lines(tmp_path / "a.jsonl", records), tmp_path / "store", "prompts")
    store = TokenStore.open(tmp_path / "store", 256, is_labeled=False)
    assert [store.read_fields(item) for item in range(3)] == [{"answer": [1, "é"]}, {}, {"answer": None}]
    assert not store.mask.any()


def test_faults_are_listed_with_their_places(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": 1}\n{"text": "b"\n{"text": "c"}\n')
    with pytest.raises(RecordsError) as raised:
        write(path, tmp_path / "store")
    first, second, last = str(raised.value).split("\n")
    assert first == f"{path}:3: `text` is a number, expected text: 1"
    assert second.startswith(f"{path}:4: ")
    assert "Nothing was written" in last and "--bad-records skip" in last


def test_equal_faults_have_one_line(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": ""}] * 2 + [{"text": 1}] + [{"text": ""}] * 3)
    with pytest.raises(RecordsError) as raised:
        write(path, tmp_path / "store")
    first, second, _ = str(raised.value).split("\n")
    assert first.startswith(f"{path}:1, {path}:2, {path}:4 and 2 more: nothing of it is trained on")
    assert second == f"{path}:3: `text` is a number, expected text: 1"


def test_reading_stops_at_many_faults(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", [{"text": number} for number in range(2000)])
    read = []
    split = JsonLines.read
    monkeypatch.setattr(JsonLines, "read", lambda self, unit: (read.append(unit), split(self, unit))[1])
    with pytest.raises(RecordsError) as raised:
        write(path, tmp_path / "store")
    assert len(str(raised.value).split("\n")) == MAX_LISTED + 2
    assert len(read) < 5 < len(JsonLines(path, 200).split())


def test_progress_is_a_line_where_there_is_no_terminal(tmp_path, monkeypatch, capsys):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a" * 90}] * 2000)
    write(path, tmp_path / "quick")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("zoo.text.records.token_store._LINE_SECONDS", 0)
    write(path, tmp_path / "store")
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"tokenized (\S+ \S+) of \1, \d+\.\d\d M tokens/s", last)


def test_some_faults_may_be_left_out(tmp_path, capsys):
    records = [{"text": "a"}] * 150 + [{"text": 7}]
    path = write_lines(tmp_path / "a.jsonl", records)
    rejected = tmp_path / "rejected.jsonl"
    assert write(path, tmp_path / "store", rejected=rejected) == {"records": 151, "rejected": 1}
    (line,) = map(json.loads, rejected.read_text().splitlines())
    assert line["place"] == f"{path}:151" and line["record"] == {"text": 7} and "`text` is a number" in line["fault"]
    assert f"left out 1 of 151 records; {rejected} has them" in capsys.readouterr().out
    assert len(np.load(tmp_path / "store" / "starts.npy")) == 151
    path = write_lines(tmp_path / "b.jsonl", records[:50] + records[-1:])
    with pytest.raises(RecordsError, match="1 of 51 records have faults, more than the 1%"):
        write(path, tmp_path / "other", rejected=rejected)
    assert json.loads(rejected.read_text())["place"] == f"{path}:51"


WRITER = """
import sys, time
from pathlib import Path
from zoo.text.records import find_files, json_lines
from zoo.text.records.records import load_records
from zoo.text.records.record_kinds import TextKind
from zoo.text.tokenizers import ByteTokenizer
find_files._READERS[".jsonl"] = lambda path: json_lines.JsonLines(path, 200)
encode_all = TextKind.encode_all
def encode_slowly(self, records, encoding):
    time.sleep(float(sys.argv[3]))
    return encode_all(self, records, encoding)
TextKind.encode_all = encode_slowly
data = load_records(sys.argv[1], tokenizer=ByteTokenizer(), seq_len=32, processes=1, cache=Path(sys.argv[2]))
print(data.digest)
"""


def test_a_killed_writer_leaves_no_cache(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", [{"text": f"text {number}"} for number in range(200)])
    environment = make_environment(1) | {"PYTHONUNBUFFERED": "1"}

    def start(cache, seconds):
        words = [sys.executable, "-c", WRITER, str(source), str(cache), str(seconds)]
        return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)

    writer = start(tmp_path / "cache", 0.2)
    parts = functools.partial((tmp_path / "cache").glob, ".part-*/tokens.bin")
    deadline = time.monotonic() + 60
    while not list(parts()) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate()
    assert list(parts()) and not list((tmp_path / "cache").glob("*/about.json"))
    digests = []
    for cache in ("cache", "other"):
        done = start(tmp_path / cache, 0)
        digests.append(done.communicate()[0])
        assert done.returncode == 0
    assert digests[0] == digests[1] != ""


class Killed(ByteTokenizer):
    """A tokenizer that ends its process by SIGKILL, as a system without memory does, at a text that says so."""

    def encode_all(self, documents):
        documents = list(documents)
        if b"kill" in documents and multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_all(documents)


def test_a_killed_worker_is_an_error_without_a_cache(tmp_path, monkeypatch):
    monkeypatch.setitem(find_files._READERS, ".jsonl", lambda path: JsonLines(path, 200))
    records = [{"text": f"text {number}"} for number in range(40)]
    path = write_lines(tmp_path / "a.jsonl", [*records, {"text": "kill"}, *records])
    options = {"seq_len": 32, "cache": tmp_path / "cache"}
    with pytest.raises(RuntimeError, match="a worker that tokenizes records ended: out of memory.*processes=1"):
        load_records(path, tokenizer=Killed(), processes=2, **options)
    assert not list((tmp_path / "cache").glob("*/about.json")) and not list((tmp_path / "cache").glob(".part-*"))
    assert load_records(path, tokenizer=Killed(), processes=1, **options).counts["records"] == 81


@pytest.mark.ci
def test_a_file_that_is_damaged_for_a_worker_is_named(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_pylist([{"text": f"text {number}" * 20} for number in range(400)])
    path = tmp_path / "a.parquet"
    parquet.write_table(table, path, row_group_size=100, compression="zstd")
    content = bytearray(path.read_bytes())
    second = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    content[second.dictionary_page_offset : second.dictionary_page_offset + 40] = bytes(40)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.parquet is damaged: "):
        load_records(path, tokenizer=ByteTokenizer(), seq_len=32, processes=2, cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*/about.json"))
