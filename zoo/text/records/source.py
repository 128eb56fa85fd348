"""The files of a source of records, the kind of its records, and everything that their tokens depend on."""

import datetime
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from zoo._files import to_jsonable
from zoo.text.chat.template import ChatTemplate
from zoo.text.packing import TooLong
from zoo.text.records.token_store import RecordsError
from zoo.text.tokenizers import Tokenizer, require_tokenizer

from .find_files import find_record_files
from .in_memory import InMemory
from .pictures import check_pictures
from .record_file import RecordError, RecordFile
from .record_kinds import KINDS, NO_TEMPLATE, Encoding, RecordKind, find_kind

KindName = Literal["auto", "text", "chat", "completion", "preference", "labeled", "prompts", "pair"]
Weights = Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]]
Source = str | Path | Sequence[str | Path] | Sequence[Mapping[str, Any]]


class ReadingOptions(TypedDict, total=False):
    """Keywords that `load_records` and `stream_records` have in common: how records become tokens."""

    template: ChatTemplate | None
    kind: KindName
    kinds: Collection[str] | None
    field: str
    train_on: Literal["all", "last"]
    too_long: TooLong | None
    bad_records: Literal["stop", "skip"]
    chat_date: str | None
    variables: Mapping[str, Any]
    images: Mapping[str, Any] | None


@dataclass(frozen=True)
class Reading:
    """Records of one kind, and how they become tokens.

    - `too_long`: as it was asked for; None for the default of the kind.
    - `skips`: True if records with faults may be left out.
    """

    files: Sequence[RecordFile]
    kind: RecordKind
    encoding: Encoding
    too_long: TooLong | None
    skips: bool


def open_sources(
    sources: Sequence[Any],
    *,
    tokenizer: Tokenizer,
    template: ChatTemplate | None = None,
    kind: KindName = "auto",
    kinds: Collection[str] | None = None,
    field: str = "text",
    train_on: Literal["all", "last"] = "all",
    too_long: TooLong | None = None,
    bad_records: Literal["stop", "skip"] = "stop",
    chat_date: str | None = None,
    variables: Mapping[str, Any] = {},
    images: Mapping[str, Any] | None = None,
) -> list[Reading]:
    """Find the files of each source and the kind of its records, before any is read. **Raises** as `load_records`
    does."""
    require_tokenizer(tokenizer)
    template = fix_date(template, chat_date)
    encoding = Encoding(
        tokenizer=tokenizer,
        template=template,
        text_field=field,
        train_on=train_on,
        variables=variables,
        images=images,
    )
    if images is not None:
        check_pictures(images, tokenizer, template)
    readings = []
    for source in sources:
        files = find_source_files(source)
        record_kind = choose_kind(files, kind, field)
        if kinds is not None:
            check_kind(files, record_kind, kinds)
        check_too_long(too_long, record_kind)
        if images is not None and (record_kind.name not in _WITH_IMAGES or too_long == "cut"):
            what = "that are cut" if record_kind.name in _WITH_IMAGES else f"of the kind {record_kind.name}"
            raise NotImplementedError(
                f"{name_files(files)}: records {what} are not read with images, only whole ones of "
                f"{' and '.join(_WITH_IMAGES)}"
            )
        check_template(template, record_kind, files)
        readings.append(Reading(files, record_kind, encoding, too_long, skips=bad_records == "skip"))
    return readings


_WITH_IMAGES = ("chat", "completion")
"""Kinds of records that may have images."""


def find_source_files(source: Any) -> list[RecordFile]:
    """Return the files of a source, or its records in memory as one."""
    is_sequence = isinstance(source, Sequence) and not isinstance(source, str)
    if is_sequence and source and all(isinstance(record, Mapping) for record in source):
        return [InMemory(source)]
    return find_record_files(source)


def find_weights(source: Any) -> Weights | None:
    """Return the weights of a mixture; None for a source of its own."""
    if isinstance(source, Mapping):
        return source
    is_phases = (
        isinstance(source, Sequence)
        and bool(source)
        and all(isinstance(phase, tuple) and len(phase) == 2 and isinstance(phase[1], Mapping) for phase in source)
    )
    return source if is_phases else None


def name_files(files: Sequence[RecordFile]) -> str:
    """Return the paths of up to three files, and the number of the others."""
    names = [str(file.path) for file in files[:3]]
    if len(files) > len(names):
        names.append(f"and {len(files) - len(names):,} more")
    return ", ".join(names)


def choose_kind(files: Sequence[RecordFile], kind: str, field: str) -> RecordKind:
    """Return the kind with a name; for "auto", the kind of the first record."""
    if kind in KINDS:
        return KINDS[kind]
    if kind != "auto":
        raise ValueError(f"kind is {kind!r}: expected one of auto, {', '.join(KINDS)}")
    record, place = read_first_record(files)
    try:
        return find_kind(record, field)
    except RecordError as error:
        raise RecordsError(f"{place}: {error}") from None


def check_kind(files: Sequence[RecordFile], kind: RecordKind, kinds: Collection[str]) -> None:
    """**Raises** `ValueError` for records of a kind that is none of `kinds`, with the recipe that learns from them."""
    if kind.name not in kinds:
        raise ValueError(
            f"{name_files(files)}: the kind of the records is {kind.name}, expected one of {', '.join(kinds)}: "
            f"{_LEARNED_BY[kind.name]}"
        )


_LEARNED_BY = {
    "pair": "`zoo fork translate` learns to write the target of each source",
    **dict.fromkeys(("text", "chat", "completion"), "`zoo fork sft` trains on them"),
    "preference": (
        "`zoo fork dpo` learns from pairs; to train on the chosen answers only, rename `chosen` to `completion`, or to "
        "`messages` without a `prompt`"
    ),
    "labeled": (
        "docs/classify.md has a loss of labels; `--kind completion` trains on every completion, whatever its label"
    ),
    "prompts": "`zoo fork grpo` learns from rewards of answers; to train on given answers, add a `completion` to each",
}
"""Recipes that learn from each kind, and changes that make another kind of it."""


def read_first_record(files: Sequence[RecordFile]) -> tuple[dict[str, Any], str]:
    """Return the first record that can be read, and its place. **Raises** `ValueError` if there is none."""
    fault = f"{name_files(files)}: no records there"
    for file in files:
        for unit in file.split()[:1]:
            for number, record in file.read(unit):
                if not isinstance(record, RecordError):
                    return record, file.locate(unit, number)
                fault = f"{file.locate(unit, number)}: {record}"
    raise RecordsError(fault)


def check_too_long(too_long: TooLong | None, kind: RecordKind) -> None:
    """**Raises** `ValueError` where records of several texts would be cut."""
    if too_long == "cut" and kind.texts_per_item > 1:
        raise ValueError(f"too_long='cut' would cut a {kind.name} record, of several texts: take 'drop'")


def check_template(template: ChatTemplate | None, kind: RecordKind, files: Sequence[RecordFile]) -> None:
    """**Raises** `ValueError` for records of messages without a chat template, judged by the first record."""
    if template is not None:
        return
    record, place = read_first_record(files)
    if kind.has_messages(record):
        raise RecordsError(f"{place}: {NO_TEMPLATE}")


def fix_date(template: ChatTemplate | None, chat_date: str | None) -> ChatTemplate | None:
    """Give a template that writes the date one day: of a run that lasts longer, and of its tokens."""
    if template is None or not template.writes_date or (chat_date is None and template.date is not None):
        return template
    try:
        day = datetime.date.today() if chat_date is None else datetime.date.fromisoformat(chat_date)
    except ValueError:
        raise ValueError(f"chat_date is {chat_date!r}: expected a day, such as 2026-01-31") from None
    return template.on_date(day)


def list_chosen(template: ChatTemplate | None) -> dict[str, Any]:
    """Return what the tokens depend on and `fix_date` may have chosen, by the name of its flag."""
    if template is None or template.date is None:
        return {}
    return {"chat_date": str(template.date)}


def describe_encoding(kind: RecordKind, encoding: Encoding) -> dict[str, Any]:
    """Return everything that the tokens of given records depend on, as JSON."""
    template = encoding.template
    images = {} if encoding.images is None else {"images": encoding.images}
    return {
        **images,
        "tokenizer": encoding.tokenizer.cache_key,
        "end": encoding.tokenizer.end,
        "template": template and [template.source, template.special_tokens, str(template.date)],
        "kind": kind.name,
        "field": encoding.text_field,
        "train_on": encoding.train_on,
        "variables": encoding.variables,
    }


def digest_values(*values: Any) -> str:
    """Return a hash of values that JSON can write."""
    text = json.dumps(to_jsonable(values), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
