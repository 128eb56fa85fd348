"""Flags of records: weights of sources, and the template of a checkpoint, a file, or a plain one."""

import json

import pytest

from zoo import train
from zoo.text.chat.template import PLAIN_TEMPLATE
from zoo.text.tokenizers import ByteTokenizer


def write_texts(path, word):
    path.write_text("".join(json.dumps({"text": f"{word} {number}"}) + "\n" for number in range(60)))
    return str(path)


def test_sources_with_weights_are_mixed(tmp_path):
    options = {"tokenizer": ByteTokenizer(), "template": None, "seq_len": 32, "cache": tmp_path / "cache"}
    first, second = write_texts(tmp_path / "a.jsonl", "up"), write_texts(tmp_path / "b=1.jsonl", "down")
    mixed = train.RecordOptions().load((f"{first}=0.75", f"{second}=0.25"), **options)
    assert list(mixed.parts) == [first, second]
    assert mixed.train.rows.count_rows(400, batch_size=1)[second] == pytest.approx(100, abs=2)
    both = train.RecordOptions().load((first, second), **options)
    assert both.counts["records"] == 120 and not both.parts
    with pytest.raises(ValueError, match=r"give each source a weight, PATH=WEIGHT, or none"):
        train.RecordOptions().load((f"{first}=0.75", second), **options)


def test_records_in_memory_are_loaded(tmp_path):
    options = {"tokenizer": ByteTokenizer(), "template": None, "seq_len": 32, "cache": tmp_path / "cache"}
    data = train.RecordOptions().load([{"text": "a"}] * 30, **options)
    assert data.counts["records"] == 30 and data.kind == "text"


def test_template_of_a_file_or_a_checkpoint_or_a_plain_one(tmp_path, capsys):
    tokenizer = ByteTokenizer()
    plain = train.RecordOptions().read_template(tmp_path, tokenizer)
    assert plain.source == PLAIN_TEMPLATE and plain.special_tokens == {"bos_token": "\0", "eos_token": "\0"}
    assert f"{tmp_path} has no chat template: it gets a plain one" in capsys.readouterr().out
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert train.RecordOptions().read_template(tmp_path, tokenizer).source == "{{ messages }}"
    (tmp_path / "other.jinja").write_text("{{ tools }}")
    options = train.RecordOptions(chat_template=tmp_path / "other.jinja")
    assert options.read_template(tmp_path, tokenizer).source == "{{ tools }}"
    assert capsys.readouterr().out == ""


def test_template_file_has_special_tokens_of_its_checkpoint(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.jinja").write_text("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    (elsewhere / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<other>", "eos_token": "<other>"}))
    options = train.RecordOptions(chat_template=elsewhere / "mine.jinja")
    messages = [{"role": "user", "content": "a"}]
    unnamed = options.read_template(tmp_path, ByteTokenizer())  # as ByteTokenizer.save names them in an export
    assert unnamed.render(messages).text == "\0a\0"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": None, "eos_token": "</s>"}))
    assert options.read_template(tmp_path, ByteTokenizer()).render(messages).text == "a</s>"
    plain = train.RecordOptions().read_template(tmp_path, ByteTokenizer())
    assert plain.special_tokens == {"eos_token": "</s>"}


def test_flags_of_records_are_flat_in_a_configuration():
    flat = train.options.flatten_config({"records": train.RecordOptions(train_on="last"), "steps": 3})
    assert flat["train_on"] == "last" and flat["steps"] == 3 and "records" not in flat
