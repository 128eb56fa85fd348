"""Command-line flags of recipes that train on records: where they are, how they are read, and their chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

from zoo._terminal import show
from zoo.text.chat.errors import NoChatTemplateError
from zoo.text.chat.template import PLAIN_TEMPLATE, ChatTemplate, read_chat_template, read_special_tokens
from zoo.text.records.records import Records, load_records
from zoo.text.tokenizers import Tokenizer


@dataclass(frozen=True)
class RecordOptions:
    """Reading of records: their kind, what is trained on, and what is left out."""

    kind: Literal["auto", "text", "chat", "completion", "preference", "labeled", "prompts", "pair"] = "auto"
    """Kind of the records; auto reads it off the first."""
    field: str = "text"
    """Field of plain text."""
    chat_template: Path | None = None
    """A chat template (.jinja) instead of the checkpoint's."""
    chat_date: str | None = None
    """Day that templates write, 2026-01-31; today by default, and in a resumed run the day of its start."""
    train_on: Literal["all", "last"] = "all"
    """Train on every answer of a chat, or on the last, each in a rendering of its own."""
    too_long: Literal["cut", "drop"] | None = None
    """Cut records longer than a row, or drop them; by default plain text is cut, all else dropped."""
    bad_records: Literal["stop", "skip"] = "stop"
    """Stop at records with faults, or leave out up to 1% and write them to a file."""
    data_processes: int | None = None
    """Workers that tokenize; by default one for each core, at most 8."""

    def read_template(self, checkpoint: Path, tokenizer: Tokenizer) -> ChatTemplate:
        """Return the template that the flags name, else the checkpoint's, else a plain one, and say so. A template from
        elsewhere has the special tokens of this checkpoint."""
        if self.chat_template is not None:
            return read_chat_template(self.chat_template, _name_special_tokens(checkpoint, tokenizer))
        try:
            return read_chat_template(checkpoint)
        except NoChatTemplateError:
            if jax.process_index() == 0:
                show(f"{checkpoint} has no chat template: it gets a plain one; --chat-template FILE takes another")
        special = _name_special_tokens(checkpoint, tokenizer)
        return ChatTemplate(PLAIN_TEMPLATE, special, name="the plain chat template")

    def load(
        self,
        source: Sequence[str] | Sequence[Mapping[str, Any]],
        *,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        seq_len: int,
        **options: Any,
    ) -> Records:
        """Load files, folders, patterns or names of datasets, or records in memory, as `load_records` does, of which
        `options` are further arguments. Sources written PATH=WEIGHT are mixed.

        **Raises** `ValueError` as `load_records` does, and for weights that only some of the sources have.
        """
        return load_records(
            _parse_weights(source),
            tokenizer=tokenizer,
            template=template,
            seq_len=seq_len,
            kind=self.kind,
            field=self.field,
            train_on=self.train_on,
            too_long=self.too_long,
            bad_records=self.bad_records,
            chat_date=self.chat_date,
            processes=self.data_processes,
            **options,
        )


def _name_special_tokens(checkpoint: Path, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the special tokens of a checkpoint by name, as its tokenizer_config.json has them. If that does not name
    EOS, the separator is BOS, and EOS is what ends an answer."""
    named = read_special_tokens(checkpoint)
    if "eos_token" in named:
        return named
    spellings = {token: spelling for spelling, token in tokenizer.special_tokens.items()}
    tokens = {"bos_token": tokenizer.separator, "eos_token": tokenizer.end}
    spelled = {name: spellings[token] for name, token in tokens.items() if token in spellings}
    return {**spelled, **named}


def _parse_weights(source: Sequence[Any]) -> Any:
    """Return a mapping from sources to their weights, where they have weights; else the source itself."""
    weights = {}
    for part in source:
        path, equals, weight = part.rpartition("=") if isinstance(part, str) else ("", "", "")
        if equals and _is_number(weight):
            weights[path] = float(weight)
    if not weights:
        return source
    if len(weights) < len(source):
        raise ValueError(f"--data {' '.join(source)}: give each source a weight, PATH=WEIGHT, or none")
    return weights


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
