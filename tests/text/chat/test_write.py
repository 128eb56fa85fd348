"""Chat templates in checkpoint directories, and the tokens at which generation stops."""

import json
import shutil
from pathlib import Path

import pytest

from zoo.text import ChatTemplate, read_chat_template
from zoo.text.chat.errors import ChatError
from zoo.text.chat.special_tokens import encode_rendered
from zoo.text.chat.template import PLAIN_TEMPLATE
from zoo.text.chat.write import write_chat_files
from zoo.text.tokenizers import FileTokenizer

FIXTURES = Path(__file__).parents[2] / "fixtures/chat"
TOKENIZER = FileTokenizer(FIXTURES / "tokenizer.json", 320)
END = TOKENIZER.special_tokens["<|im_end|>"]
CHATML = read_chat_template(FIXTURES / "chatml.jinja")


@pytest.mark.parametrize(
    ("config", "model_config", "stops"),
    [
        (None, None, END),
        (None, {"eos_token_id": 1}, [1, END]),
        ({"temperature": 0.5}, {"eos_token_id": [1, 7]}, [1, 7, END]),
        ({"eos_token_id": 1}, {"eos_token_id": 9}, [1, END]),
        ({"eos_token_id": [7, END, 7]}, None, [7, END]),
        ({"eos_token_id": END}, None, END),
        ({"eos_token_id": None}, {"eos_token_id": 9}, END),
    ],
)
def test_the_end_of_a_turn_stops_generation(tmp_path, config, model_config, stops):
    for name, content in (("generation_config.json", config), ("config.json", model_config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    for _ in range(2):  # a second time changes nothing
        write_chat_files(tmp_path, CHATML, TOKENIZER)
        written = json.loads((tmp_path / "generation_config.json").read_text())
        assert written == {**(config or {}), "eos_token_id": stops}
    if model_config is not None:
        assert json.loads((tmp_path / "config.json").read_text()) == model_config


def test_a_template_is_written_byte_for_byte(tmp_path):
    source = "{{ messages[0].content }}é\r\n\n  "
    write_chat_files(tmp_path, ChatTemplate(source), TOKENIZER)
    assert (tmp_path / "chat_template.jinja").read_bytes() == source.encode()
    assert read_chat_template(tmp_path).source == source
    assert not (tmp_path / "generation_config.json").exists()  # no special token ends a turn


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "generation_config.json is damaged"),
        ("[]", "generation_config.json is not a JSON object"),
        ('{"eos_token_id": "</s>"}', "eos_token_id = '</s>', expected an integer or a list of integers"),
        ('{"eos_token_id": [true]}', "an integer or a list of integers"),
    ],
)
def test_a_damaged_file_is_named_and_nothing_written(tmp_path, content, said):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ChatError, match=said.replace("[", r"\[")):
        write_chat_files(tmp_path, CHATML, TOKENIZER)
    assert (tmp_path / "generation_config.json").read_text() == content
    assert not (tmp_path / "chat_template.jinja").exists()


@pytest.mark.slow
@pytest.mark.neighbors("transformers")
def test_transformers_renders_a_written_directory(tmp_path):
    import transformers

    stored = json.loads((FIXTURES / "cases.json").read_text())
    for name in sorted({case["template"] for case in stored["cases"]}):
        directory = tmp_path / name
        directory.mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(FIXTURES / file, directory / file)
        source = PLAIN_TEMPLATE if name == "plain" else (FIXTURES / f"{name}.jinja").read_text()
        write_chat_files(directory, ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}), TOKENIZER)
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
        ours = read_chat_template(directory)
        for case in stored["cases"]:
            if case["template"] == name and "raises" not in case:
                messages = stored["chats"][case["chat"]]
                text = ours.render(messages, **case["options"]).text
                assert theirs.apply_chat_template(messages, tokenize=False, **case["options"]) == text
                ids = theirs.apply_chat_template(messages, return_dict=True, **case["options"])["input_ids"]
                assert ids == encode_rendered(text, TOKENIZER).tolist()
        stops = transformers.GenerationConfig.from_pretrained(directory).eos_token_id
        assert ids[-1] == stops or stops in ids
