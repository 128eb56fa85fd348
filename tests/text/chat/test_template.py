"""Chat templates render what transformers renders."""

import datetime
import json
import pickle
from pathlib import Path

import pytest

from zoo.text import ChatTemplate, read_chat_template
from zoo.text.chat.errors import ChatError, NoChatTemplateError
from zoo.text.chat.template import PLAIN_TEMPLATE, read_special_tokens

CASES = Path(__file__).parents[2] / "fixtures/chat"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b>é</b>"},
    {"role": "assistant", "content": "Hello!"},
]


def write(directory, files):
    directory.mkdir(exist_ok=True)
    for name, content in files.items():
        (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def test_chatml_and_the_spans_of_the_assistant():
    text, spans = ChatTemplate(CHATML).render(TURNS)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b>é</b><|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n"
    )
    assert [text[start:stop] for start, stop in spans] == ["Hello!<|im_end|>"]
    assert ChatTemplate(CHATML).marks_generation and not ChatTemplate("{{ messages }}").marks_generation
    prompt = ChatTemplate(CHATML).render(TURNS[:2], add_generation_prompt=True).text
    assert text.startswith(prompt) and prompt.endswith("<|im_start|>assistant\n")


def test_templates_render_as_transformers_does():
    stored = json.loads((CASES / "cases.json").read_text())
    for case in stored["cases"]:
        if case["template"] == "plain":
            template = ChatTemplate(PLAIN_TEMPLATE, read_special_tokens(CASES))
        else:
            template = read_chat_template(CASES / f"{case['template']}.jinja")
        messages = stored["chats"][case["chat"]]
        if "raises" in case:
            with pytest.raises(ChatError, match=case["raises"]):
                template.render(messages, **case["options"])
        else:
            assert template.render(messages, **case["options"]).text == case["text"], case


@pytest.mark.parametrize(
    ("source", "options", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content | tojson }}", {}, '<s>"é<>"'),
        ("{% for m in messages %}\n  {% if m.name is defined %}{{ m.name }}{% endif %}\n{% endfor %}", {}, ""),
        ("{% if enable_thinking %}think{% endif %}{{ tools }}", {"enable_thinking": True}, "thinkNone"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", {}, "01"),
        ("{{ strftime_now('%Y') }}", {}, str(datetime.date.today().year)),
        ("{{ tools | tojson(indent=1) }}", {"tools": [{"name": "f"}]}, '[\n {\n  "name": "f"\n }\n]'),
    ],
)
def test_what_templates_of_checkpoints_use(source, options, expected):
    messages = [{"role": "user", "content": "é<>", "name": None}]
    text = ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options).text
    assert text.strip() == expected


def test_a_final_message_is_continued():
    template = ChatTemplate(CHATML)
    assert template.render(TURNS, continue_final_message=True).text.endswith("assistant\nHello!")
    stripping = ChatTemplate("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    final = [{"role": "assistant", "content": "Hello! "}]
    assert stripping.render(final, continue_final_message=True).text == "[Hello!"
    with pytest.raises(ChatError, match="drops the text"):
        ChatTemplate("nothing").render(final, continue_final_message=True)


def test_reasoning_has_the_name_that_the_template_asks_for():
    for name in ("reasoning_content", "thinking", "reasoning"):
        message = {"role": "assistant", "content": "4", name: "2 + 2"}
        for asked in ("reasoning_content", "thinking"):
            assert ChatTemplate(f"{{{{ messages[0].{asked} }}}}").render([message]).text == "2 + 2"


def test_errors_of_templates_are_one_kind():
    with pytest.raises(ChatError, match="is not a Jinja template"):
        ChatTemplate("{% for %}")
    for source, said in [
        ("{{ raise_exception('roles alternate') }}", "roles alternate"),
        ("{{ messages[0].content.missing.name }}", "missing"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ]:
        with pytest.raises(ChatError, match=said):
            ChatTemplate(source, name="m/chat_template.jinja").render(TURNS)


def test_read_finds_the_template_of_a_directory(tmp_path):
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, "add_bos_token": True}
    directory = write(tmp_path / "a", {"tokenizer_config.json": config | {"chat_template": "inline {{ bos_token }}"}})
    assert ChatTemplate.read(directory).render([]).text == "inline <s>"
    write(directory, {"chat_template.jinja": "file {{ eos_token }}"})
    assert ChatTemplate.read(directory).render([]).text == "file </s>"
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    processor = {"chat_template.json": {"chat_template": "of a processor {{ bos_token }}"}}
    assert ChatTemplate.read(write(tmp_path / "f", processor | {"tokenizer_config.json": config})).render([]).text == (
        "of a processor <s>"
    )
    directory = write(tmp_path / "b", processor | {"tokenizer_config.json": {"chat_template": named}})
    assert ChatTemplate.read(directory).source == "one" and ChatTemplate.read(directory, "tool_use").source == "two"
    with pytest.raises(ChatError, match="default, tool_use, and not 'rag'"):
        ChatTemplate.read(directory, "rag")
    older = write(tmp_path / "c", {"special_tokens_map.json": {"bos_token": "<b>"}, "chat_template.jinja": "x"})
    assert ChatTemplate.read(older).special_tokens == {"bos_token": "<b>"}
    with pytest.raises(NoChatTemplateError, match="has no chat template"):
        ChatTemplate.read(write(tmp_path / "d", {}))
    with pytest.raises(ChatError, match="cannot be read"):
        ChatTemplate.read(write(tmp_path / "e", {"tokenizer_config.json": "{"}))


def test_a_template_is_sent_to_other_processes():
    template = ChatTemplate(CHATML + "{{ bos_token }}", {"bos_token": "<s>"}, name="m/chat_template.jinja")
    again = pickle.loads(pickle.dumps(template))
    assert again.render(TURNS) == template.render(TURNS) and again.name == template.name


def test_noncharacters_of_messages_are_text():
    noncharacters = "\ufdd0a\ufdd1\ufdd2\ufdd3\ufdd3"
    turns = [{"role": "user", "content": noncharacters}, {"role": "assistant", "content": noncharacters}]
    text, ((start, stop),) = ChatTemplate(CHATML).render(turns)
    assert text[start:stop] == noncharacters + "<|im_end|>" and text.count(noncharacters) == 2
    continued = ChatTemplate(CHATML).render(turns, continue_final_message=True).text
    assert continued == text[: -len("<|im_end|>\n")]
    shown = ChatTemplate("{{ tools[0].a }}{{ documents[0] }}").render([], tools=[{"a": "\ufdd0"}], documents=["\ufdd1"])
    assert shown.text == "\ufdd0\ufdd1" and not shown.spans


def test_variables_replace_what_the_template_has_by_default():
    template = ChatTemplate("{{ bos_token }}{{ documents }}", {"bos_token": "<s>"})
    assert template.render([], bos_token="<t>", documents=[1]).text == "<t>[1]"


def test_read_chat_template_takes_a_file_or_a_directory(tmp_path):
    directory = write(tmp_path, {"chat_template.jinja": "{{ bos_token }}", "other.jinja": "{{ eos_token }}!\n"})
    write(directory, {"tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>"}})
    assert read_chat_template(directory).render([]).text == "<s>"
    assert read_chat_template(directory / "other.jinja").render([]).text == "</s>!"
    assert read_chat_template(directory / "other.jinja").source == "{{ eos_token }}!\n"
    alone = write(tmp_path / "b", {"t.jinja": "{{ eos_token }}"})
    with pytest.raises(ChatError, match=r"t.jinja writes eos_token, which a tokenizer names, .* read_special_tokens"):
        read_chat_template(str(alone / "t.jinja"))
    special = read_special_tokens(directory)
    for path in (alone / "t.jinja", write(tmp_path / "d", {"chat_template.jinja": "{{ eos_token }}"})):
        assert read_chat_template(path, special).render([]).text == "</s>"
    with pytest.raises(FileNotFoundError, match=r"none.jinja does not exist: expected a checkpoint"):
        read_chat_template(tmp_path / "none.jinja")
    with pytest.raises(ChatError, match=r"tokenizer_config.json is not a chat template: .* a .jinja file"):
        read_chat_template(tmp_path / "tokenizer_config.json")
    (alone / "t.jinja").write_bytes(b"\xff")
    with pytest.raises(ChatError, match="its bytes are not UTF-8"):
        read_chat_template(alone / "t.jinja")
    with pytest.raises(NoChatTemplateError):
        read_chat_template(write(tmp_path / "c", {}))


def test_plain_template_is_read_as_text():
    call = {"function": {"name": "add", "arguments": {"x": 1}}}
    messages = [
        *TURNS,
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    template = ChatTemplate(PLAIN_TEMPLATE, {"eos_token": "</s>"})
    text, spans = template.render(messages, tools=[{"name": "add"}], add_generation_prompt=True)
    assert text == (
        'Tool: {"name": "add"}\n\nSystem:\nBe brief.\n\nUser:\nHi <b>é</b>\n\nAssistant:\nHello!</s>\n\n'
        'User:\n1 + 1?\n\nAssistant:\nCall: {"name": "add", "arguments": {"x": 1}}</s>\n\nTool:\n2\n\nAssistant:\n'
    )
    assert [text[start:stop] for start, stop in spans] == [
        "Hello!</s>",
        'Call: {"name": "add", "arguments": {"x": 1}}</s>',
    ]
    begun = ChatTemplate(PLAIN_TEMPLATE, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages[:1])
    assert begun.text == "<s>System:\nBe brief.\n\n"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "narrator", "content": "a"}, "a role is system, user, assistant or tool, not narrator"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}]}, "is expected as one text"),
        ({"role": "user"}, "a message of the role user has no content"),
        ({"role": "assistant", "content": "a", "reasoning": "b"}, "has no place for reasoning"),
        ({"role": "assistant", "content": "a"}, "an answer ends with eos_token"),
    ],
)
def test_plain_template_refuses(message, said):
    with pytest.raises(ChatError, match=said):
        ChatTemplate(PLAIN_TEMPLATE).render([message])
