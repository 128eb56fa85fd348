"""Spans of a rendered conversation that the assistant wrote."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .errors import ChatError
from .template import ChatTemplate, RenderedChat


def mark_all_turns(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Iterable[str],
    *,
    first: int = 0,
    **options: Any,
) -> RenderedChat:
    """Render a conversation with the spans of the assistant's turns from `messages[first]` on.

    Without `{% generation %}` marks, a turn's span begins after the generation prompt of the messages before, and ends
    with the last special token of the turn. `options` are those of `ChatTemplate.render`.

    **Raises** `ChatError` for a template without marks that changes earlier turns once later ones follow.
    """
    text, marked = template.render(messages, **options)
    if template.marks_generation:
        if not first:
            return RenderedChat(text, marked)
        prompt = template.render(messages[:first], add_generation_prompt=True, **options).text
        if not text.startswith(prompt):
            raise ChatError(
                f"{template.name} writes the first {first} messages differently once others follow: what was generated "
                "from them cannot be told apart"
            )
        return RenderedChat(text, _clip(marked, len(prompt)))
    spans = []
    for number in range(first, len(messages)):
        if messages[number]["role"] != "assistant":
            continue
        said = messages[: number + 1]
        turn = text if len(said) == len(messages) else template.render(said, **options).text
        start = _find_start(template, said, turn, **options)
        if start is None or not text.startswith(turn):
            raise ChatError(
                f"{template.name} has no {{% generation %}} marks, and writes turns differently once others follow: "
                "give it marks (--chat-template FILE), or train on the last turn of each rendering (--train-on last)"
            )
        spans.append((start, start + find_end(turn[start:], special_tokens)))
    return RenderedChat(text, tuple(spans))


def mark_last_turn(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], special_tokens: Iterable[str], **options: Any
) -> RenderedChat:
    """Render a conversation that ends with the assistant's turn, with the spans of this turn.

    **Raises** `ChatError` for a template that does not write the turn after its own generation prompt.
    """
    text, marked = template.render(messages, **options)
    start = _find_start(template, messages, text, **options)
    if start is None:
        if template.marks_generation:
            advice = "train on all turns that it marks (--train-on all)"
        else:
            advice = "give it {% generation %} marks (--chat-template FILE), and train on all turns"
        raise ChatError(f"{template.name} does not write the last turn after its own generation prompt: {advice}")
    if template.marks_generation:
        return RenderedChat(text, _clip(marked, start))
    return RenderedChat(text, ((start, start + find_end(text[start:], special_tokens)),))


def find_end(turn: str, special_tokens: Iterable[str]) -> int:
    """Return the end of a turn's last special token, if only white space follows it; else the end of the turn."""
    ends = [turn.rfind(token) + len(token) for token in special_tokens if token in turn]
    end = max(ends, default=len(turn))
    if turn[end:].strip():
        return len(turn)
    return end


def _find_start(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], text: str, **options: Any) -> int | None:
    """Return the start of the last message in the text of a conversation, None if its prompt does not begin the
    text."""
    prompt = template.render(messages[:-1], add_generation_prompt=True, **options).text
    if not text.startswith(prompt):
        return None
    return len(prompt)


def _clip(spans: Sequence[tuple[int, int]], start: int) -> tuple[tuple[int, int], ...]:
    """Return the parts of spans from `start` on."""
    return tuple((max(begin, start), stop) for begin, stop in spans if stop > start)
