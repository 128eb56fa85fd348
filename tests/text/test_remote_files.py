"""Data by URL: copied once, copied again when it changed, and read as local files are."""

import builtins
import json
from pathlib import Path

import fsspec
import pytest

from zoo import train
from zoo.text.records.find_files import find_record_files
from zoo.text.remote_files import download, is_url
from zoo.text.tokenizers import ByteTokenizer


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store in memory, and a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = fsspec.filesystem("memory")
    store.store.clear()
    yield store
    store.store.clear()


def write(store, files):
    for name, text in files.items():
        store.pipe_file(name, text.encode())


def test_urls_are_told_from_paths():
    urls = ["s3://bucket/a", "gs://bucket/*.jsonl", Path("s3://bucket/a"), "memory://a"]
    paths = ["a", "/a/b", "org/name:train", "C:/a", Path("a"), "web/*.jsonl", "a: b"]
    assert all(map(is_url, urls)) and not any(map(is_url, paths))


def test_text_at_a_url_is_the_text_of_its_files(store, tmp_path):
    texts = {f"/books/{i}.txt": f"text number {i} " * 200 for i in range(30)}
    write(store, texts)
    for name, text in texts.items():
        local = tmp_path / name[1:]
        local.parent.mkdir(exist_ok=True)
        local.write_text(text)
    local = train.load_text(tmp_path / "books")
    for source in ("memory://books", "memory://books/*.txt", Path("memory://books")):
        assert train.load_text(source).digest == local.digest


def test_records_at_urls(store):
    lines = [json.dumps({"text": f"row {i}"}) + "\n" for i in range(40)]
    write(store, {"/web/a.jsonl": "".join(lines[:20]), "/web/in/b.jsonl": "".join(lines[20:]), "/web/read.me": "x"})
    data = train.load_records("memory://web", tokenizer=ByteTokenizer(), seq_len=32, processes=1)
    assert data.counts["records"] == 40
    for source, names in (
        ("memory://web/*.jsonl", ["a.jsonl"]),
        ("memory://web/**/*.jsonl", ["a.jsonl", "b.jsonl"]),
        ("memory://web/in/b.jsonl", ["b.jsonl"]),
        (["memory://web/a.jsonl", "memory://web/in"], ["a.jsonl", "b.jsonl"]),
    ):
        assert sorted(file.path.name for file in find_record_files(source)) == names


def test_a_copy_is_kept_until_the_store_changes(store, monkeypatch):
    write(store, {"/a/b.txt": "one"})
    get = type(store).get
    calls = []

    def count(self, *args):
        calls.append(args)
        get(self, *args)

    monkeypatch.setattr(type(store), "get", count)
    asked = []
    monkeypatch.setattr(type(store), "invalidate_cache", lambda self, path=None: asked.append(path))
    first = download("memory://a/b.txt")
    assert download("memory://a/b.txt") == first and first.read_text() == "one" and len(calls) == 1
    write(store, {"/a/b.txt": "two"})
    assert download("memory://a/b.txt").read_text() == "two" and len(calls) == 2
    assert asked == [None] * 3, "listings are not taken from a cache, as s3fs has one"
    assert not [path for path in first.parents[1].iterdir() if path.name.startswith(".part")]


def test_faults_of_urls(store, monkeypatch):
    with pytest.raises(FileNotFoundError, match="memory://none: no such file or folder, or nothing in it"):
        train.load_text("memory://none")
    with pytest.raises(ValueError, match="Protocol not known: nosuch"):
        download("nosuch://a/b")
    write(store, {"/a/b.txt": "one", "/a/../../c.txt": "two"})
    with pytest.raises(ValueError, match=r"a name with \.\. leaves its folder"):
        download("memory://a")

    def refuse(name, *args, imported=builtins.__import__, **options):
        if name in ("s3fs", "gcsfs"):
            raise ImportError(name)
        return imported(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    for url, package in (("s3://bucket/a.txt", "s3fs"), ("gs://bucket/a.txt", "gcsfs")):
        with pytest.raises(ImportError, match=f"{url}: the package that reads .* is missing: pip install {package}"):
            train.load_text(url)
