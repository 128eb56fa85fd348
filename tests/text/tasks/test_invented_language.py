"""Pairs of English and the invented language, whose rules are written again here."""

from zoo.text.tasks.invented_language import list_translation_pairs


def test_the_sentence_of_the_rules_is_translated_by_them():
    pairs = list_translation_pairs(3_000)
    by_source = {pair["source"]: pair["target"] for pair in pairs}
    assert len(by_source) == 3_000 and pairs == list_translation_pairs(3_000)
    assert pairs[:9] != list_translation_pairs(9, seed=1)
    plural = [source for source in by_source if source.split()[0] != "the"]
    assert 0.7 < len(plural) / 3_000 < 0.8
    for source, target in by_source.items():
        words = target.split()
        assert words[-1].endswith("u" if source in plural else "a")  # the verb is last, and agrees with its subject
        objects = [word for word in words[1:-1] if word.endswith("n")]
        assert objects, target


def test_numbers_adjectives_and_objects_are_marked():
    found = {tuple(pair["source"].split()): pair["target"] for pair in list_translation_pairs(3_000)}
    dogs = [target for words, target in found.items() if words[:3] == ("two", "small", "dogs")]
    cats = [target for words, target in found.items() if words[-3:] == ("the", "old", "cat")]
    spiders = [target for words, target in found.items() if words[-3:] == ("many", "old", "spiders")]
    assert dogs and cats and spiders
    assert all(target.startswith("kanoi pini bu ") and target.endswith("u") for target in dogs)
    assert all(target.split()[-3:-1] == ["mirun", "gur"] for target in cats)
    assert all(target.split()[-4:-1] == ["grumain", "guri", "mulo"] for target in spiders)
