"""Pairs of English and an invented language, made of rules: translation without a download."""

import numpy as np

_NOUNS = dict(
    zip(
        "cat dog bird horse king farmer baker sailor doctor spider whale robot".split(),
        "miru kano tila ravo doru peso namu selo vanti gruma olba zek".split(),
        strict=True,
    )
)
_VERBS = dict(
    zip(
        "see like follow call feed fear paint help".split(),
        "vid lov sek rop gam tim bral onk".split(),
        strict=True,
    )
)
_ADJECTIVES = dict(
    zip(
        "small old red happy quiet brave green tired".split(),
        "pin gur rosh lek sum tarn vel dom".split(),
        strict=True,
    )
)
_NUMBERS = {"the": "", "two": "bu", "three": "tre", "many": "mulo"}


def list_translation_pairs(count: int, *, seed: int = 0) -> list[dict[str, str]]:
    """Return different pairs of a `source` in English and a `target` in the invented language.

    The verb is last and ends in -u if its subject is plural, else in -a. An adjective follows its noun, and a number
    follows both. Nouns and adjectives take -i in the plural, and nouns -n as an object.

        two small dogs see the old cat    ->    kanoi pini bu mirun gur vidu
    """
    rng = np.random.default_rng(seed)
    pairs: dict[str, str] = {}
    while len(pairs) < count:
        subject, translated, is_plural = _draw_noun_phrase(rng, is_object=False)
        thing, translated_thing, _ = _draw_noun_phrase(rng, is_object=True)
        verb = rng.choice(list(_VERBS))
        source = f"{subject} {verb}{'' if is_plural else 's'} {thing}"
        pairs[source] = f"{translated} {translated_thing} {_VERBS[verb]}{'u' if is_plural else 'a'}"
    return [{"source": source, "target": target} for source, target in pairs.items()]


def _draw_noun_phrase(rng: np.random.Generator, *, is_object: bool) -> tuple[str, str, bool]:
    """Return a noun with its number and perhaps an adjective, the same translated, and True for the plural."""
    number = rng.choice(list(_NUMBERS))
    adjective = rng.choice(["", *_ADJECTIVES])
    noun = rng.choice(list(_NOUNS))
    is_plural = number != "the"
    ending = "i" if is_plural else ""
    words = [number, adjective, noun + ("s" if is_plural else "")]
    described = _ADJECTIVES[adjective] + ending if adjective else ""
    translated = [_NOUNS[noun] + ending + ("n" if is_object else ""), described, _NUMBERS[number]]
    return " ".join(filter(None, words)), " ".join(filter(None, translated)), is_plural
