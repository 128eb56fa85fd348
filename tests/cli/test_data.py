"""`zoo data` shows what is trained on, and finds damaged tokens."""

import json
import sys

import jax
import pytest

import zoo
from zoo import train
from zoo.cli import main


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model of bytes without a chat template, and a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes = {"vocab": 256, "embed": 16, "layers": 1, "heads": 2, "mlp": 16}
    made = zoo.models.Transformer(**sizes, key=jax.random.key(0))
    texts = {str(number): "a text " * 9 for number in range(30)}
    return train.export(made, train.load_text(texts), tmp_path / "model", seq_len=16)


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    with path.open("w") as file:
        for number in range(40):
            question = {"role": "user", "content": f"{number} + \x1b1?"}
            file.write(json.dumps({"messages": [question, {"role": "assistant", "content": f"{number + 1}."}]}) + "\n")
    return path


def test_trained_tokens_are_marked(model, chats, capsys):
    main(["data", "show", str(chats), "--checkpoint", str(model), "--texts", "2"])
    shown = capsys.readouterr().out
    assert "has no chat template: it gets a plain one" in shown and "40 chat records" in shown
    assert "0 + \\x1b1?" in shown and "\x1b" not in shown
    assert "Assistant:\n⟦1.\\x00⟧" in shown and "⟦2.\\x00⟧" in shown and "⟦3." not in shown


def test_trained_tokens_are_colored_in_a_terminal(model, chats, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    main(["data", "show", str(chats), "--checkpoint", str(model), "--texts", "1"])
    shown = capsys.readouterr().out
    assert "\x1b[1;32m1.\\x00\x1b[0m" in shown and "⟦" not in shown


def test_faults_are_named_and_arguments_asked_for(model, chats, tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(chats.read_text() + '{"messages": 3}\n')
    for words, said in [
        ([str(bad), "--checkpoint", str(model)], f"{bad}:41: `messages` is a number, expected a list: 3"),
        ([str(chats)], "zoo data show takes records and a model"),
        (["--checkpoint", str(model)], "zoo data show takes records and a model"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            main(["data", "show", *words])
        assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_verify_finds_a_damaged_cache(model, chats, tmp_path, capsys):
    main(["data", "show", str(chats), "--checkpoint", str(model)])
    capsys.readouterr()
    main(["data", "verify"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(line.startswith("ok       ") for line in lines), "texts and records"
    (tokens,) = (tmp_path / "cache").glob("equizoo/records/*/tokens.bin")
    content = bytearray(tokens.read_bytes())
    content[7] ^= 1
    tokens.write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        main(["data", "verify"])
    assert stopped.value.code == 1
    assert f"damaged  {tokens.parent}: the digest of tokens.bin" in capsys.readouterr().out
    main(["data", "verify", *map(str, (tmp_path / "cache").glob("equizoo/text/*/"))])


def test_verify_without_a_cache(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    main(["data", "verify"])
    assert "no cached tokens in" in capsys.readouterr().out
