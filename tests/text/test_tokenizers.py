"""Tokenizers of files and of bytes: special tokens in prompts and documents, prefixes, files of other kinds."""

import json
import sys

import numpy as np
import pytest
import tokenizers

from zoo.text.tokenizers import ByteTokenizer, FileTokenizer, find_tokenizer, read_tokenizer, train_bpe

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
    tokens, lengths = tokenizer.encode_with_lengths("naïve<end>")
    assert np.array_equal(tokens, tokenizer.encode("naïve<end>")) and lengths[tokens == end] == len("<end>")
    assert tokenizer.decode(tokens) == "naïve" and tokenizer.token_bytes[end] == 0


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
    tokens, lengths = tokenizer.encode_with_lengths("abc ab")
    assert tokens.tolist() == [1, 2, 1] and lengths.tolist() == [2, 1, 3]
    assert tokenizer.decode(tokens) == "abc ab" and not tokenizer.token_bytes.any()


def test_surrogates_are_refused_by_name(with_end):
    for tokenizer in (ByteTokenizer(), with_end[0]):
        with pytest.raises(ValueError, match=r"the text is not Unicode: character 3 is the surrogate U\+D800"):
            tokenizer.encode("fox\ud800")
