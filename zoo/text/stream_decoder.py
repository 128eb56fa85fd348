"""Decode tokens as they come: whole characters, and stop strings that several tokens spell."""

from collections.abc import Callable, Sequence


class StreamDecoder:
    """Incremental detokenizer: turn a stream of tokens into pieces of text that later tokens do not change.

    A character is held back until all of its bytes have arrived, and a word keeps its leading space. `prompt` are the
    tokens before the first new one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()):
        self._decode = decode
        self._tokens = list(prompt)
        self._start = 0
        self._printed = len(self._tokens)

    def push(self, token: int) -> str:
        """Add a token; return the text that is complete."""
        self._tokens.append(token)
        new = self.flush()
        if not new or new.endswith("\ufffd"):  # bytes that are not (yet) a complete character
            return ""
        self._start = self._printed
        self._printed = len(self._tokens)
        return new

    def flush(self) -> str:
        """Return the text that was held back."""
        # decode with the preceding tokens, which determine whether a space is in between
        known = self._decode(self._tokens[self._start : self._printed])
        return self._decode(self._tokens[self._start :])[len(known) :]


class StoppingDecoder:
    """Incremental detokenizer that ends before a stop string: a string may begin in one token and end in another.

    Text that may be the beginning of a stop string is held back. `decode` and `prompt` are those of `StreamDecoder`.

    **Raises** `ValueError` for an empty stop string.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = (), stop: Sequence[str] = ()):
        if not all(stop):
            raise ValueError("stop: an empty string was given, which every text ends with")
        self._decoder = StreamDecoder(decode, prompt)
        self._stop = tuple(stop)
        self._held = ""
        self.ended = False
        """True after a stop string; further tokens have no text."""

    def push(self, token: int) -> str:
        """Add a token; return the text that is complete and in no stop string."""
        if self.ended:
            return ""
        text = self._cut(self._held + self._decoder.push(token))
        held = 0 if self.ended else max((_count_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Return the text that was held back."""
        if self.ended:
            return ""
        return self._cut(self._held + self._decoder.flush())

    def _cut(self, text: str) -> str:
        cut = cut_at_stop(text, self._stop)
        self.ended = len(cut) < len(text)
        return cut


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return a text up to the first of its stop strings."""
    return text[: min((place for each in stop if (place := text.find(each)) >= 0), default=len(text))]


def _count_overlap(text: str, stop: str) -> int:
    """Return the number of characters at the end of `text` that `stop` begins with, but not all of `stop`."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
