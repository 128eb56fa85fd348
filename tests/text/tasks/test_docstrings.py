"""Chats about the standard library are questions and first paragraphs, from sources that are not imported."""

import ast

import pytest

from zoo.text.tasks.docstrings import _walk_docstrings, read_docstrings


@pytest.mark.ci
def test_chats_of_the_standard_library():
    chats = read_docstrings()
    assert len(chats) > 3000 and chats == read_docstrings()
    answers = {chat["messages"][0]["content"]: chat["messages"][1]["content"] for chat in chats}
    assert answers["What does `json.dumps` do?"] == "Serialize ``obj`` to a JSON formatted ``str``."
    assert answers["What does `pathlib.Path.exists` do?"] == "Whether this path exists."
    assert all(answer.strip() and "\n" not in answer for answer in answers.values())


def test_private_names_and_missing_docstrings_are_left_out():
    source = """
class A:
    'Of A.'
    def b(self):
        '''First
        line.

        More.'''
    def c(self): pass
    def _d(self):
        'Private.'
class _E:
    'Private.'
"""
    assert list(_walk_docstrings(ast.parse(source), "m")) == [("m.A", "Of A."), ("m.A.b", "First line.")]
