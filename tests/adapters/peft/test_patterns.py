"""Patterns of adapter configs: the answers of `re`, without its backtracking."""

import random
import re
import time

import pytest

from zoo.adapters.peft.patterns import PatternError, compile_pattern, compile_suffix_pattern

NAMES = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.self_attn.k_proj",
    "model.layers.11.mlp.experts.127.down_proj",
    "lm_head",
    "q_proj",
    "",
)
USUAL = (
    r".*\.(q|k|v)_proj",
    r"^model\.layers\.(?!0\.).*",
    "(?:a|b)",
    "model.layers.[0-9]+.self_attn.q_proj",
    ".*(?:self_attn|mlp).*proj",
    r"(?!.*lm_head).*",
    r".*layers\.(1[0-9]|2\d)\..*?(?P<kind>[kv])_proj$",
    r".*(?<!self_attn)\.\w+_proj",
    r"(.*\.)?\w{1,6}(_head)?\b",
    "q_proj",
    "self_attn.q_proj",
)


@pytest.mark.parametrize("pattern", USUAL)
def test_usual_patterns_match_as_re_does(pattern):
    for name in NAMES:
        assert compile_pattern(pattern)(name) == (re.fullmatch(pattern, name) is not None)
        expected = re.match(rf"(.*\.)?({pattern})$", name) is not None
        assert compile_suffix_pattern(pattern)(name) == expected


def test_random_patterns_match_as_re_does():
    rng = random.Random(0)

    def generate(depth):
        kind = rng.randrange(10) if depth else 0
        if kind < 3:
            return rng.choice(["a", "b", ".", r"\.", "[ab]", "[^a]", r"\w", r"\d", "^", "$", r"\b", "(?<=a)", "(?<!b)"])
        if kind < 5:
            return generate(depth - 1) + generate(depth - 1)
        if kind < 7:
            return f"({rng.choice(['', '?:', '?=', '?!'])}{generate(depth - 1)}|{generate(depth - 1)})"
        return f"(?:{generate(depth - 1)}){rng.choice(['*', '+', '?', '*?', '+?', '{2}', '{1,2}', '{,2}', '{2,}'])}"

    for _ in range(1000):
        pattern, name = generate(4), "".join(rng.choices("ab.1", k=rng.randrange(7)))
        assert compile_pattern(pattern)(name) == (re.fullmatch(pattern, name) is not None), (pattern, name)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a|a)*b",
        ".*" * 30 + "x",
        "(.*)*(.*)*x",
        "(((((.*)*)*)*)*)*x",
        "(a?){60}a{60}x",
        "((?=.*x).)*",
        "(a*a*)*b",
    ],
)
def test_patterns_that_backtrack_are_fast(pattern):
    """2 ** 60 or 90 ** 30 steps in `re`."""
    name = "model.layers.10.mlp.experts.127.gate_proj" + 60 * "a"
    start = time.perf_counter()
    for match in (compile_pattern(pattern), compile_suffix_pattern(pattern)):
        try:
            match(name)
        except PatternError as error:
            assert "takes more than" in str(error)
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "missing \\)"),
        ("(?i)a", r"'\(\?i\)' at 0: .* flags"),
        (r"(a)\1", "backreferences"),
        ("a++", "possessive quantifier"),
        ("(?>a)", "atomic"),
        ("a" * 1001, "1,001 characters"),
        ("(" * 30 + ")" * 30, "nested groups"),
    ],
)
def test_patterns_that_are_not_read_raise(pattern, message):
    with pytest.raises(PatternError, match=message):
        compile_pattern(pattern)
