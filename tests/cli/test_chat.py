"""`zoo chat` goes on from what the model has read, and shows what one call of `zoo.generate` would."""

import io
import json
import os
import pty
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import zoo
from tests.command_line import EOS
from zoo.cli.chat import _Session
from zoo.generate import conversation
from zoo.text import ChatTemplate
from zoo.text.tokenizers import FileTokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def chat_model(bytes_model, tmp_path_factory):
    """A model with a chat template, which decodes greedily, and whose every token is a letter, a word or special."""
    directory = tmp_path_factory.mktemp("chat")
    shutil.copytree(bytes_model, directory, dirs_exist_ok=True)
    letters = [*map(chr, range(0x21, 0x7F)), "\u0120", "\u010a"]  # the last two are space and line end, byte-level
    words = [first + second for first in letters[:26] for second in letters[:26]]
    vocab = {word: number for number, word in enumerate([*letters, *words][:254])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": False, "eos_token_id": EOS}))
    return directory


@pytest.fixture
def talk(run, monkeypatch):
    """Run `zoo chat` with lines of standard input; return what it prints."""

    def talk(lines, *words):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return run("chat", *words, "--no-compile-cache")

    return talk


def answer(directory, tokens, count):
    """The tokens that one call of `zoo.generate` gives, and their text."""
    tokenizer = FileTokenizer(directory / "tokenizer.json", 256)
    new = zoo.generate(zoo.load(directory), jnp.array([tokens]), max_new_tokens=count, stop_tokens=[EOS])
    new = [token for token in np.asarray(new)[0].tolist() if token >= 0]
    return new, tokenizer.decode(new)


def test_two_turns_read_each_token_once(talk, chat_model, tmp_path, monkeypatch):
    read = []
    pad = conversation.pad_prompt
    monkeypatch.setattr(conversation, "pad_prompt", lambda x, *args: read.append(x.shape[1]) or pad(x, *args))
    saved = tmp_path / "chat.json"
    lines = ["Hi", "More <eos>?", f"/save {saved}"]
    out, _ = talk(lines, chat_model, "--system", "Be brief.", "--max-new-tokens", 6)
    messages = json.loads(saved.read_text())
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    tokenizer = FileTokenizer(chat_model / "tokenizer.json", 256)
    tokens = ChatTemplate.read(chat_model).encode(messages[:2], tokenizer, add_generation_prompt=True).tolist()
    new, text = answer(chat_model, tokens, 6)
    assert messages[2]["content"] == text and EOS not in new
    (typed,) = tokenizer.encode_all([b"[user] More <eos>?[assistant] "])
    assert read == [len(tokens), 1 + 1 + len(typed)]  # the last token of the answer, the end of the turn, the question
    assert messages[4]["content"] == answer(chat_model, [*tokens, *new, EOS, *typed.tolist()], 6)[1]
    assert out.endswith(f"wrote {saved}\n")


def test_an_answer_ends_before_a_stop_string(talk, chat_model, tmp_path):
    saved = tmp_path / "chat.json"
    talk(["Hi", f"/save {saved}"], chat_model, "--max-new-tokens", 6)
    text = json.loads(saved.read_text())[1]["content"]
    stop = text[2:4]
    lines = ["Hi", "More", f"/save {saved}"]
    out, _ = talk(lines, chat_model, "--max-new-tokens", 6, "--stop", stop, "--stop", "never said")
    messages = json.loads(saved.read_text())
    assert messages[1]["content"] == text[: text.index(stop)]
    assert out.startswith(messages[1]["content"] + "\n")
    tokenizer = FileTokenizer(chat_model / "tokenizer.json", 256)
    tokens = ChatTemplate.read(chat_model).encode(messages[:3], tokenizer, add_generation_prompt=True).tolist()
    expected = answer(chat_model, tokens, 6)[1]
    assert messages[3]["content"] == expected.partition(stop)[0]


def test_an_answer_ends_before_a_spelled_special_token(chat_model):
    tokenizer = FileTokenizer(chat_model / "tokenizer.json", 256)
    template = ChatTemplate.read(chat_model)
    special = tokenizer.special_tokens
    answers = iter([[*tokenizer.encode("ab"), special["<bos>"]], [*tokenizer.encode("cd"), special["<eos>"]], []])
    asked = []

    class Scripted(conversation.Conversation):
        def __init__(self):
            pass

        def stream(self, tokens, *, max_new_tokens):
            asked.append(tokens)
            yield from map(int, next(answers))

    session = _Session(Scripted(), tokenizer, template, {}, [EOS], 9, ["<bos>", "d<eos>"])
    session.begin(None)
    assert ["".join(session.answer(question)) for question in ("x", "y", "z")] == ["ab", "c", ""]
    for number, tokens in enumerate(asked):
        said = session.messages[: 2 * number + 1]
        assert list(tokens) == template.encode(said, tokenizer, add_generation_prompt=True).tolist()


def test_commands_of_a_chat(talk, chat_model, tmp_path):
    saved = tmp_path / "chat.json"
    lines = ["Hi", "/system Be rude.", "/save", "/nonsense", "/help", f"/save {saved}", "/exit", "never said"]
    out, _ = talk(lines, chat_model, "--max-new-tokens", 2)
    assert json.loads(saved.read_text()) == [{"role": "system", "content": "Be rude."}]
    assert "there is no command /nonsense" in out and "/reset" in out and "name of a file is missing" in out
    talk(["Hi", "/reset", f"/save {saved}"], chat_model, "--system", "S", "--max-new-tokens", 2)
    assert json.loads(saved.read_text()) == [{"role": "system", "content": "S"}]


def test_a_model_without_a_template_continues_text(talk, chat_model, tmp_path, capsys):
    directory = tmp_path / "plain"
    shutil.copytree(chat_model, directory)
    (directory / "chat_template.jinja").unlink()
    saved = tmp_path / "chat.json"
    _, error = talk(["Once upon", "a time", f"/save {saved}"], directory, "--max-new-tokens", 4)
    assert "has no chat template: what you type is continued as text" in error
    first, answered, second, last = (message["content"] for message in json.loads(saved.read_text()))
    tokenizer = FileTokenizer(directory / "tokenizer.json", 256)
    assert (first, second) == ("Once upon", "a time")
    tokens = tokenizer.encode(first).tolist()
    for expected in (answered, last):
        new, text = answer(directory, tokens, 4)
        assert expected == text
        tokens = [*tokens, *new, *tokenizer.encode(second).tolist()]
    with pytest.raises(SystemExit):
        talk([], directory, "--system", "S")
    assert "needs a chat template" in capsys.readouterr().err


def test_messages_that_a_template_refuses_are_dropped(talk, chat_model, tmp_path):
    directory = tmp_path / "picky"
    shutil.copytree(chat_model, directory)
    refuse = "{% if 'bad' in messages[-1].content %}{{ raise_exception('not that word') }}{% endif %}"
    (directory / "chat_template.jinja").write_text(refuse + TEMPLATE)
    saved = tmp_path / "chat.json"
    _, error = talk(["bad", "good", f"/save {saved}"], directory, "--max-new-tokens", 2)
    assert "not that word" in error
    assert [m["content"] for m in json.loads(saved.read_text())][::2] == ["good"]


def test_chat_of_an_adapter_and_of_bad_options(talk, refused, chat_model, tmp_path):
    model = zoo.adapters.lora(zoo.load(chat_model), targets="all-linear", key=jax.random.key(1))
    model = jax.tree.map(lambda x: x + 0.2, model)
    zoo.adapters.save(model, tmp_path / "adapter", base=chat_model)
    merged = zoo.adapters.merge(zoo.adapters.load(zoo.load(chat_model), tmp_path / "adapter"))
    zoo.save(merged, tmp_path / "merged")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(chat_model / name, tmp_path / "merged" / name)
    expected, _ = talk(["Hi"], tmp_path / "merged", "--max-new-tokens", 4)
    assert talk(["Hi"], chat_model, "--adapter", tmp_path / "adapter", "--max-new-tokens", 4)[0] == expected
    assert talk(["Hi"], chat_model, "--max-new-tokens", 4)[0] != expected
    assert "NAME=VALUE" in refused("chat", chat_model, "--variable", "thinking", "--no-compile-cache")


@pytest.mark.ci
def test_interrupt_stops_an_answer_and_not_the_program(chat_model, tmp_path):
    """In a terminal: Ctrl-C during an answer of thousands of words, then a command."""
    (ours, theirs), saved = pty.openpty(), tmp_path / "chat.json"
    directory = tmp_path / "endless"
    shutil.copytree(chat_model, directory)
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>"}))
    command = [sys.executable, "-m", "zoo.cli", "chat", str(directory), "--max-new-tokens", "4000"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.STDOUT, start_new_session=True)
    os.close(theirs)

    def read_until(mark):
        text = b""
        while mark not in text:
            text += os.read(ours, 4096)
        return text

    read_until(b">>> ")
    os.write(ours, b"Hi\n")
    assert len(read_until(b"\n")) < 4096
    os.read(ours, 1)  # the answer has begun
    process.send_signal(2)
    read_until(b">>> ")
    os.write(ours, f"/save {saved}\n".encode())
    read_until(b">>> ")
    os.write(ours, b"\x04")
    assert process.wait(timeout=60) == 0
    question, answered = json.loads(saved.read_text())
    assert question["content"] == "Hi" and 0 < len(answered["content"]) < 4000
