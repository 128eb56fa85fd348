"""Regular expressions of adapter_config.json, matched without backtracking.

`target_modules`, `rank_pattern` and other options are patterns out of a file that anyone may have written, and `re`
backtracks: `(a+)+$` takes 2 ** n steps for a name of n letters, `.*.*.*.*x` n ** 4. The standard library has no other
engine. A rule that recognizes such patterns refuses good ones or misses bad ones, and a process with a time limit has
to be started and killed. So every part of a pattern maps the *set* of positions where it may start, the bits of an int,
to the set of those where it may end: any number of `.*` in a row is linear. Whether a name matches does not depend on
which match is found first, so greedy and lazy quantifiers are the same here, and the answer is that of `re`. What this
cannot express raises: backreferences, possessive quantifiers, atomic and conditional groups, flags.
"""

import abc
import math
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, reduce

_MAX_LENGTH, _MAX_NESTING = 1_000, 20
_MAX_STEPS = 20_000
"""Characters compared per name; a pattern of 100 characters takes about as many as the name has, times ten."""
_TOKEN = re.compile(
    r"(?P<repeat>(?:[*+?]|\{(?:\d+,?\d*|,\d*)\})[?+]?)"
    r"|(?P<anchor>[\^$]|\\[AZbB])"
    r"|(?P<open>\((?:\?(?::|=|!|<=|<!|P<\w+>)|(?!\?)))"
    r"|(?P<close>\))|(?P<either>\|)"
    r"|(?P<char>\\[^0-9A-Za-z]|\\[dDwWsSafnrtv]|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\()|\[])",
    re.DOTALL,
)
_LOOKS = ("(?=", "(?!", "(?<=", "(?<!")
_PLAIN = re.compile(r"[\w.-]*", re.ASCII)


class PatternError(ValueError):
    """A pattern that is not valid, or not matched here."""


class _Run:
    """One name that is matched, and the steps that are left."""

    def __init__(self, name: str):
        self.name, self.steps = name, _MAX_STEPS

    def spend(self, steps: int = 1) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise PatternError(f"it takes more than {_MAX_STEPS:,} steps on the name {self.name}")


class _Node(abc.ABC):
    """A part of a pattern."""

    @abc.abstractmethod
    def ends(self, run: _Run, starts: int) -> int:
        """Map the positions where the part may start to those where it may end, both as bits of an int."""


@lru_cache(maxsize=10_000)
def compile_pattern(pattern: str) -> Callable[[str], bool]:
    """Return a predicate of names that is True where `re.fullmatch(pattern, name)` has a match. **Raises**
    `PatternError`."""
    node = _parse(pattern)
    return lambda name: _ends_with_name(node, name, 1)


@lru_cache(maxsize=10_000)
def compile_suffix_pattern(pattern: str) -> Callable[[str], bool]:
    r"""Return a predicate that is True where `re.match(rf"(.*\.)?({pattern})$", name)` has a match, PEFT's rule for
    `rank_pattern` and `alpha_pattern`. **Raises** `PatternError`."""
    if _PLAIN.fullmatch(pattern):  # thousands of such keys are usual: one per module
        compiled, size = re.compile(pattern), len(pattern)
        return lambda name: (
            size <= len(name)
            and name[: len(name) - size][-1:] in ("", ".")
            and compiled.fullmatch(name, len(name) - size) is not None
        )
    node = _parse(pattern)
    after_dots = lambda name: sum(1 << (i + 1) for i, char in enumerate(name) if char == ".")
    return lambda name: _ends_with_name(node, name, 1 | after_dots(name))


def _ends_with_name(node: _Node, name: str, starts: int) -> bool:
    return bool(node.ends(_Run(name), starts) >> len(name) & 1)


def _parse(pattern: str) -> _Node:
    if len(pattern) > _MAX_LENGTH:
        raise PatternError(f"it has {len(pattern):,} characters, and {_MAX_LENGTH:,} are read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(pattern)  # checks the syntax
    except (re.error, RecursionError, OverflowError) as error:
        raise PatternError(str(error)) from None
    tokens, position = [], 0
    while position < len(pattern):
        token = _TOKEN.match(pattern, position)
        if token is None:
            raise PatternError(
                f"{pattern[position : position + 4]!r} at {position}: backreferences, flags, atomic and conditional "
                "groups are not matched here"
            )
        position = token.end()
        tokens.append((token.lastgroup or "", token.group()))
    return _parse_alternatives(iter([*tokens, ("close", "")]), 0)


def _parse_alternatives(tokens: Iterator[tuple[str, str]], depth: int) -> _Node:
    """Parse up to the end of a group."""
    if depth > _MAX_NESTING:
        raise PatternError(f"it has more than {_MAX_NESTING} nested groups")
    branches: list[list[_Node]] = [[]]
    for kind, text in tokens:
        parts = branches[-1]
        if kind == "close":
            break
        if kind == "either":
            branches.append([])
        elif kind == "repeat":
            parts[-1] = _Repeat(parts[-1], text)
        elif kind == "anchor":
            parts.append(_Anchor(text))
        elif kind == "char":
            parts.append(_Char(text))
        else:
            inner = _parse_alternatives(tokens, depth + 1)
            parts.append(_Look(inner, text) if text in _LOOKS else inner)
    return _Either([_Sequence(parts) for parts in branches])


def _list_positions(starts: int) -> list[int]:
    return [i for i in range(starts.bit_length()) if starts >> i & 1]


class _Char(_Node):
    """One character: a literal, an escape, a dot or a set."""

    def __init__(self, source: str):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._fits = lru_cache(maxsize=256)(re.compile(source).fullmatch)

    def ends(self, run: _Run, starts: int) -> int:
        positions = _list_positions(starts)
        run.spend(len(positions))
        return sum(2 << i for i in positions if i < len(run.name) and self._fits(run.name[i]))


class _Sequence(_Node):
    def __init__(self, parts: Sequence[_Node]):
        self._parts = parts

    def ends(self, run: _Run, starts: int) -> int:
        for part in self._parts:
            starts = part.ends(run, starts) if starts else 0
        return starts


class _Either(_Node):
    def __init__(self, branches: Sequence[_Node]):
        self._branches = branches

    def ends(self, run: _Run, starts: int) -> int:
        return reduce(operator.or_, (branch.ends(run, starts) for branch in self._branches))


class _Repeat(_Node):
    """A part between `least` and `most` times."""

    def __init__(self, inner: _Node, quantifier: str):
        if len(quantifier) > 1 and quantifier.endswith("+"):
            raise PatternError(f"the possessive quantifier {quantifier} is not matched here")
        quantifier = quantifier if quantifier in ("?", "*", "+") else quantifier.rstrip("?")
        counts = {"?": "0,1", "*": "0,", "+": "1,"}.get(quantifier, quantifier.strip("{}"))
        low, comma, high = counts.partition(",")
        self._inner, self._least = inner, int(low or 0)
        self._most = self._least if not comma else int(high) if high else math.inf

    def ends(self, run: _Run, starts: int) -> int:
        for _ in range(self._least):
            run.spend()
            ends = self._inner.ends(run, starts)
            if ends == starts:
                break
            starts = ends
        reached, count = starts, self._least
        while starts and count < self._most:
            run.spend()
            starts = self._inner.ends(run, starts) & ~reached
            reached, count = reached | starts, count + 1
        return reached


class _Look(_Node):
    """An assertion on the text ahead or behind."""

    def __init__(self, inner: _Node, sign: str):
        self._inner, self._is_behind, self._is_negated = inner, "<" in sign, "!" in sign

    def ends(self, run: _Run, starts: int) -> int:
        return sum(1 << i for i in _list_positions(starts) if self._is_found(run, i) != self._is_negated)

    def _is_found(self, run: _Run, position: int) -> bool:
        if self._is_behind:
            return any(self._inner.ends(run, 1 << start) >> position & 1 for start in range(position + 1))
        return self._inner.ends(run, 1 << position) != 0


class _Anchor(_Node):
    """The start or end of the name, or the boundary of a word."""

    def __init__(self, text: str):
        self._text = text

    def ends(self, run: _Run, starts: int) -> int:
        return sum(1 << i for i in _list_positions(starts) if self._is_at(run.name, i))

    def _is_at(self, name: str, position: int) -> bool:
        if self._text in ("^", "\\A"):
            return position == 0
        if self._text in ("$", "\\Z"):
            return position == len(name)
        before, after = (char.isalnum() or char == "_" for char in (name[:position][-1:], name[position:][:1]))
        return (before != after) == (self._text == "\\b")
