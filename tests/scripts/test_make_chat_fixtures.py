"""The committed cases of chat templates are those of the script, which makes them again with transformers."""

import json

import pytest

from scripts import make_chat_fixtures


def test_cases_are_complete_and_small():
    stored = json.loads((make_chat_fixtures.FOLDER / "cases.json").read_text())
    made = {(case["template"], case["chat"]) for case in stored["cases"]}
    assert stored["chats"] == make_chat_fixtures.CHATS
    assert made == {(name, chat) for name in make_chat_fixtures.read_templates() for chat in stored["chats"]}
    assert sum(path.stat().st_size for path in make_chat_fixtures.FOLDER.iterdir()) < 60_000


def test_cases_without_transformers_raise(monkeypatch, tmp_path):
    monkeypatch.setattr(make_chat_fixtures, "transformers", None)
    with pytest.raises(SystemExit, match="pip install transformers"):
        make_chat_fixtures.main(out=tmp_path)


@pytest.mark.neighbors("transformers")
def test_cases_are_reproduced(tmp_path):
    make_chat_fixtures.main(out=tmp_path)
    made, committed = (
        json.loads((folder / "cases.json").read_text()) for folder in (tmp_path, make_chat_fixtures.FOLDER)
    )
    if made["versions"] != committed["versions"]:
        pytest.skip(f"made with {committed['versions']}, here is {made['versions']}")
    assert made == committed
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (make_chat_fixtures.FOLDER / name).read_text()
