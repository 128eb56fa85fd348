"""Datasets of records: chats, prompts with completions, preference pairs and texts, tokenized once and packed.

    data = load_records("chats.jsonl", tokenizer=tokenizer, template=template, seq_len=2048)
    data = load_records({"web/*.parquet": 0.7, "code.jsonl": 0.3}, tokenizer=tokenizer, seq_len=2048)
    print(data)                                                   # what was read, kept, cut, dropped
    batches = data.train.batches(batch_size=8, seed=0)            # infinite; its state is one integer
    for batch in data.validation.ordered(batch_size=8): ...       # one pass

Every record is checked before the first batch.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from jaxtyping import Array, Bool, Int, Integer

from zoo._files import user_cache_folder
from zoo._keywords import check_keywords
from zoo._optional import import_optional
from zoo._terminal import format_count
from zoo.parallel import Mesh
from zoo.text.batches import OrderedBatches, ShuffledBatches, spread_rows
from zoo.text.chat.encode import find_end_of_turn
from zoo.text.chat.template import ChatTemplate
from zoo.text.chat.write import write_chat_files
from zoo.text.mixture import Mixture
from zoo.text.packing import PackedRows
from zoo.text.records.token_store import TokenStore, count_default_processes, hold_out, write_store
from zoo.text.run_data import LossUnit
from zoo.text.token_cache import open_cache
from zoo.text.tokenizers import Tokenizer

from .find_files import digest_files
from .in_memory import InMemory
from .pair_rows import PairRows
from .picture_rows import PictureRows, pad_rows
from .prompt_rows import PromptRows
from .record_kinds import KINDS, Encoding
from .source import (
    Reading,
    ReadingOptions,
    Source,
    Weights,
    describe_encoding,
    digest_values,
    find_weights,
    list_chosen,
    name_files,
    open_sources,
)

_STORE_VERSION = 2  # raised whenever the format of the store changes, or the tokens that a record becomes


@dataclass(frozen=True)
class RecordSplit:
    """The training or validation split: rows of whole texts.

    - `rows`: the dataset, `PackedRows` or a `Mixture` of several.
    - `digest`: a hash of everything that the rows depend on. A run keeps it, and is not resumed on other data.
    - `counts`: the numbers of records and texts, which a run keeps in its configuration.
    - `chosen`: values that loading chose, by the names of their flags: the day of a template. A run keeps them in its
      configuration, from which `--resume` takes them.
    """

    name: str
    rows: Any
    token_bytes: Int[np.ndarray, "vocab"]
    digest: str
    counts: Mapping[str, Any]
    chosen: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def batches(
        self,
        batch_size: int,
        *,
        seed: int = 0,
        mesh: Mesh | None = None,
        process: tuple[int, int] | None = None,
        threads: int = 2,
    ) -> ShuffledBatches:
        """Iterate over shuffled batches, infinitely. Each epoch visits every row once, in a new order.

        `batch_size` counts the rows of all processes; `mesh` and `process` are as in `CorpusSplit.batches`. `threads`
        read ahead, of which rows with images need more. **Raises** `ValueError` without rows, or if the number of
        processes does not divide `batch_size`.
        """
        self.require_rows()
        kept = {"digest": self.digest, "counts": self.counts, "chosen": self.chosen}
        return ShuffledBatches(self.rows, batch_size, seed=seed, mesh=mesh, process=process, threads=threads, **kept)

    def ordered(
        self, batch_size: int, *, limit: int | None = None, process: tuple[int, int] | None = None
    ) -> OrderedBatches:
        """Iterate once over the rows, the last batch padded with weight 0; or over `limit` batches of rows spread
        evenly. **Raises** `ValueError` as `batches` does, and `NotImplementedError` for a mixture, which never ends."""
        self.require_rows()
        if isinstance(self.rows, Mixture):
            raise NotImplementedError("a mixture has no end: take `ordered` of the splits of its parts")
        indices = spread_rows(len(self.rows), batch_size, limit)
        return OrderedBatches(self.rows, batch_size, indices, token_bytes=self.token_bytes, process=process)

    def read_fields(self, record: int) -> dict[str, Any]:
        """Return the further fields of a prompt, by the number that its row has as `record`.

        **Raises** `NotImplementedError` for records of other kinds.
        """
        if not isinstance(self.rows, PromptRows):
            raise NotImplementedError("only records of the kind prompts keep further fields")
        return self.rows.read_fields(record)

    def require_rows(self) -> None:
        """**Raises** `ValueError` for a split without rows."""
        if isinstance(self.rows, Mixture) or len(self.rows):
            return
        if isinstance(self.rows, PromptRows) and self.rows.num_dropped:
            raise ValueError(f"the {self.name} split has no rows: its prompts are longer than a row (--prompt-len)")
        raise ValueError(f"the {self.name} split has no rows: take more records, or a longer seq_len")


@dataclass(frozen=True)
class Records:
    """Records as rows for training and validation.

    - `kind`: text, chat, completion, preference, labeled, prompts or pair.
    - `template`: None for records of text, without messages.
    - `parts`: of a mixture, the records of each source, by name.
    - `digest`: a hash of everything that the rows depend on.
    - `stop_tokens`: end an answer.
    """

    train: RecordSplit
    validation: RecordSplit
    kind: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    stop_tokens: tuple[int, ...]
    digest: str
    counts: Mapping[str, Any]
    parts: Mapping[str, "Records"] = dataclasses.field(default_factory=dict)

    @property
    def prompt_end(self) -> str:
        """Separator of a question and its answer, or of a source and its target, as they are shown; empty for texts."""
        return "" if self.template is None and self.kind != "pair" else "\n"

    @property
    def unit(self) -> LossUnit:
        """Unit of losses; of prompts, on which nothing is trained but what a model samples, "reward"."""
        return "reward" if self.kind == "prompts" else "nats per trained token"

    @property
    def metric(self) -> str:
        """Name under which a training step logs its loss, or its reward."""
        return "reward" if self.kind == "prompts" else "loss"

    @property
    def vocab(self) -> int:
        """Size of the vocabulary."""
        return self.tokenizer.vocab

    @property
    def baselines(self) -> dict[str, float]:
        """No losses to compare a model's with: other programs do not tell answers from questions."""
        return {}

    def encode_prompt(self, prompt: str) -> Int[np.ndarray, "tokens"]:
        """Tokenize what a user says, up to the beginning of the answer; of records without messages, a text, and of
        pairs a source."""
        if self.kind == "pair":
            encoding = Encoding(self.tokenizer, None, "text", "all", {})
            return encoding.encode_pair(prompt, "")[0].tokens
        if self.template is None:
            (tokens,) = self.tokenizer.encode_all([prompt.encode()])
            return np.append(self.tokenizer.separator, tokens)
        messages = [{"role": "user", "content": prompt}]
        return self.template.encode(messages, self.tokenizer, add_generation_prompt=True)

    def decode_prompt(self, tokens: Integer[np.ndarray, "tokens"]) -> str:
        """Decode a prompt, without what the chat template writes before and after a question."""
        text = self.tokenizer.decode(tokens)
        if self.template is None:
            return text
        before, _, after = self.tokenizer.decode(self.encode_prompt("question")).partition("question")
        return text.removeprefix(before).removesuffix(after)

    def decode(self, tokens: Integer[np.ndarray, "tokens"] | Integer[Array, "tokens"]) -> str:
        """Decode an answer, up to the first token that ends it."""
        answer = list(map(int, np.asarray(tokens)))
        ends = [answer.index(token) for token in self.stop_tokens if token in answer]
        return self.tokenizer.decode(answer[: min(ends, default=len(answer))])

    def save(self, directory: Path) -> None:
        """Write the tokenizer, the chat template, and which token ends a turn, into a checkpoint directory."""
        self.tokenizer.save(directory)
        if self.template is not None:
            write_chat_files(directory, self.template, self.tokenizer)

    def __str__(self) -> str:
        if self.parts:
            return "\n".join(f"{name}: {part}" for name, part in self.parts.items())
        counts = self.counts
        rows = format_count(counts["rows"], "row")
        lines = [
            f"{format_count(counts['records'], KINDS[self.kind].noun)}, {format_count(counts['train'], 'text')} for "
            f"training, {counts['validation']:,} held out",
            f"{format_count(counts['targets'], 'target')} in {rows}, {counts['trained']:,} trained on",
        ]
        if counts.get("whole"):
            lines[-1] = f"{format_count(counts['trained'], 'text')} in {rows}, scored at the last token of each"
        elif self.template is not None and self.kind != "prompts":
            lines[-1] += f", answers found {'by marks' if self.template.marks_generation else 'turn by turn'}"
        if "pictures" in counts:
            lines[-1] += f", {format_count(counts['pictures'], 'picture')}"
        omitted = [f"{counts[name]:,} {said}" for name, said in _OMITTED.items() if counts[name]]
        if omitted:
            lines.append(", ".join(omitted))
        return "\n".join(lines)


_OMITTED = {
    "cut": "cut, longer than a row",
    "dropped": "dropped, longer than a row",
    "rejected": "left out for faults",
}


@check_keywords
def load_records(
    source: Source | Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]],
    *,
    tokenizer: Tokenizer,
    seq_len: int,
    pack: bool = True,
    whole: bool = False,
    start: Sequence[int] | None = None,
    source_len: int | None = None,
    validation: float = 0.05,
    processes: int | None = None,
    cache: str | Path | None = None,
    **reading: Unpack[ReadingOptions],
) -> Records:
    """Load, check, tokenize and pack records. They are tokenized once, into a cache.

    - `source`: JSON lines, Parquet, ArrayRecord, datasets on disk or names of datasets on the Hugging Face hub; a
      folder, a pattern, or several; a URL of these, `s3://bucket/chats/*.jsonl` (`zoo.text.remote_files`); a sequence
      of mappings, which are the records themselves. A mapping from sources to weights mixes them; weights that change
      are pairs `((0, weights), (10_000, weights))` of a step and a mapping. Keys with a null within a column of a
      table, or of records in memory, are left out.
    - `seq_len`: targets in a row.
    - `template`: renders messages.
    - `kind`: decided by the first record by default. `field`: the field of plain text.
    - `kinds`: the kinds that a loss is for; records of another are refused before they are tokenized.
    - `train_on`: every answer of a chat, or the "last" of each rendering.
    - `too_long`: "cut" texts longer than a row, or "drop" them. By default plain text is cut, all else dropped.
    - `pack`: if False, each text has a row of its own.
    - `whole`: keep the last token of each text, at which `zoo.models.SequenceScore` reads it, and drop what is too
      long: see `PackedRows`.
    - `start`: of pairs, the tokens that every target begins with: `start` of the `EncoderDecoder`. `source_len`: tokens
      of a source, `seq_len` by default.
    - `validation`: share of the records that is held out, by a hash of their first question.
    - `bad_records`: "skip" leaves out at most 1% of the records, and writes them to a file with their faults.
    - `chat_date`: the day, as 2026-01-31, for templates that write a date; today by default.
    - `variables`: further variables of the template, such as `enable_thinking`.
    - `images`: `zoo.images.read_image_config(directory)`, to read chats and completions with pictures in their messages
      (`zoo.text.records.pictures`), whose rows have `images`: see `PictureRows`. Their sizes are read now, and pixels
      with each batch.
    - `processes`: workers that tokenize, by default one for each core, at most 8.
    - `cache`: a folder for the tokens, in a subfolder named by a hash of everything they depend on. By default
      `equizoo/records` in the user's cache folder.

    **Raises** `FileNotFoundError` for a missing source; `RecordsError`, a `ValueError`, for records with faults, each
    with its file and line, what was expected and what came; `ValueError` for a source without records, for records of
    none of the `kinds`, and for parts of a mixture of different kinds.
    """
    if processes is not None and processes < 1:
        raise ValueError(f"processes is {processes}: 1 or more workers tokenize")
    if whole and reading.get("too_long") == "cut":
        raise ValueError("whole texts are not cut: leave too_long out, or take a longer seq_len")
    if not 0 <= validation < 1:
        raise ValueError(f"validation is {validation}: a share from 0 up to, but not including, 1 is held out")
    if whole and reading.get("images") is not None:
        raise NotImplementedError("whole texts, for scores, are not read with images")
    options = _Options(
        seq_len=seq_len,
        pack=pack,
        whole=whole,
        start=start,
        source_len=source_len or seq_len,
        validation=validation,
        processes=processes or count_default_processes(),
        cache=Path(cache or user_cache_folder() / "records"),
    )
    weights = find_weights(source)
    names: list[Any] = [source]
    if weights is not None:
        names = list(weights if isinstance(weights, Mapping) else weights[0][1])
    opened = open_sources(names, tokenizer=tokenizer, **reading)  # all, before the first is tokenized
    parts = [_load_source(part, options) for part in opened]
    if weights is None:
        return parts[0]
    return mix(dict(zip(names, parts, strict=True)), weights)


@dataclass(frozen=True)
class _Options:
    """The arguments of `load_records` for rows, completed."""

    seq_len: int
    pack: bool
    whole: bool
    start: Sequence[int] | None
    source_len: int
    validation: float
    processes: int
    cache: Path


def _load_source(reading: Reading, options: _Options) -> Records:
    """Load the records of one source."""
    kind = reading.kind
    tokenizer = reading.encoding.tokenizer
    template = reading.encoding.template
    if options.whole and kind.has_fields:
        raise ValueError(f"whole is for texts with a score, and {kind.noun}s are to be completed: leave it out")
    if (kind.name == "pair") != bool(options.start):
        asked = "start=model.start, the tokens that their targets begin with" if kind.name == "pair" else "no start"
        raise ValueError(f"{name_files(reading.files)}: {kind.noun}s need {asked}")
    name = _fingerprint(reading, options.cache)
    rejected = options.cache / f"rejected-{name}.jsonl" if reading.skips else None

    def write(directory: Path) -> dict[str, Any]:
        return write_store(
            directory, reading.files, kind, reading.encoding, processes=options.processes, rejected=rejected
        )

    about, digests = open_cache(options.cache / name, write)
    has_images = reading.encoding.images is not None
    holds = {"is_labeled": kind.is_labeled, "has_images": has_images}
    store = TokenStore.open(options.cache / name, tokenizer.vocab, **holds)
    if not len(store.shares):
        raise ValueError(f"{name_files(reading.files)}: no records there")
    chosen = list_chosen(template)
    if not about.get("messages"):
        template = None
    shape = [options.seq_len, reading.too_long, options.pack, options.validation]
    if options.whole:
        shape.append("whole")
    if options.start is not None:
        shape += [options.source_len, *options.start]
    digest = digest_values(digests, *shape)
    held_out = hold_out(store.shares, options.validation)
    items_of = {"train": ~held_out, "validation": held_out}
    rows = {name: _make_rows(store, items, reading, options) for name, items in items_of.items()}
    counts = _count(about, rows)
    if options.whole:
        counts["whole"] = True
    if isinstance(rows["train"], PictureRows):
        counts["pictures"] = rows["train"].num_pictures
    splits = {
        name: RecordSplit(name, part, tokenizer.token_bytes, digest, counts, chosen) for name, part in rows.items()
    }
    return Records(
        train=splits["train"],
        validation=splits["validation"],
        kind=kind.name,
        tokenizer=tokenizer,
        template=template,
        stop_tokens=_find_stop_tokens(tokenizer, template),
        digest=digest,
        counts=counts,
    )


def _fingerprint(reading: Reading, cache: Path) -> str:
    """Return a hash of everything that the tokens depend on."""
    files = reading.files
    parts = {
        "version": _STORE_VERSION,
        "files": [file.digest() for file in files if isinstance(file, InMemory)] or digest_files(files, cache),
        "skips": reading.skips,
        **describe_encoding(reading.kind, reading.encoding),
    }
    if reading.encoding.images is not None:
        parts["paths"] = [os.path.abspath(file.path) for file in files]  # next to which pictures are
    return digest_values(parts)


def _make_rows(
    store: TokenStore, items: Bool[np.ndarray, "items"], reading: Reading, options: _Options
) -> PackedRows | PictureRows | PromptRows | PairRows:
    if reading.kind.has_fields:
        return PromptRows(store, options.seq_len, items=items)
    if options.start is not None:
        sizes = {"source_len": options.source_len, "start": options.start}
        return PairRows(store, options.seq_len, items=items, **sizes)
    too_long = reading.too_long or reading.kind.too_long
    if options.whole:
        too_long = "drop"
    packed = PackedRows(
        store.tokens,
        store.mask,
        store.starts,
        options.seq_len,
        items=items,
        texts_per_item=reading.kind.texts_per_item,
        too_long=too_long,
        pack=options.pack,
        whole=options.whole,
        labels=store.labels,
    )
    if reading.encoding.images is None:
        return packed
    return PictureRows(packed, store, reading.files, reading.encoding.images)


def _count(
    about: Mapping[str, Any], rows: Mapping[str, PackedRows | PictureRows | PromptRows | PairRows]
) -> dict[str, Any]:
    """Return the numbers that are printed, and kept with a run."""
    parts = list(rows.values())
    return {
        "records": about["records"],
        "rejected": about["rejected"],
        "train": rows["train"].num_items,
        "validation": rows["validation"].num_items,
        "cut": sum(part.num_cut for part in parts),
        "dropped": sum(part.num_dropped for part in parts),
        "rows": len(rows["train"]),
        "targets": rows["train"].num_targets,
        "trained": rows["train"].num_trained,
    }


def _find_stop_tokens(tokenizer: Tokenizer, template: ChatTemplate | None) -> tuple[int, ...]:
    ends: list[int | None] = [tokenizer.end]
    if template is not None:
        ends.append(find_end_of_turn(template, tokenizer))
    return tuple(dict.fromkeys(token for token in ends if token is not None))


def mix(parts: Mapping[str, Records], weights: Weights) -> Records:
    """Mix records: each row of training is one of a part, with the odds that the parts' weights are.

    Rows have one length, so a weight is a share of tokens. Weights that change are pairs of the step from which on they
    hold and a mapping. The held-out rows of all parts are kept, one after another.

    The mixture has the chat template of the parts with messages, and their tokens that end an answer.

    **Raises** `ValueError` for parts with different arrays in their rows, for pairs with single texts, for
    parts with different chat templates, and as `Mixture` does for the weights.
    """
    first = next(iter(parts.values()))
    for name, part in parts.items():
        part.train.require_rows()
        mixes = set(part.train.rows[0]) == set(first.train.rows[0])
        if not mixes or KINDS[part.kind].texts_per_item != KINDS[first.kind].texts_per_item:
            nouns = KINDS[part.kind].noun, KINDS[first.kind].noun
            raise ValueError(f"{name} has {nouns[0]}s, which do not mix with {nouns[1]}s")
    templates = {name: part.template for name, part in parts.items() if part.template is not None}
    template = next(iter(templates.values()), None)
    for name, other in templates.items():
        if template is not None and other.source != template.source:
            raise ValueError(
                f"{name} has another chat template than {next(iter(templates))}, and a model is saved with one: load "
                "all parts with the same template"
            )
    rows = pad_rows([part.train.rows for part in parts.values()])
    mixed = Mixture(dict(zip(parts, rows, strict=True)), weights)
    grain = import_optional("grain", "pip install 'equizoo[train]'")
    rows_of_parts = pad_rows([part.validation.rows for part in parts.values() if len(part.validation.rows)])
    held_out = first.validation.rows
    if rows_of_parts:
        held_out = grain.MapDataset.concatenate([grain.MapDataset.source(rows) for rows in rows_of_parts])
    digest = digest_values([part.digest for part in parts.values()], weights)
    counts = {name: part.counts for name, part in parts.items()}
    train = dataclasses.replace(first.train, rows=mixed, digest=digest, counts=counts)
    validation = dataclasses.replace(first.validation, rows=held_out, digest=digest, counts=counts)
    stop_tokens = dict.fromkeys(token for part in parts.values() for token in part.stop_tokens)
    return dataclasses.replace(
        first,
        train=train,
        validation=validation,
        template=template,
        stop_tokens=tuple(stop_tokens),
        digest=digest,
        counts=counts,
        parts=parts,
    )
