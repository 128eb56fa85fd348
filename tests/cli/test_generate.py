"""`zoo generate` prints what zoo.generate returns; streaming never prints a partial character."""

import dataclasses
import re
import shutil
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import zoo
from tests.command_line import BOS, EOS
from zoo.text.stream_decoder import StoppingDecoder, StreamDecoder, decode_until_stop
from zoo.text.tokenizers import ByteTokenizer, FileTokenizer, count_bytes, find_tokenizer
from zoo.weights.generation_config import read_stop_tokens


@pytest.mark.slow
def test_generate_streams_one_prompt(run, text_model, capsys):
    text = FileTokenizer(text_model / "tokenizer.json", 256)
    prompt = [BOS, *text.encode("Où?").tolist()]
    expected = zoo.generate(zoo.load(text_model), jnp.array([prompt]), max_new_tokens=8, stop_tokens=[EOS])
    out, error = run("generate", text_model, "--prompt", "Où?", "--max-new-tokens", 8)
    new = [token for token in np.asarray(expected)[0].tolist() if token >= 0]
    assert out == text.decode(new) + "\n"
    assert f"{len(new)} tokens; the first after" in error and "tokens/s" in error


def test_generate_continues_words_after_the_directory(run, refused, text_model):
    flag = run("generate", text_model, "--prompt", "Où est", "--max-new-tokens", 8)[0]
    assert run("generate", text_model, "Où est", "--max-new-tokens", 8)[0] == flag
    assert run("generate", text_model, "Où", "est", "--max-new-tokens", 8)[0] == flag
    assert "not both" in refused("generate", text_model, "Où", "--prompt", "est")


@pytest.mark.slow
def test_generate_batch_equals_single_prompts(run, bytes_model):
    prompts = ("A", "longer text")
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    out, _ = run("generate", bytes_model, *words, "--max-new-tokens", 4)
    alone = [run("generate", bytes_model, "--prompt", prompt, "--max-new-tokens", 4)[0] for prompt in prompts]
    assert out == "".join(f"--- {i}\n{text}" for i, text in enumerate(alone, start=1))


@pytest.mark.slow
def test_generate_shares_a_prompt_over_devices(run, bytes_model):
    words = ["generate", bytes_model, "A text for two devices", "--max-new-tokens", 8]
    assert run(*words, "--context", 2)[0] == run(*words)[0]


def test_generate_from_token_ids(run, gpt2):
    expected = zoo.generate(zoo.load(gpt2), jnp.array([[3, 5, 7]]), max_new_tokens=4)[0].tolist()
    numbers = ["--tokens", 3, 5, 7, "--max-new-tokens", 4]
    assert run("generate", gpt2, *numbers)[0].split() == list(map(str, expected))
    out, error = run("generate", gpt2, *numbers, "--stop-token", expected[0])
    assert out.split() == [str(expected[0])] and error.startswith("1 token;")


def test_generate_prints_samples_and_ends_at_stop_strings(run, refused, text_model, gpt2):
    words = ["generate", text_model, "--prompt", "Où?", "--max-new-tokens", 8]
    (text,) = run(*words)[0].splitlines()
    assert run(*words, "--no-stream")[0] == text + "\n"
    stop = text[3:5]
    for more in ((), ("--no-stream",), ("--draft", "prompt"), ("--draft", text_model, "--draft-tokens", 2)):
        out, error = run(*words, "--stop", stop, *more)
        assert out == text[: text.index(stop)] + "\n"
        assert ("all after" in error) == ("--draft" in more)
    sampled = [*words, "--prompt", "a", "--temperature", 1, "--samples", 2, "--presence-penalty", 1]
    out, _ = run(*sampled, "--frequency-penalty", 0.5)
    assert [line for line in out.splitlines() if line.startswith("--- ")] == [
        "--- 1.1",
        "--- 1.2",
        "--- 2.1",
        "--- 2.2",
    ]
    assert "--stop is text, and" in refused("generate", gpt2, "--tokens", 3, "--stop", "a")
    assert "samples of at least 1, not 0" in refused(*words, "--samples", 0)


def test_generate_samples_depend_on_the_seed(run, bytes_model):
    words = ["generate", bytes_model, "--prompt", "a", "--max-new-tokens", 8, "--temperature", 1, "--seed"]
    assert run(*words, 1)[0] == run(*words, 1)[0] != run(*words, 2)[0]


def test_generate_errors_name_the_problem(refused, text_model, gpt2, monkeypatch):
    assert "no tokenizer.json: pass token ids" in refused("generate", gpt2, "--prompt", "a")
    assert "65 tokens are too many" in refused("generate", gpt2, "--tokens", 1)
    assert "--prompt or as --tokens" in refused("generate", text_model)
    assert "not both" in refused("generate", text_model, "--prompt", "a", "--tokens", 1)
    assert "at least one token" in refused("generate", text_model, "--tokens")
    assert "temperature" in refused("generate", text_model, "--tokens", 1, "--top-k", 3)
    assert "16 devices" in refused("generate", text_model, "--tokens", 1, "--data", 16)
    assert "generate does not shard layers, and --pipe 16" in refused("generate", text_model, "a", "--pipe", 16)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "pip install 'equizoo[text]'" in refused("generate", text_model, "--prompt", "a")


@pytest.fixture(scope="module")
def translator(checkpoint, text_model):
    """A model with an encoder, and the tokenizer of `text_model` with two languages."""
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 4, "num_layers": 1, "vocab_size": 260}
    directory = checkpoint("mt5", decoder_start_token_id=EOS, **sizes)
    made = tokenizers.Tokenizer.from_file(str(text_model / "tokenizer.json"))
    made.add_special_tokens(["fra_Latn", "deu_Latn"])
    made.save(str(directory / "tokenizer.json"))
    return directory


def test_generate_reads_a_source_and_begins_with_a_language(run, refused, translator):
    """The source is read with the special tokens around it, and the target begins with start and language."""
    text = FileTokenizer(translator / "tokenizer.json", 260)
    source = jnp.array([[BOS, *text.encode("Où?").tolist(), EOS]])
    model = zoo.load(translator)
    assert model.start == (EOS,)
    for words, start in (((), (EOS,)), (("--language", "deu"), (EOS, text.special_tokens["deu_Latn"]))):
        wanted = zoo.generate(dataclasses.replace(model, start=start), source, max_new_tokens=6)
        out, _ = run("generate", translator, "Où?", "--max-new-tokens", 6, "--stop-token", *words)
        assert out == text.decode(np.asarray(wanted)[0]) + "\n"
    assert "no token for the language 'xx'" in refused("generate", translator, "Où?", "--language", "xx")
    assert "draft: the target of a source" in refused("generate", translator, "Où?", "--draft", "prompt")


def test_a_language_is_for_a_model_with_an_encoder(refused, text_model):
    assert "begins the target of a model with an encoder" in refused("generate", text_model, "a", "--language", "fra")


def test_start_tokens_of_generation_config(translator, tmp_path):
    shutil.copytree(translator, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"decoder_start_token_id": 3, "forced_bos_token_id": 7}')
    assert zoo.load(tmp_path).start == (3, 7)
    (tmp_path / "generation_config.json").write_text('{"forced_bos_token_id": 7}')
    assert zoo.load(tmp_path).start == (EOS, 7)
    (tmp_path / "generation_config.json").write_text('{"decoder_start_token_id": "fr"}')
    with pytest.raises(zoo.CheckpointError, match="decoder_start_token_id = 'fr'"):
        zoo.load(tmp_path)


def test_stop_tokens_from_config_files(text_model, bytes_model, tmp_path):
    assert read_stop_tokens(text_model) == [EOS, 300]  # those of generation_config.json
    assert read_stop_tokens(bytes_model) == []
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    assert read_stop_tokens(tmp_path) == [3]
    for given, tokens in (("null", []), ("-1", []), ("[2, -1]", [2])):
        (tmp_path / "config.json").write_text(f'{{"eos_token_id": {given}}}')
        assert read_stop_tokens(tmp_path) == tokens
    for given in ("true", '"2"', "[[2]]", "2.0"):
        (tmp_path / "config.json").write_text(f'{{"eos_token_id": {given}}}')
        with pytest.raises(
            zoo.CheckpointError, match="config.json: eos_token_id = .* should be a list of whole numbers"
        ):
            read_stop_tokens(tmp_path)


TEXTS = ("plain", "naïve – 日本語 👩‍🚀!", "", "é" * 9, "two  spaces\n\nlines")


@pytest.mark.parametrize("text", TEXTS)
def test_stream_decoder_prints_complete_characters(text_model, text):
    for tokenizer in (FileTokenizer(text_model / "tokenizer.json", 256), ByteTokenizer()):
        tokens = tokenizer.encode(text).tolist()
        for begun in range(0, len(tokens), 3):
            before = tokenizer.decode(tokens[:begun]).rstrip("\ufffd")
            stream = StreamDecoder(tokenizer.decode, tokens[:begun])
            pieces = [stream.push(token) for token in tokens[begun:]]
            assert before + "".join(pieces) == text and stream.flush() == ""


def test_stream_decoder_completes_a_character_of_the_prompt():
    def decode(tokens):  # one replacement character for each byte, as byte fallback writes them
        return re.sub("[\udc80-\udcff]", "\ufffd", bytes(tokens).decode(errors="surrogateescape"))

    for begun in range(1, 4):
        stream = StreamDecoder(decode, "a€bc".encode()[:begun])
        assert "".join(map(stream.push, "a€bc".encode()[begun:])) == "€bc"
    stream = StreamDecoder(decode, b"a\xe2\x82")
    assert [stream.push(token) for token in b"bc"] == ["b", "c"]


def test_stream_decoder_flushes_incomplete_bytes():
    stream = StreamDecoder(ByteTokenizer().decode)
    assert [stream.push(token) for token in (65, 0xE2, 0x82)] == ["A", "", ""]
    assert stream.flush() == "\ufffd"


@pytest.mark.parametrize(
    ("stop", "pieces"),
    [
        ((), ["a", "b", "c", "a", "b", "d", "e"]),
        (("abd",), ["", "", "abc", "", "", "", ""]),  # held back until it cannot begin a stop string
        (("x", "ca"), ["a", "b", "", "", "", "", ""]),
        (("d", "abd"), ["", "", "abc", "", "", "", ""]),
        (("eff",), ["a", "b", "c", "a", "b", "d", ""]),
    ],
)
def test_stopping_decoder_ends_before_a_stop_string(stop, pieces):
    stream = StoppingDecoder(ByteTokenizer().decode, stop=stop)
    assert [stream.push(token) for token in b"abcabde"] == pieces
    assert stream.ended == (len(stop) > 0 and stop != ("eff",))
    assert stream.flush() == ("e" if stop == ("eff",) else "")
    with pytest.raises(ValueError, match="stop: an empty string"):
        StoppingDecoder(ByteTokenizer().decode, stop=("",))


@pytest.mark.parametrize(
    ("stop", "tokens", "text"),
    [
        (("<end>",), b"ab\0c", "ab"),
        (("b<end>", "zz"), b"ab\0c", "a"),
        (("b<end>c",), b"ab\0d\0b\0c", "abd"),
        (("<end>x<end>",), b"a\0x\0b", "a"),
        (("<end>",), b"ab<end>c", "ab"),  # spelled by other tokens
        (("bc", "<pad>"), b"ab\0c", "a"),  # a special token that no stop string spells has no text
        (("<end>d",), b"ab\0c", "abc"),
    ],
)
def test_stop_strings_may_spell_special_tokens(stop, tokens, text):
    special_tokens = {"<end>": 0, "<pad>": 1}
    stream = StoppingDecoder(ByteTokenizer().decode, b"q\0", stop, special_tokens)
    assert "".join(map(stream.push, tokens)) + stream.flush() == text
    assert decode_until_stop(ByteTokenizer().decode, [*tokens, -1, -1], stop, special_tokens) == text
    assert stream.ended == (text != "abc")


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_byte_counts_sum_to_the_text(text_model, text):
    for tokenizer in (FileTokenizer(text_model / "tokenizer.json", 256), ByteTokenizer()):
        tokens, offsets = tokenizer.encode_with_offsets(text)
        lengths = count_bytes(text, offsets)
        assert len(tokens) == len(lengths) and lengths.sum() == len(text.encode()) and (lengths >= 0).all()


def test_find_tokenizer_of_a_directory(text_model, tmp_path, refused, bytes_model):
    assert find_tokenizer(text_model, 256).prefix == (BOS,)
    assert isinstance(find_tokenizer(tmp_path, 256), ByteTokenizer) and find_tokenizer(tmp_path, 257) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="not a readable tokenizer"):
        find_tokenizer(tmp_path, 256)
