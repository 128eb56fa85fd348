"""Cached tokens: written before they are named, verified whenever they are opened, made again if damaged."""

import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from zoo.text import token_cache
from zoo.train import load_text

TEXTS = {f"{number}": f"line {number} of a text\n" * 9 for number in range(30)}


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


DAMAGES = {
    "a bit of the tokens": (lambda path: flip(path / "train.bin", 100), "the digest of train.bin"),
    "a bit of the held-out tokens": (lambda path: flip(path / "validation.bin", 5), "the digest of validation.bin"),
    "tokens cut off": (lambda path: os.truncate(path / "train.bin", 7), "train.bin has 7 bytes instead of"),
    "tokens missing": (lambda path: (path / "validation.bin").unlink(), "validation.bin cannot be read"),
    "a figure": (
        lambda path: (path / "about.json").write_text(
            (path / "about.json").read_text().replace('"tokens": ', '"tokens": 1')
        ),
        "about.json is missing or not as it was written",
    ),
    "no metadata": (lambda path: (path / "about.json").write_text("[]"), "about.json is missing or not as"),
    "an empty directory": (lambda path: [file.unlink() for file in path.iterdir()], "about.json is missing or"),
    "the tokenizer": (lambda path: flip(path / "tokenizer.json", 60), "the digest of tokenizer.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_cache_is_made_again(tmp_path, caplog, damage):
    change, message = DAMAGES[damage]
    vocab = 280 if damage == "the tokenizer" else 256
    first = load_text(TEXTS, vocab=vocab, cache=tmp_path)
    written = {path.name: path.read_bytes() for path in first.directory.iterdir()}
    assert not caplog.records
    change(first.directory)
    again = load_text(TEXTS, vocab=vocab, cache=tmp_path)
    (record,) = caplog.records
    assert message in record.getMessage() and "it is written again" in record.getMessage()
    assert {path.name: path.read_bytes() for path in again.directory.iterdir()} == written
    assert again.digest == first.digest and list(tmp_path.iterdir()) == [again.directory]
    assert load_text(TEXTS, vocab=vocab, cache=tmp_path).digest == first.digest and len(caplog.records) == 1


@pytest.mark.parametrize("is_made", [False, True], ids=["below a file", "read-only"])
def test_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch, is_made):
    """The user of the tests may write anywhere, so a read-only file system is simulated."""
    folder = tmp_path / "equizoo" / "text"
    if is_made:
        whole = load_text(TEXTS, cache=folder)
    else:
        folder.parent.touch()

    def refuse(**options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    reason = "Read-only file system" if is_made else "Not a directory"
    with pytest.raises(OSError) as raised:
        load_text(TEXTS, vocab=300, cache=folder)
    assert str(raised.value) == (
        f"{folder} cannot hold a cache ({reason}): set XDG_CACHE_HOME to a folder that can, or pass cache="
    )
    if is_made:  # what is there needs no writing
        assert load_text(TEXTS, cache=folder).digest == whole.digest


def test_damaged_cache_without_its_source_is_an_error(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name, text in TEXTS.items():
        (source / name).write_text(text)
    flip(load_text((source,), cache=tmp_path / "cache").directory / "train.bin", 3)
    shutil.rmtree(source)
    with pytest.raises(FileNotFoundError, match="source: there is no such file or folder"):
        load_text((source,), cache=tmp_path / "cache")


def test_text_that_changes_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()
    for name, text in TEXTS.items():
        (source / name).write_text(text)
    split = token_cache._write_atomically

    def change_and_write(*args):
        (source / "7").write_text(TEXTS["7"].replace("line", "LINE"))
        split(*args)

    monkeypatch.setattr(token_cache, "_write_atomically", change_and_write)
    with pytest.raises(ValueError, match="source/7 changed while it was read"):
        load_text((source,), cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_cache_is_on_the_disk_before_it_is_named(tmp_path, monkeypatch):
    """Each file is synced, then its directory, and only then renamed; the rename is synced too."""
    events, sync, rename = [], token_cache._sync, token_cache._rename
    monkeypatch.setattr(token_cache, "_sync", lambda path: (events.append(path.name), sync(path)))
    monkeypatch.setattr(token_cache, "_rename", lambda part, path: (events.append("rename"), rename(part, path)))
    corpus = load_text(TEXTS, cache=tmp_path)
    *files, part, named, parent = events
    assert files == ["train.bin", "validation.bin"] and part.startswith(".part-")
    assert (named, parent) == ("rename", tmp_path.name)
    about = json.loads((corpus.directory / "about.json").read_text())
    assert about["files"]["train.bin"]["bytes"] == len(corpus.train.tokens)


def test_cache_of_another_process_stays(tmp_path, monkeypatch):
    """Two processes write one cache; the second finds a whole one, and reads that."""
    split = token_cache._write_atomically

    def race(directory, write):
        split(directory, write)
        os.utime(directory, (1, 1))
        split(directory, write)

    monkeypatch.setattr(token_cache, "_write_atomically", race)
    corpus = load_text(TEXTS, cache=tmp_path)
    assert corpus.directory.stat().st_mtime == 1 and list(tmp_path.iterdir()) == [corpus.directory]
    assert np.count_nonzero(corpus.train.tokens) == corpus.train.text_tokens


def test_verify_reads_what_opening_does_not(tmp_path, monkeypatch, caplog):
    """A file longer than its two edges is opened without its middle, which `verify_cache` reads."""
    monkeypatch.setattr(token_cache, "_EDGE_BYTES", 32)
    corpus = load_text(TEXTS, cache=tmp_path)
    assert token_cache.verify_cache(corpus.directory)["train"]["tokens"] == corpus.train.text_tokens
    size = (corpus.directory / "train.bin").stat().st_size
    flip(corpus.directory / "train.bin", size // 2)
    assert load_text(TEXTS, cache=tmp_path).digest == corpus.digest and not caplog.records
    with pytest.raises(ValueError, match=r"the digest of train\.bin"):
        token_cache.verify_cache(corpus.directory)
    flip(corpus.directory / "train.bin", size - 1)
    load_text(TEXTS, cache=tmp_path)
    assert "the digest of train.bin" in caplog.text
    token_cache.verify_cache(corpus.directory)


def test_one_of_several_processes_writes(tmp_path):
    """The others wait for it, and write nothing."""
    written = []

    def write(directory):
        written.append(directory)
        time.sleep(0.2)
        (directory / "a.bin").write_bytes(b"abc")
        return {"length": 3}

    with ThreadPoolExecutor(4) as pool:
        opened = list(pool.map(lambda _: token_cache.open_cache(tmp_path / "cache", write), range(4)))
    assert len(written) == 1 and opened == [opened[0]] * 4 and opened[0][0] == {"length": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
