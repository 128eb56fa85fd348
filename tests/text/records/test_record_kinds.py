"""Records of each kind become tokens, and a fault in one says what was expected and what came."""

import dataclasses
import json

import numpy as np
import pytest

from zoo.text import ChatTemplate
from zoo.text.chat.template import PLAIN_TEMPLATE
from zoo.text.records.record_file import RecordError
from zoo.text.records.record_kinds import KINDS, Encoding, find_kind
from zoo.text.tokenizers import ByteTokenizer

TEMPLATE = ChatTemplate(PLAIN_TEMPLATE, {"eos_token": "\0"})
ENCODING = Encoding(ByteTokenizer(), TEMPLATE, "text", "all", {})
USER = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}
WRONG = {"role": "assistant", "content": "5"}
RECORDS = {
    "text": {"text": "é a"},
    "chat": {"messages": [USER, ANSWER]},
    "completion": {"prompt": "2 + 2 =", "completion": " 4"},
    "preference": {"prompt": [USER], "chosen": [ANSWER], "rejected": [WRONG]},
    "labeled": {"prompt": "2 + 2 =", "completion": " 4", "label": True},
    "prompts": {"prompt": [USER], "answer": 4},
    "pair": {"source": "zwei", "target": "two"},
}


def encode(record, kind=None, encoding=ENCODING):
    """Return the items of a record, or raise its fault."""
    kind = find_kind(record) if kind is None else KINDS[kind]
    (items,) = kind.encode_all([record], encoding)
    if isinstance(items, RecordError):
        raise items
    return items


def read_trained(text):
    """Return the trained tokens as bytes."""
    return text.tokens[text.mask].astype(np.uint8).tobytes()


@pytest.mark.parametrize("name", RECORDS)
def test_kind_of_a_record_is_found(name):
    assert find_kind(RECORDS[name]).name == name
    assert set(RECORDS) == set(KINDS)


@pytest.mark.parametrize(
    ("name", "trained", "labels"),
    [
        ("text", ["é a".encode()], [0.0]),
        ("chat", [b"4\0"], [0.0]),
        ("completion", [b" 4\0"], [0.0]),
        ("preference", [b"4\0", b"5\0"], [0.0]),
        ("labeled", [b" 4\0"], [1.0]),
        ("prompts", [b""], [0.0]),
    ],
)
def test_tokens_that_are_trained_on(name, trained, labels):
    items = encode(RECORDS[name])
    assert [read_trained(text) for item in items for text in item.texts] == trained
    assert [item.label for item in items] == labels
    assert all(len(item.texts) == KINDS[name].texts_per_item for item in items)


def test_strings_begin_with_the_separator_and_end_with_the_end():
    ((text,), *_) = encode(RECORDS["completion"])[0]
    assert text.tokens.astype(np.uint8).tobytes() == b"\0002 + 2 = 4\0"
    ((text,), *_) = encode(RECORDS["text"])[0]
    assert text.tokens.astype(np.uint8).tobytes() == "\0é a".encode()


def test_a_prompt_ends_where_the_answer_begins():
    (item,) = encode(RECORDS["prompts"])
    whole = TEMPLATE.render([USER, ANSWER]).text
    prompt = item.texts[0].tokens.astype(np.uint8).tobytes().decode()
    assert whole.startswith(prompt) and whole[len(prompt) :].startswith("4")
    assert item.fields == {"answer": 4}
    (item,) = encode({"prompt": "2 + 2 ="})
    assert item.texts[0].tokens.tolist() == [0, *b"2 + 2 ="] and item.fields == {}


def test_messages_of_a_prompt_are_not_trained_on():
    asked = [USER, ANSWER, {"role": "user", "content": "And 3 + 3?"}]
    (item,) = encode({"prompt": asked, "completion": [{"role": "assistant", "content": "6"}]})
    assert read_trained(item.texts[0]) == b"6\0"


def test_a_pair_with_a_common_beginning_needs_no_prompt():
    messages = {"chosen": [USER, ANSWER], "rejected": [USER, WRONG]}
    (item,) = encode(messages)
    (same,) = encode(RECORDS["preference"])
    for text, other in zip(item.texts, same.texts, strict=True):
        np.testing.assert_array_equal(text.tokens, other.tokens)
        np.testing.assert_array_equal(text.mask, other.mask)
    for prompt in (None, "2 + 2?"):  # a column of nulls, and UltraFeedback's form
        record = {"prompt": prompt, **messages}
        (item,) = encode(record)
        for text, other in zip(item.texts, same.texts, strict=True):
            np.testing.assert_array_equal(text.tokens, other.tokens)
            np.testing.assert_array_equal(text.mask, other.mask)
        assert find_kind(record).find_key(record, ENCODING) == "2 + 2?"
    (item,) = encode({"chosen": "Q: a? A: yes", "rejected": "Q: a? A: no", "prompt": None})
    assert [read_trained(text) for text in item.texts] == [b"yes\0", b"no\0"]


def test_tools_are_rendered_with_and_without_a_prompt():
    template = ChatTemplate("{{ tools }}" + PLAIN_TEMPLATE, {"eos_token": "\0"})
    encoding = dataclasses.replace(ENCODING, template=template)
    tools = [{"name": "add", "default": None}]
    texts = []
    for record in (RECORDS["preference"], {"chosen": [USER, ANSWER], "rejected": [USER, WRONG]}):
        for given in (tools, json.dumps(tools)):  # tables hold them as JSON text
            (item,) = encode({**record, "tools": given}, encoding=encoding)
            texts.append([text.tokens.tobytes() for text in item.texts])
            assert b"'add'" in item.texts[0].tokens.astype(np.uint8).tobytes()
    assert texts[0] == texts[1] == texts[2] == texts[3]


def test_last_answers_are_texts_of_their_own():
    chat = {"messages": [USER, ANSWER, USER, WRONG]}
    encoding = dataclasses.replace(ENCODING, train_on="last")
    assert [read_trained(item.texts[0]) for item in encode(chat, encoding=encoding)] == [b"4\0", b"5\0"]
    (item,) = encode(chat)
    assert read_trained(item.texts[0]) == b"4\x005\0"


def test_equal_questions_have_equal_keys():
    questions = [
        RECORDS["chat"],
        {"messages": [{"role": "system", "content": "Count."}, USER, WRONG]},
        RECORDS["preference"],
        RECORDS["prompts"],
        {"chosen": [USER, ANSWER], "rejected": [USER, WRONG]},
    ]
    assert {find_kind(record).find_key(record, ENCODING) for record in questions} == {"2 + 2?"}
    answers = {"chosen": "Q: a? A: yes", "rejected": "Q: a? A: no"}
    asked = {"prompt": "Q: a? A: ", "chosen": "yes", "rejected": "no"}
    assert {KINDS["preference"].find_key(record, ENCODING) for record in (answers, asked)} == {"Q: a? A: "}
    named = dataclasses.replace(ENCODING, text_field="body")
    assert KINDS["text"].find_key({"id": "7", "body": "a"}, named) == "a"


@pytest.mark.parametrize(
    ("record", "kind", "said"),
    [
        ({"body": "a"}, None, "the fields `body`, which are of no kind. Kinds are text: `text`"),
        ({"conversations": []}, None, "ShareGPT"),
        ({"instruction": "a", "output": "b"}, None, "write a `prompt` and a `completion`"),
        ({"text": 3}, "text", "`text` is a number, expected text: 3"),
        ({"text": ""}, "text", "nothing of it is trained on"),
        ({"txt": "a"}, "text", "`text` is missing: a record of the kind text has `text`, or the field"),
        ({"text": "\ud800"}, "text", "`text` is not Unicode"),
        ({"text": "a\0b"}, "text", "spells the separator, token 0, which the tokenizer has no text for"),
        ({"messages": "a"}, "chat", "`messages` is text, expected a list: a"),
        ({"messages": []}, "chat", "`messages` is empty"),
        ({"messages": ["a"]}, "chat", "`messages`[0] is text: expected a message with `role` and `content`"),
        (
            {"messages": [{"role": "human", "content": "a"}]},
            "chat",
            "the role human: expected one of system, developer",
        ),
        ({"messages": [USER, {"role": "assistant"}]}, "chat", "`messages`[1] has null as `content`: expected text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "chat", "list of parts"),
        ({"messages": [USER]}, "chat", "has none"),
        ({"messages": [{"role": "user", "content": "a\0b"}, ANSWER]}, "chat", "which this tokenizer can only write"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": "add"}]},
            "chat",
            "`messages`[1] has add as `tool_calls`: expected a list of objects",
        ),
        ({"messages": [USER, ANSWER | {"tool_calls": ["add"]}]}, "chat", '["add"] as `tool_calls`'),
        ({"messages": [USER, ANSWER], "tools": "f"}, "chat", "`tools` is text, expected a list"),
        ({"messages": [USER, ANSWER], "tools": '{"name": "f"}'}, "chat", "expected a list, or its JSON: {"),
        ({"prompt": "a", "completion": ""}, "completion", "`completion` is empty"),
        ({"prompt": "a", "completion": [ANSWER]}, "completion", "`completion` is a list, expected text"),
        ({"prompt": [USER], "completion": "a"}, "completion", "`completion` is text, expected a list"),
        (
            {"prompt": "a", "completion": "b", "label": "c"},
            "labeled",
            "`label` is text, expected true or false or a number",
        ),
        (
            {"prompt": "a", "completion": "b", "label": 1e39},
            "labeled",
            "`label` is 1e+39: expected a number of float32",
        ),
        ({"prompt": "a", "completion": "b", "label": -(10**400)}, "labeled", "expected a number of float32"),
        ({"prompt": "a", "completion": "b", "label": float("nan")}, "labeled", "`label` is NaN: expected a number"),
        ({"chosen": "ab", "rejected": "ab"}, "preference", "are equal"),
        ({"chosen": "b", "rejected": "c"}, "preference", "no common beginning"),
        (
            {"prompt": "?", "chosen": [ANSWER], "rejected": [WRONG]},
            "preference",
            "and `prompt` is text, where they are",
        ),
        ({"chosen": "ab", "rejected": "a"}, "preference", "`rejected` is empty"),
        ({"prompt": "a\0"}, "prompts", "spells the separator"),
        ({"prompt": 3}, "prompts", "`prompt` is a number, expected text or a list: 3"),
    ],
)
def test_faults_say_what_came(record, kind, said):
    with pytest.raises(RecordError) as raised:
        encode(record, kind)
    assert said in str(raised.value)


def test_messages_need_a_template():
    bare = dataclasses.replace(ENCODING, template=None)
    for name in ("chat", "preference", "prompts"):
        with pytest.raises(RecordError, match="messages need a chat template"):
            encode(RECORDS[name], encoding=bare)
    assert len(encode(RECORDS["completion"], encoding=bare)) == 1


def test_ids_beyond_the_vocabulary_are_a_fault():
    small = ByteTokenizer()
    small.vocab = 100
    with pytest.raises(RecordError, match="the token 122, and the model has a vocabulary of 100"):
        encode({"text": "z"}, encoding=dataclasses.replace(ENCODING, tokenizer=small))


def test_faults_leave_the_other_records():
    records = [{"text": "a"}, {"text": None}, {"text": "b"}]
    first, fault, last = KINDS["text"].encode_all(records, ENCODING)
    assert isinstance(fault, RecordError)
    assert [items[0].texts[0].tokens.tolist() for items in (first, last)] == [[0, 97], [0, 98]]
