"""Spans of what the assistant wrote, by marks and turn by turn."""

import pytest

from zoo.text import ChatTemplate
from zoo.text.chat.errors import ChatError
from zoo.text.chat.spans import find_end, mark_all_turns, mark_last_turn

SPECIAL = ("<e>", "<h>")
TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "two"},
]
HEADS = (
    "{% for m in messages %}<h>{{ m.role }}:{{ OPEN }}{{ m.content }}<e>{{ CLOSE }} {% endfor %}"
    "{% if add_generation_prompt %}<h>assistant:{% endif %}"
)
BY_TURNS = ChatTemplate(HEADS.replace("{{ OPEN }}", "").replace("{{ CLOSE }}", ""), name="heads")


def cut(chat):
    """Texts of the spans."""
    return [chat.text[start:stop] for start, stop in chat.spans]


def test_a_turn_ends_with_its_last_special_token():
    assert cut(mark_all_turns(BY_TURNS, TURNS, SPECIAL)) == ["one<e>", "two<e>"]
    assert cut(mark_all_turns(BY_TURNS, TURNS, SPECIAL, first=2)) == ["two<e>"]
    assert cut(mark_last_turn(BY_TURNS, TURNS[:2], SPECIAL)) == ["one<e>"]
    assert cut(mark_all_turns(BY_TURNS, TURNS, ())) == ["one<e> ", "two<e> "]
    assert cut(mark_all_turns(BY_TURNS, TURNS[:1], SPECIAL)) == []


@pytest.mark.parametrize(
    ("turn", "written"),
    [
        ("a<e>", "a<e>"),
        ("a<e>\n", "a<e>"),
        ("<h>a", "<h>a"),
        ("a<e><h> ", "a<e><h>"),
        ("a<e>b<e>\n", "a<e>b<e>"),
        ("", ""),
    ],
)
def test_the_end_of_a_turn(turn, written):
    assert turn[: find_end(turn, SPECIAL)] == written


def test_a_prompt_within_the_marks_is_not_trained_on():
    """Marks around the whole turn, as templates have them that think before they answer."""
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
        "{% generation %}<h>{{ m.content }}<e>{% endgeneration %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<h>{% endif %}"
    )
    template = ChatTemplate(source)
    assert cut(mark_all_turns(template, TURNS, SPECIAL)) == ["<h>one<e>", "<h>two<e>"]
    assert cut(mark_all_turns(template, TURNS, SPECIAL, first=1)) == ["one<e>", "<h>two<e>"]
    assert cut(mark_last_turn(template, TURNS, SPECIAL)) == ["two<e>"]


def test_templates_that_change_earlier_turns():
    last_only = "{% for m in messages %}{{ m.content if loop.last else m.content[:1] }};{% endfor %}"
    template = ChatTemplate(last_only, name="shortening")
    with pytest.raises(ChatError, match=r"shortening has no {% generation %} marks, .*--chat-template FILE.* last\)"):
        mark_all_turns(template, TURNS, SPECIAL)
    assert cut(mark_all_turns(template, TURNS, SPECIAL, first=3)) == ["two;"]
    assert cut(mark_last_turn(template, TURNS, SPECIAL)) == ["two;"]
    counting = ChatTemplate("{{ messages | length }}" + last_only, name="counting")
    with pytest.raises(ChatError, match=r"counting does not write the last turn .*: give it {% generation %} marks"):
        mark_last_turn(counting, TURNS, SPECIAL)
    marked = ChatTemplate(counting.source + "{% generation %}!{% endgeneration %}", name="marked")
    assert cut(mark_all_turns(marked, TURNS, SPECIAL)) == ["!"]
    with pytest.raises(ChatError, match=r"marked does not write the last turn .*: train on all turns"):
        mark_last_turn(marked, TURNS, SPECIAL)
    with pytest.raises(ChatError, match="marked writes the first 3 messages differently once others follow"):
        mark_all_turns(marked, TURNS, SPECIAL, first=3)
