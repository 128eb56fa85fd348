"""The text of a report: lines that fit into a narrow terminal."""

from zoo.inspect.format import LINE, wrap_phrases


def test_phrases_go_on_below_the_text_and_are_not_cut():
    assert list(wrap_phrases("memory", "1 GB, 2 GB", 14)) == [("memory", "1 GB, 2 GB")]
    phrases = [letter * (LINE - 14 - 2) for letter in "ab"]
    assert list(wrap_phrases("memory", ", ".join(phrases), 14)) == [("memory", f"{phrases[0]},"), ("", phrases[1])]
    for count in range(1, 30):
        lines = list(wrap_phrases("memory", ", ".join(["17.3 GB"] * count), 14))
        assert max(14 + len(text) for _, text in lines) <= LINE
        assert " ".join(text for _, text in lines) == ", ".join(["17.3 GB"] * count)
