"""Exports: a model that loads bit for bit, and tokenizers that other tools read alike."""

import json
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import zoo
from tests.quick import mark_slow
from zoo.text.tokenizers import ByteTokenizer, FileTokenizer
from zoo.train import export, load_text, read_tokenizer
from zoo.train.export import describe_training
from zoo.weights.model_card import Training

SIZES = {"embed": 16, "layers": 2, "heads": 2, "mlp": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    for i in range(30):
        (root / f"{i}.txt").write_text(f"the quick brown fox {i} jumps, naïve λ ✓\n" * 20)
    return root


def checkpoint(directory, tokenizer, **config):
    """What `read_tokenizer` looks at."""
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.ci
@pytest.mark.parametrize("vocab", mark_slow([256, 300], but=[300]))
def test_export_round_trips_a_model_from_scratch(folder, tmp_path, vocab):
    corpus = load_text((folder,), vocab=vocab, cache=tmp_path / "cache")
    model = zoo.models.Transformer(vocab=vocab, qk_norm=True, **SIZES, key=jax.random.key(0))
    assert export(model, corpus, tmp_path / "model", seq_len=64) == tmp_path / "model"
    again = zoo.load(tmp_path / "model")
    tokens = jnp.asarray(corpus.encode("the quick brown fox"))[None]
    assert np.array_equal(model(tokens), again(tokens))
    facts = json.loads((tmp_path / "model" / "config.json").read_text())
    assert [facts[f"{name}_token_id"] for name in ("bos", "eos")] == [0, 0] and facts["max_position_embeddings"] == 64
    assert json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())["bos_token"] == "\0"
    read = read_tokenizer(tmp_path / "model")
    assert type(read) is (ByteTokenizer if vocab == 256 else FileTokenizer) and read.separator == 0
    assert np.array_equal(read.token_bytes, corpus.tokenizer.token_bytes)
    export(again, load_text((folder,), tokenizer=read, cache=tmp_path / "cache"), tmp_path / "twice", seq_len=32)
    for file in (tmp_path / "model").iterdir():
        assert file.read_bytes() == (tmp_path / "twice" / file.name).read_bytes(), file.name


def test_training_on_a_card_has_names_of_the_hub_and_no_folders(tmp_path):
    local = tmp_path / "chats=2.jsonl"
    local.touch()
    config = {
        "checkpoint": Path("Qwen/Qwen3-0.6B"), "data": ("trl-lib/chats:train=0.5", f"{local}"), "steps": 120,
        "epochs": None, "lora": 0, "quantization": "none", "out": tmp_path, "seed": 1,
    }  # fmt: skip
    about = describe_training(config, 38)
    assert (about.base, about.datasets) == ("Qwen/Qwen3-0.6B", ["trl-lib/chats"])
    assert about.facts == {"data": "trl-lib/chats:train=0.5, chats=2.jsonl", "steps": 38}
    cached = tmp_path / "models--tiny--llama" / "snapshots" / "0123"
    assert describe_training({"checkpoint": cached}, 1).base == "tiny/llama"
    assert describe_training({"checkpoint": tmp_path, "data": ()}, 1) == Training(None, [], {"steps": 1})


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bytes")
    ByteTokenizer().save(directory)
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=200)
def test_export_byte_tokenizer_equals_other_tools(of_bytes, written):
    ids = of_bytes.encode(written).ids
    assert ids == [0, *written.encode()]  # a text begins with the separator, as it did in training
    assert of_bytes.decode(ids[1:], skip_special_tokens=False) == written
    assert of_bytes.decode([0, *ids]) == written.replace("\0", "")


def test_byte_tokenizer_has_exactly_256_tokens(of_bytes):
    assert of_bytes.get_vocab_size() == 256
    assert sorted(of_bytes.get_vocab().values()) == list(range(256)) and of_bytes.id_to_token(0) == "\0"


def test_byte_tokenizer_needs_no_package(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    ByteTokenizer().save(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 256}')
    assert isinstance(read_tokenizer(tmp_path), ByteTokenizer)


def test_read_tokenizer_with_the_separator_last(folder, tmp_path):
    """As GPT-2 has them: byte-level, one token for the beginning and the end, and one added that is text."""
    trained = load_text((folder,), vocab=300, cache=tmp_path / "cache")
    made = tokenizers.Tokenizer.from_file(str(trained.directory / "tokenizer.json"))
    made.enable_truncation(4)
    count = made.get_vocab_size()
    made.add_tokens(["    "])
    made.add_special_tokens(["<end>"])
    tokenizer = read_tokenizer(checkpoint(tmp_path / "a", made, vocab_size=320, eos_token_id=[count + 1, 3]))
    assert (tokenizer.separator, tokenizer.vocab) == (count + 1, 320)
    assert tokenizer.token_bytes[count] == 4 and tokenizer.token_bytes[count + 1] == 0
    written = "def f():\n    return '<end>'  # the quick brown fox"
    (tokens,) = tokenizer.encode_all([written.encode()])
    assert count in tokens and count + 1 not in tokens and tokenizer.decode(tokens) == written

    corpus = load_text((folder,), tokenizer=tokenizer, cache=tmp_path / "cache")
    starts = np.flatnonzero(np.asarray(corpus.train.tokens) == tokenizer.separator)
    assert starts[0] == 0 and len(starts) > 20 and corpus.directory != trained.directory
    assert corpus.train.text_bytes == int(tokenizer.token_bytes[corpus.train.tokens].sum())
    batch = next(corpus.train.batches(seq_len=64, batch_size=8, with_segments=True))
    assert np.array_equal(batch["weights"] == 0, batch["targets"] == tokenizer.separator)
    assert (batch["positions"][batch["tokens"] == tokenizer.separator] == 0).all()
    last = list(corpus.validation.ordered(seq_len=64, batch_size=8))[-1]
    assert not last["weights"][last["targets"] == tokenizer.separator].any()
    (tmp_path / "b").mkdir()
    corpus.tokenizer.save(tmp_path / "b")
    assert json.loads((tmp_path / "b" / "tokenizer_config.json").read_text())["bos_token"] == "<end>"


def test_read_tokenizer_with_byte_fallback(tmp_path):
    """As LLaMA has them: `▁` for a space, `<0x0A>` for a byte that is in no piece."""
    pieces = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "b"]
    words = {piece: index for index, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(words, [("▁", "a")], byte_fallback=True))
    made.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    rest = [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    made.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.Replace("▁", " "), *rest])
    made.add_special_tokens(["<s>"])
    tokenizer = read_tokenizer(checkpoint(tmp_path / "a", made, vocab_size=261, bos_token_id=0, eos_token_id=2))
    (tokens,) = tokenizer.encode_all(["b a λ\n".encode()])
    assert tokens.tolist() == [260, 259, 257, 0xCE + 1, 0xBB + 1, 0x0A + 1]
    assert tokenizer.decode(tokens) == "b a λ\n" and tokenizer.token_bytes[tokens].tolist() == [
        1,
        2,
        1,
        1,
        1,
        1,
    ]


def test_read_tokenizer_refuses_mismatched_files(folder, tmp_path):
    made = tokenizers.Tokenizer.from_file(
        str(load_text((folder,), vocab=300, cache=tmp_path / "cache").directory / "tokenizer.json")
    )
    count = made.get_vocab_size()
    with pytest.raises(ValueError, match=f"tokenizer.json has {count} tokens, and its model knows 280"):
        read_tokenizer(checkpoint(tmp_path / "a", made, vocab_size=280, bos_token_id=0))
    with pytest.raises(ValueError, match="names no token of the 300 as bos_token_id or eos_token_id"):
        read_tokenizer(checkpoint(tmp_path / "a", made, vocab_size=300, bos_token_id=None))
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0, "##b": 1}, unk_token="a"))
    with pytest.raises(ValueError, match="neither byte-level nor do they fall back to bytes"):
        read_tokenizer(checkpoint(tmp_path / "a", made, vocab_size=2, bos_token_id=0))
    for name, words in (
        ("tokenizer.json", "tokenizer.json: there is no such file"),
        ("config.json", "a has no config.json, which a model has"),
    ):
        (tmp_path / "a" / name).unlink()
        with pytest.raises(FileNotFoundError, match=words):
            read_tokenizer(tmp_path / "a")


def test_load_text_from_a_mapping(tmp_path):
    texts = {f"topic {i}": f"about {i}: naïve λ\n" * 9 for i in range(30)}
    corpus = load_text(texts | {"binary": "a\0b"}, cache=tmp_path)
    assert (corpus.num_texts, corpus.num_binary) == (30, 1)
    assert corpus.train.text_bytes + corpus.validation.text_bytes == sum(len(t.encode()) for t in texts.values())
    assert load_text(dict(reversed(texts.items())), cache=tmp_path).directory == corpus.directory
    with pytest.raises(ValueError, match="the texts given: no text there"):
        load_text({"binary": "a\0b"}, cache=tmp_path)


def test_remat_changes_no_values():
    model = zoo.models.Transformer(vocab=7, **SIZES, key=jax.random.key(0))
    other = zoo.configure(model, remat="full")
    assert (model.stack.remat, other.stack.remat) == ("none", "full")
    assert all(a is b for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(other), strict=True))
    unstacked = eqx.tree_at(lambda model: model.stack, model, model.stack.unstack())
    with pytest.raises(ValueError, match="does not rematerialize"):
        zoo.configure(unstacked, remat="full")
