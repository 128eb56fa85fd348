"""Tokenizers of files and of bytes: special tokens in prompts and documents, prefixes, files of other kinds."""

import json
import pickle
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import zoo.text.tokenizers
from zoo.text.chat.template import read_special_tokens
from zoo.text.tokenizers import (
    ByteTokenizer,
    FileTokenizer,
    count_bytes,
    find_language_token,
    find_tokenizer,
    read_tokenizer,
    train_bpe,
)

TEXT = b"the quick brown fox\n" * 20


@pytest.fixture
def with_end(tmp_path):
    """A trained BPE with a special token `<end>`, and the id of it."""
    train_bpe([TEXT], 270, tmp_path / "tokenizer.json")
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    made.add_special_tokens(["<end>"])
    made.save(str(tmp_path / "tokenizer.json"))
    return FileTokenizer(tmp_path / "tokenizer.json", 300), made.token_to_id("<end>")


def test_special_tokens_of_prompts_and_documents(with_end):
    tokenizer, end = with_end
    for _ in range(2):  # neither call changes what the other does
        assert end in tokenizer.encode("fox<end>") and end not in next(tokenizer.encode_all([b"fox<end>"]))
    tokens, offsets = tokenizer.encode_with_offsets("naïve<end>")
    lengths = count_bytes("naïve<end>", offsets)
    assert np.array_equal(tokens, tokenizer.encode("naïve<end>")) and lengths[tokens == end] == len("<end>")
    assert tokenizer.decode(tokens) == "naïve" and tokenizer.token_bytes[end] == 0


def trim_offsets(path):
    """Change the post-processor of a file to one that takes spaces out of offsets, as Llama 3 has it."""
    made = tokenizers.Tokenizer.from_file(str(path))
    made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    made.save(str(path))


def map_bytes_to_characters(text, token_lengths):
    """First character and end of each run of bytes, by a table from each byte to its character."""
    table = [number for number, character in enumerate(text) for _ in character.encode()]
    stops = np.cumsum(token_lengths)
    starts = stops - token_lengths
    return [(table[start], table[stop - 1] + 1) for start, stop in zip(starts, stops, strict=True)]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """Bytes, and a trained BPE, with merges within and across the bytes of a character."""
    path = tmp_path_factory.mktemp("byte_level") / "tokenizer.json"
    train_bpe([TEXT, "naïve 🙂🙃  λλ ✓✓\n\n".encode() * 20], 310, path)
    trim_offsets(path)
    return ByteTokenizer(), FileTokenizer(path, 310)


@settings(max_examples=60)
@given(st.text() | st.text("the quicknaïve🙂🙃λ✓ \n"))
def test_offsets_are_the_characters_of_tokens(byte_level, text):
    for tokenizer in byte_level:
        for find in (True, False):
            if "\0" in text:  # has no bytes
                continue
            tokens, offsets = tokenizer.encode_with_offsets(text, find_special_tokens=find)
            expected = map_bytes_to_characters(text, tokenizer.token_bytes[tokens])
            assert offsets.tolist() == [list(each) for each in expected]
            np.testing.assert_array_equal(tokens, tokenizer.encode(text))
            assert count_bytes(text, offsets).sum() == len(text.encode())


def test_offsets_without_special_tokens(with_end):
    tokenizer, end = with_end
    tokens, offsets = tokenizer.encode_with_offsets("é<end>fox")
    (place,) = np.flatnonzero(tokens == end)
    assert offsets[place].tolist() == [1, 6] and offsets[-1, 1] == 9
    plain, offsets = tokenizer.encode_with_offsets("é<end>fox", find_special_tokens=False)
    np.testing.assert_array_equal(plain, next(tokenizer.encode_all(["é<end>fox".encode()])))
    assert end not in plain and offsets[-1, 1] == 9


@pytest.mark.parametrize(("size", "number"), [(1, 1024), (60, 1024), (2**20, 3), (2**20, 1024)])
def test_documents_in_batches_are_documents_one_by_one(with_end, monkeypatch, size, number):
    tokenizer, _ = with_end
    documents = [TEXT[:length] + b"<end>" for length in (0, 40, 7, 200, 0, 3, 90)]
    expected = [tokenizer.encode_with_offsets(each.decode(), find_special_tokens=False)[0] for each in documents]
    monkeypatch.setattr(zoo.text.tokenizers, "_BATCH_BYTES", size)
    monkeypatch.setattr(zoo.text.tokenizers, "_BATCH_DOCUMENTS", number)
    for got, one in zip(tokenizer.encode_all(iter(documents)), expected, strict=True):
        np.testing.assert_array_equal(got, one)


@pytest.mark.parametrize("pattern", [None, *zoo.text.pieces.LINE_PATTERNS])
def test_pieces_of_a_long_document_have_its_tokens(tmp_path, monkeypatch, pattern):
    """Merges within and across lines, digits and the characters of contractions would show a wrong cut."""
    path = tmp_path / "tokenizer.json"
    letters = np.array(list(" \n\nab.A's5\té\r"))
    draws = np.random.default_rng(0).integers(0, len(letters), (400, 40))
    documents = ["".join(letters[row]).encode() for row in draws]
    train_bpe(documents, 500, path)
    facts = json.loads(path.read_text())
    if pattern is not None:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        facts["pre_tokenizer"] = {
            "type": "Sequence",
            "pretokenizers": [split, {**facts["pre_tokenizer"], "use_regex": False}],
        }
    path.write_text(json.dumps(facts))
    tokenizer = FileTokenizer(path, 500)
    expected = list(tokenizer.encode_all(documents))
    monkeypatch.setattr(zoo.text.tokenizers, "_BATCH_BYTES", 1)
    assert sum(len(list(zoo.text.pieces.cut_at_lines(document, 1))) for document in documents) > 700
    for got, one in zip(tokenizer.encode_all(documents), expected, strict=True):
        np.testing.assert_array_equal(got, one)


def test_only_documents_of_known_splitters_are_cut(with_end, tmp_path):
    splits = zoo.text.pieces.splits_at_lines
    facts = json.loads((tmp_path / "tokenizer.json").read_text())
    level = facts["pre_tokenizer"]
    assert splits(facts) and splits({**facts, "normalizer": {"type": "NFC"}})
    added = {"content": "b", "special": False, "lstrip": True, "rstrip": False}
    for change in (
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {**level, "add_prefix_space": True}},
        {"pre_tokenizer": {**level, "use_regex": False}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Punctuation"}, level]}},
        {"added_tokens": [added]},
        {"added_tokens": [{**added, "content": ".\nb", "lstrip": False}]},
    ):
        assert not splits({**facts, **change}), change


def test_a_damaged_document_of_a_batch_is_named(with_end):
    encoded = with_end[0].encode_all([b"fox", b"the", b"\xff", b"quick"])
    assert [with_end[0].decode(next(encoded)) for _ in range(2)] == ["fox", "the"]
    with pytest.raises(ValueError, match=r"tokenizer.json cannot tokenize a text: .* can't decode byte 0xff"):
        next(encoded)


def test_prefix_gives_the_default_separator(with_end, tmp_path):
    tokenizer, end = with_end
    assert tokenizer.prefix == (0,) and tokenizer.separator == 0
    facts = json.loads((tmp_path / "tokenizer.json").read_text())
    special = {"<end>": {"id": "<end>", "ids": [end], "tokens": ["<end>"]}}
    facts["post_processor"]["single"][0]["SpecialToken"]["id"] = "<end>"
    facts["post_processor"]["special_tokens"] = special
    (tmp_path / "tokenizer.json").write_text(json.dumps(facts))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json", 300)
    assert tokenizer.prefix == (end,) and tokenizer.separator == end


def test_save_names_the_tokens_that_begin_and_end_a_text(with_end, tmp_path):
    _, end = with_end
    (tmp_path / "out").mkdir()
    FileTokenizer(tmp_path / "tokenizer.json", 300, end=end).save(tmp_path / "out")
    assert read_special_tokens(tmp_path / "out") == {"bos_token": "\0", "eos_token": "<end>"}


def test_bpe_training_is_reproducible(tmp_path):
    for name in "ab":
        train_bpe([TEXT, b"a quick test"], 280, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_saved_byte_tokenizer_is_found_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    ByteTokenizer().save(tmp_path)
    assert isinstance(find_tokenizer(tmp_path, 300), ByteTokenizer)
    (tmp_path / "config.json").write_text('{"vocab_size": 255}')
    with pytest.raises(ValueError, match="tokenizer.json has 256 tokens, and the model that .* knows 255"):
        read_tokenizer(tmp_path)


def test_tokenizer_without_bytes_generates(tmp_path):
    """Words of WordPiece have no spelling in bytes: enough to generate and evaluate, not to train."""
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "ab": 1, "##c": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.decoder = tokenizers.decoders.WordPiece()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = find_tokenizer(tmp_path, 3)
    assert tokenizer is not None and tokenizer.prefix == ()
    tokens, offsets = tokenizer.encode_with_offsets("abc ab")
    lengths = count_bytes("abc ab", offsets)
    assert tokens.tolist() == [1, 2, 1] and lengths.tolist() == [2, 1, 3]
    assert tokenizer.decode(tokens) == "abc ab" and not tokenizer.token_bytes.any()


def test_tokenizers_are_sent_to_other_processes(with_end):
    for tokenizer in (ByteTokenizer(), with_end[0]):
        again = pickle.loads(pickle.dumps(tokenizer))
        assert type(again) is type(tokenizer) and again.cache_key == tokenizer.cache_key
        np.testing.assert_array_equal(again.encode("the fox<end>"), tokenizer.encode("the fox<end>"))


def test_surrogates_are_refused_by_name(with_end):
    for tokenizer in (ByteTokenizer(), with_end[0]):
        with pytest.raises(ValueError, match=r"the text is not Unicode: character 3 is the surrogate U\+D800"):
            tokenizer.encode("fox\ud800")


def test_special_tokens_after_a_text_are_found(with_end, tmp_path):
    """Of encoders, whose sources end with one."""
    tokenizer, end = with_end
    assert tokenizer.suffix == (tokenizer.end,) and tokenizer.prefix == (0,)
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    special = [("<end>", end), ("\0", 0)]
    made.post_processor = tokenizers.processors.TemplateProcessing(single="$A <end> \0", special_tokens=special)
    made.save(str(tmp_path / "tokenizer.json"))
    again = FileTokenizer(tmp_path / "tokenizer.json", 300)
    assert again.suffix == (end, 0) and again.prefix == ()
    np.testing.assert_array_equal(again.encode("fox"), tokenizer.encode("fox"))


def test_languages_are_found_by_code():
    codes = {"</s>": 2, "fra_Latn": 5, "deu_Latn": 6, "zho_Hans": 7, "zho_Hant": 8, "__fr__": 9, "<|de|>": 10}
    tokenizer = ByteTokenizer()
    tokenizer.special_tokens = codes
    assert find_language_token(tokenizer, "fra_Latn") == 5
    assert find_language_token(tokenizer, "deu") == 6
    assert find_language_token(tokenizer, "fr") == 9 and find_language_token(tokenizer, "de") == 10
    with pytest.raises(ValueError, match="'zho'; did you mean zho_Hans or zho_Hant"):
        find_language_token(tokenizer, "zho")
    with pytest.raises(ValueError, match="no token for the language 'fra_Latin'; did you mean fra_Latn"):
        find_language_token(tokenizer, "fra_Latin")
