"""Damaged and hostile `tokenizer.json`: each is refused with the file's name and the fault, on one line."""

import copy
import json
import os

import pytest

from zoo.text.tokenizer_file import TokenizerError
from zoo.text.tokenizers import MAX_VOCAB, find_tokenizer, read_tokenizer, train_bpe

TEXT = b"the quick brown fox\n" * 20


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained") / "tokenizer.json"
    train_bpe([TEXT], 270, path)
    return json.loads(path.read_text())


def assign(tree, value, *keys):
    """A copy of a JSON tree with one value replaced."""
    changed = node = copy.deepcopy(tree)
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    return changed


def write(directory, tokenizer, **config):
    directory.mkdir(exist_ok=True)
    text = tokenizer if isinstance(tokenizer, str) else json.dumps(tokenizer)
    (directory / "tokenizer.json").write_text(text)
    (directory / "config.json").write_text(json.dumps({"vocab_size": 300, "bos_token_id": 0} | config))
    return directory


FAULTS = {
    "cut off": (lambda facts: json.dumps(facts)[:-1], "EOF while parsing"),
    "no object": (lambda facts: [], "invalid type"),
    "no model": (lambda facts: assign(facts, None, "model"), "is not a readable tokenizer: "),
    "no vocabulary": (lambda facts: assign(facts, 3, "model", "vocab"), "is not a readable tokenizer: "),
    "an id of text": (lambda facts: assign(facts, "7", "model", "vocab", "a"), "is not a readable tokenizer: "),
    "one id twice": (lambda facts: assign(facts, 70, "model", "vocab", "a"), "have the same id, 70"),
    "two ids": (
        lambda facts: assign(facts, 5, "added_tokens", 0, "id"),
        r"'\\x00' has the id 5, and is read as 0",
    ),
    "an added token of no id": (lambda facts: assign(facts, [{"content": "a"}], "added_tokens"), "missing field `id`"),
    "dropout": (lambda facts: assign(facts, 0.1, "model", "dropout"), "would tokenize one text in many ways"),
    "unknown parts of pairs": (lambda facts: assign(facts, [["a", "€"]], "model", "merges"), "Token `€` out of"),
    "a panic": (lambda facts: assign(facts, {}, "post_processor", "special_tokens"), "is not a readable tokenizer: "),
    "deep": (lambda facts: "[" * 10_000 + "]" * 10_000, "is not a readable tokenizer: "),
    "deep in an unknown key": (
        lambda facts: json.dumps(facts)[:-1] + ', "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
        "is not a readable tokenizer: ",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_tokenizer_is_refused_by_name(trained, tmp_path, fault):
    change, message = FAULTS[fault]
    directory = write(tmp_path / "a", change(trained))
    for read in (read_tokenizer, lambda directory: find_tokenizer(directory, 300)):
        with pytest.raises(TokenizerError, match=f"{directory}/tokenizer.json .*{message}") as raised:
            read(directory)
        assert len(str(raised.value).splitlines()) == 1


def test_tokenizer_that_is_no_file_or_too_large_is_refused(trained, tmp_path):
    directory = write(tmp_path / "a", trained)
    (directory / "tokenizer.json").unlink()
    os.mkfifo(directory / "tokenizer.json")
    for read in (read_tokenizer, lambda directory: find_tokenizer(directory, 300)):
        with pytest.raises(TokenizerError, match="tokenizer.json cannot be read: is a pipe"):
            read(directory)
    (directory / "tokenizer.json").unlink()
    with (directory / "tokenizer.json").open("wb") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(TokenizerError, match="has 1,099,511,627,776 bytes: expected at most"):
        read_tokenizer(directory)


@pytest.mark.parametrize("size", [2**31, MAX_VOCAB, 0, -1, True, "300", None, 1e3])
def test_tokenizer_of_an_impossible_vocabulary_is_refused(trained, tmp_path, size):
    with pytest.raises(TokenizerError, match="config.json: vocab_size is a number of tokens from 1 to"):
        read_tokenizer(write(tmp_path / "a", trained, vocab_size=size))


@pytest.mark.parametrize("token", ["0", True, 1.0, [None], {}, 300, -1])
def test_tokenizer_without_a_separator_is_refused(trained, tmp_path, token):
    with pytest.raises(TokenizerError, match="config.json names no token of the 300 as bos_token_id or eos_token_id"):
        read_tokenizer(write(tmp_path / "a", trained, bos_token_id=token))


def test_tokenizer_whose_file_lacks_the_separator_is_refused(trained, tmp_path):
    with pytest.raises(TokenizerError, match="tokenizer.json has no token 290, to start a document with"):
        read_tokenizer(write(tmp_path / "a", trained, bos_token_id=290))


def test_tokenizer_that_would_lose_text_is_refused(trained, tmp_path):
    for change, message in (
        (assign(trained, None, "pre_tokenizer"), "loses text: 'Hello, world"),
        (assign(trained, {"€": 0}, "model", "vocab") | {"added_tokens": []}, "has no token for the byte 0x09"),
    ):
        change["model"]["merges"] = []
        with pytest.raises(TokenizerError, match=message):
            read_tokenizer(write(tmp_path / "a", change))


def test_tokenizer_file_counts_gaps_between_ids(trained, tmp_path):
    gap = assign(trained, 299, "model", "vocab", "~")
    tokenizer = read_tokenizer(write(tmp_path / "a", gap))
    assert tokenizer.vocab == 300 and tokenizer.token_bytes[299] == 1
    with pytest.raises(TokenizerError, match="tokenizer.json has 300 tokens, and its model knows 299"):
        read_tokenizer(write(tmp_path / "a", gap, vocab_size=299))
    (tokens,) = tokenizer.encode_all([b"~ fox"])
    assert tokens[0] == 299 and tokenizer.decode(tokens) == "~ fox"


def test_tokens_of_a_model_that_reads_images_are_found(trained, tmp_path):
    """What that config does not say is in generation_config.json, or the caller knows it from the model."""
    directory = write(tmp_path / "a", trained, vocab_size=None, bos_token_id=None, eos_token_id=None)
    config = directory / "config.json"
    config.write_text(json.dumps({"text_config": {"vocab_size": 300, "bos_token_id": None}, "eos_token_id": None}))
    with pytest.raises(TokenizerError, match="names no token of the 300"):
        read_tokenizer(directory)
    (directory / "generation_config.json").write_text('{"bos_token_id": 0, "eos_token_id": [5, 7]}')
    tokenizer = read_tokenizer(directory)
    assert (tokenizer.vocab, tokenizer.separator, tokenizer.end) == (300, 0, 5)
    config.write_text('{"text_config": {"eos_token_id": 7}}')
    with pytest.raises(TokenizerError, match="vocab_size is a number of tokens"):
        read_tokenizer(directory)
    tokenizer = read_tokenizer(directory, 320)
    assert (tokenizer.vocab, tokenizer.separator, tokenizer.end) == (320, 0, 7)
