"""Corpora: split by hash alone, tokenized once, reproducible, with clear errors."""

import json
import lzma
import os

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.text.corpus import Corpus
from zoo.text.tokenizers import ByteTokenizer
from zoo.train import Run, RunOptions, load_text


@pytest.fixture
def folder(tmp_path):
    """Sixty small files, one binary, one in Latin-1, one empty, one hidden."""
    root = tmp_path / "files"
    (root / "deep").mkdir(parents=True)
    for i in range(60):
        name = f"deep/{i}.txt" if i % 2 else f"{i}.py"
        (root / name).write_bytes(f"def f{i}(x):\r\n\treturn x + {i}  # naïve λ\n".encode() * (i + 1))
    (root / "binary.bin").write_bytes(b"text\0more")
    (root / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (root / "empty.txt").write_bytes(b"")
    (root / ".hidden").write_text("never read")
    return root


def read(corpus: Corpus) -> dict[str, list[bytes]]:
    """The documents of each split, from its tokens."""
    splits = dict(train=corpus.train, validation=corpus.validation)
    found = {}
    for name, split in splits.items():
        starts = np.flatnonzero(np.asarray(split.tokens) == 0)
        assert starts[0] == 0
        found[name] = [corpus.decode(part).encode() for part in np.split(split.tokens, starts[1:])]
    return found


@pytest.mark.parametrize("vocab", [256, 300])
def test_corpus_puts_every_file_in_one_split(folder, tmp_path, vocab):
    corpus = load_text((folder,), vocab=vocab, cache=tmp_path / "cache")
    documents = read(corpus)
    assert sorted(documents["train"] + documents["validation"]) == sorted(
        path.read_bytes() for path in folder.rglob("*") if path.stem.isdigit()
    )
    assert (corpus.num_texts, corpus.num_binary, corpus.vocab) == (60, 2, vocab)
    assert 1 <= len(documents["validation"]) <= 10
    for name, split in dict(train=corpus.train, validation=corpus.validation).items():
        assert split.text_tokens == np.count_nonzero(split.tokens)
        assert (
            split.text_bytes == sum(map(len, documents[name])) == int(corpus.tokenizer.token_bytes[split.tokens].sum())
        )
    joined = b"".join(documents["validation"])
    assert corpus.xz_bits_per_byte == pytest.approx(
        8 * len(lzma.compress(joined, preset=9 | lzma.PRESET_EXTREME)) / len(joined)
    )
    assert "60 texts, 2 skipped as binary" in str(corpus)


def test_corpus_split_depends_on_each_file_alone(folder, tmp_path):
    before = read(load_text((folder,), cache=str(tmp_path / "cache")))
    for i in range(30):
        (folder / f"new{i}.txt").write_text(f"another {i}")
    moved = folder.rename(tmp_path / "elsewhere")
    after = read(load_text((moved,), cache=tmp_path / "cache"))
    assert set(before["validation"]) <= set(after["validation"]) and set(before["train"]) <= set(after["train"])


def test_corpus_cache_is_keyed_by_content(folder, tmp_path):
    cache = tmp_path / "cache"
    first = load_text((folder,), cache=cache)
    stamp = (first.directory / "train.bin").stat().st_mtime_ns
    assert load_text((folder,), cache=cache).directory == first.directory
    assert (first.directory / "train.bin").stat().st_mtime_ns == stamp
    (folder / "0.py").write_text("changed")
    assert load_text((folder,), cache=cache).directory != first.directory
    assert not [path for path in cache.iterdir() if path.name.startswith(".")]


def test_corpus_failed_build_leaves_nothing(folder, tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("zoo.text.token_cache.write_json", fail)
    with pytest.raises(KeyboardInterrupt):
        load_text((folder,), cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_bpe_training_is_reproducible(folder, tmp_path):
    a, b = (load_text((folder,), vocab=300, cache=tmp_path / name) for name in "ab")
    assert a.directory.name == b.directory.name
    for name in ("tokenizer.json", "train.bin", "validation.bin", "about.json"):
        assert (a.directory / name).read_bytes() == (b.directory / name).read_bytes()
    assert json.loads((a.directory / "tokenizer.json").read_text())["added_tokens"][0]["id"] == 0
    assert a.train.bytes_per_token > 1.5


@pytest.fixture(scope="module", params=[256, 300])
def small(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("small")
    for i in range(30):
        (root / f"{i}.txt").write_text(f"the quick brown fox {i} " * 20)
    return load_text((root,), vocab=request.param, cache=root / ".cache")


@given(st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40))
@settings(deadline=None, max_examples=50)
def test_tokenizer_round_trips_any_text(small, written):
    tokens = small.encode(written)
    assert tokens.dtype == np.int32 and small.decode(tokens) == written
    assert small.decode(np.concatenate([[0], tokens, [0]])) == written
    assert small.tokenizer.token_bytes[tokens].sum() == len(written.encode())


def test_tokenizer_decodes_invalid_utf8(small):
    assert small.decode(np.arange(small.vocab))
    assert ByteTokenizer().token_bytes.sum() == 255


def test_corpus_cuts_a_large_file_into_passages(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text("".join(f"line {i} of a long book\n" for i in range(40_000)))
    corpus = load_text((file,), cache=tmp_path / "cache")
    documents = read(corpus)
    assert (
        corpus.num_texts == 1
        and len(documents["train"]) + len(documents["validation"]) > 20
        and documents["validation"]
    )
    assert str(corpus).startswith("1 text, ")
    assert all(document.endswith(b"\n") for document in documents["train"])
    assert sum(map(len, documents["train"] + documents["validation"])) == file.stat().st_size


def test_corpus_refuses_what_is_no_file(folder, tmp_path):
    odd = folder / "odd.txt"
    os.mkfifo(odd)  # whose writer would be waited for, for ever
    for source in (folder, odd):
        with pytest.raises(ValueError, match="odd.txt is a pipe: expected a file"):
            load_text((source,), cache=tmp_path / "cache")
    odd.unlink()
    odd.symlink_to("nowhere")
    with pytest.raises(ValueError, match="odd.txt cannot be read: No such file"):
        load_text((folder,), cache=tmp_path / "cache")
    with pytest.raises(FileNotFoundError, match="odd.txt: there is no such file or folder"):
        load_text((odd,), cache=tmp_path / "cache")


def test_corpus_defaults_to_the_standard_library(tmp_path):
    corpus = load_text(cache=tmp_path)
    assert corpus.num_texts > 300 and corpus.validation.text_bytes > 100_000
    assert "import" in corpus.decode(corpus.train.tokens[:20_000])


def test_corpus_takes_one_path(folder, tmp_path):
    several = load_text((folder,), cache=tmp_path / "cache")
    for source in (folder, str(folder)):
        assert load_text(source, cache=tmp_path / "cache").digest == several.digest


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        ("mine.jsonl", FileNotFoundError, r"^mine.jsonl: there is no such file"),
        (["long " * 2000], FileNotFoundError, r"^'long long .*'\.\.\.: there .* go in a mapping, {'name': text}"),
        (["a\ntext"], FileNotFoundError, r"texts themselves go in a mapping"),
        ([b"text"], TypeError, r"expected a path to read text from, got bytes; texts themselves"),
        ({"a": b"text"}, TypeError, r"^'a': a mapping of texts has names and texts, both str, not str and bytes"),
        ({1: "text"}, TypeError, r"^1: .*, not int and str"),
    ],
)
def test_corpus_says_what_it_reads(source, kind, message, tmp_path):
    with pytest.raises(kind, match=message):
        load_text(source, cache=tmp_path)


def test_corpus_errors_name_the_path(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere: there is no such file or folder"):
        load_text((tmp_path / "nowhere",), cache=tmp_path / "cache")
    (tmp_path / "binaries").mkdir()
    (tmp_path / "binaries" / "a").write_bytes(b"\0")
    with pytest.raises(ValueError, match=r"binaries: no text there: 1 files hold NUL bytes"):
        load_text((tmp_path / "binaries",), cache=tmp_path / "cache")
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(ValueError, match=r"short.txt: a single passage of 5 bytes"):
        load_text((tmp_path / "short.txt",), cache=tmp_path / "cache")
    with pytest.raises(ValueError, match=r"a vocabulary of 100 cannot write every byte"):
        load_text((tmp_path / "short.txt",), vocab=100, cache=tmp_path / "cache")


def test_bpe_missing_package_names_its_command(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"`tokenizers` cannot be imported .*pip install 'equizoo\[text\]'"):
        load_text((folder,), vocab=300, cache=tmp_path / "cache")


def test_corpus_digest_is_that_of_the_tokens(folder, tmp_path):
    first = load_text((folder,), cache=tmp_path / "a")
    assert first.digest == load_text((folder,), cache=tmp_path / "b").digest
    assert first.digest == first.train.batches(8, 1).digest == first.validation.digest
    (folder / "2.py").write_text("def changed(): ...\n")
    assert load_text((folder,), cache=tmp_path / "a").digest != first.digest
    assert load_text((folder,), vocab=300, cache=tmp_path / "a").digest != first.digest


def test_run_is_not_resumed_on_another_text(folder, tmp_path):
    def resume(**options):
        batches = load_text((folder,), cache=tmp_path / "cache").train.batches(8, 2)
        with Run(RunOptions(tmp_path / "run", **options), config={"width": 1}) as run:
            (state,) = run.restore((jnp.zeros(2),), batches)
            for _ in run.steps(batches, run.step + 2):
                pass
            run.save((state + 1,), batches)
            return batches.digest, run.step

    digest, _ = resume()
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"width": 1, "text_digest": digest}
    assert resume(resume=True) == (digest, 4)
    content = (folder / "2.py").read_bytes()
    (folder / "2.py").write_bytes(content + b"# one line more\n")
    with pytest.raises(ValueError, match=rf"run was trained on another text: text_digest: {digest} in the checkpoint"):
        resume(resume=True)
    (folder / "2.py").write_bytes(content)
    assert resume(resume=True) == (digest, 6)


def test_run_saved_without_a_digest_is_resumed(folder, tmp_path, capsys):
    """As all were that were saved before checkpoints held it."""
    batches = load_text((folder,), cache=tmp_path / "cache").train.batches(8, 2)
    digest, batches.digest = batches.digest, None
    with Run(tmp_path / "run", config={}) as run:
        (state,) = run.restore((jnp.zeros(2),), batches)
        assert list(run.steps(batches, 1))
        run.save((state,), batches)
    batches.digest = digest
    with Run(RunOptions(tmp_path / "run", resume=True), config={}) as run:
        run.restore((jnp.zeros(2),), batches)
    assert run.step == 1 and f"text_digest: absent in the checkpoint, {digest} now" in capsys.readouterr().out


RECORDS = ("a.jsonl", "a.ndjson", "a.jsonl.gz", "a.JSONL.zst", "a.parquet", "a.arrow", "a.array_record", "a.json")


@pytest.mark.parametrize("name", RECORDS)
def test_records_are_not_read_as_text(tmp_path, name):
    root = tmp_path / "files"
    root.mkdir()
    (root / name).write_text('{"messages": []}\n' * 9000)
    message = f"{name}: expected text, and these are records: `train.load_records` reads them, and `recipes/sft.py`"
    with pytest.raises(ValueError, match=message):
        load_text(root / name, cache=tmp_path / "cache")
    with pytest.raises(ValueError, match="files: expected text, and these are records"):
        load_text([root], cache=tmp_path / "cache")


def test_tables_are_not_read_as_text(tmp_path):
    root = tmp_path / "tables"
    root.mkdir()
    for name in ("big.CSV", "big.tsv"):
        (root / name).write_text("question,answer\n1?,2\n" * 9000)
        reads = r"`pandas.read_csv\(path.*\)\.to_json\('big.jsonl', orient='records', lines=True\)`"
        with pytest.raises(ValueError, match=f"{name}: expected text, and this is a table: {reads} makes records"):
            load_text(root / name, cache=tmp_path / "cache")
    with pytest.raises(ValueError, match="tables: expected text, and this is a table"):
        load_text(root, cache=tmp_path / "cache")
    (root / "notes.txt").write_text("text\n" * 9000)
    assert load_text(root, cache=tmp_path / "cache").num_texts == 3


def test_saved_dataset_is_not_read_as_text(tmp_path):
    root = tmp_path / "saved"
    root.mkdir()
    for name in ("dataset_info.json", "state.json", "data.arrow", "notes.txt"):
        (root / name).write_text("{}\n" * 9000)
    with pytest.raises(ValueError, match="saved: expected text, and these are records"):
        load_text(root, cache=tmp_path / "cache")


def test_json_among_texts_and_other_json_stay_text(folder, tmp_path):
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    assert load_text(folder, cache=tmp_path / "cache").num_texts == 61
    config = tmp_path / "config.json"
    config.write_text('{\n "text": "a"\n}\n' * 9000)
    assert load_text(config, cache=tmp_path / "cache").num_texts == 1
