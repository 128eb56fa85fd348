"""Attack `train.load_records`: mutated files of every kind of record, tokenized, stored and packed.

    python scripts/attack/mutate_datasets.py                      # 500 mutations, half a minute
    python scripts/attack/mutate_datasets.py --cases 5000 --seed 1

A case mutates the bytes of a file as mutate_records.py does, or one value or key of a record. The file is refused by
name and line, or loaded: then each text in the rows, and each trained part of one, is written in the record that
`json` or pyarrow reads there. Three tokenizers with templates take turns, `bad_records` is "stop" or "skip", and what
is loaded again from the cache is the same. Exits 1 if any outcome is a forbidden one.
"""

import collections
import contextlib
import gzip
import importlib.util
import io
import json
import random
import re
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scripts.attack import mutate_records
from scripts.attack.watched import HANG, LARGE, RAW, attack, parse_options

SECONDS = 30
ROWS, SEQ_LEN = 120, 8192
REFUSED, EQUAL, SKIPPED, OTHER, WRONG = "refused by name", "loads equal", "left out", "other records", "wrong"
"""`SKIPPED`: the mutated record is listed, and the others are loaded. `OTHER`: the file has other records now."""
OUTCOMES = (REFUSED, EQUAL, SKIPPED, OTHER, WRONG, RAW, HANG, LARGE)
FIXTURES = Path(__file__).parents[2] / "tests" / "fixtures" / "chat"
FORMATS = ("jsonl", "json", "jsonl.gz", "parquet")
VALUES = (
    *(
        None,
        True,
        False,
        0,
        -1.5,
        1e308,
        10**400,
        "",
        " ",
        "\n",
        "\0",
        [],
        {},
        [[]],
        [None],
        "a" * 9000,
        "é\u2028",
        "\ufeff",
    ),
    *("<|im_end|>", "</s>", "<|im_", "<|im_start|>assistant\nyes<|im_end|>", "Assistant:\n", "{{ 1 }}{% raise %}"),
    *("\U000f0000", "\U000f0003x", "\U0010fffd", "\ufdd0", "\ufdd1\ufdd3", "user", "assistant", "system", "tool"),
    *([{"role": "assistant", "content": "yes"}], [{"role": "user", "content": ""}], {"role": "user", "content": "so"}),
    *([{"role": "tool", "content": "3"}, {"role": "assistant", "content": "<|im_end|>"}], [{"role": "assistant"}]),
)
NAMES = (
    *("text", "messages", "prompt", "completion", "chosen", "rejected", "label", "role", "content", "tool_calls"),
    *("conversations", "", "\0", "<|im_end|>", "items"),
)


class Item(NamedTuple):
    """The texts of an item of a record, as rows hold them, and the trained part of each."""

    texts: tuple[str, ...]
    trained: tuple[str, ...]
    label: float = 0.0
    fields: str = ""


def make_records(kind: str) -> list[dict[str, Any]]:
    """Return records of a kind; those with an odd number have messages where the kind has both."""
    make = {
        "text": lambda n: {"text": f"naïve \u2028 {n}\n"},
        "chat": lambda n: {"messages": _ask(n) + _answer(n) + (_ask(-n) + _answer(-n)) * (n % 3)},
        "completion": lambda n: {"prompt": f"{n} + 1 =", "completion": f" {n + 1}"},
        "messages": lambda n: {"prompt": _ask(n), "completion": _answer(n)},
        "preference": lambda n: {"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": f"no {n}"},
        "common": lambda n: {"chosen": _ask(n) + _answer(n), "rejected": _ask(n) + _answer(-n - 1)},
        "labeled": lambda n: {"prompt": f"{n}?", "completion": f"{n}!", "label": n % 3},
        "prompts": lambda n: {"prompt": f"{n} + 1 =", "answer": n + 1, "items": [n, None], "é": "\u2028"},
    }[kind]
    return [make(number) for number in range(ROWS)]


KINDS = ("text", "chat", "completion", "messages", "preference", "common", "labeled", "prompts")


def _ask(number: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"naïve \u2028 {number}?"}]


def _answer(number: int) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": f"{number}: <|im_end|> is a token"}]


def make_files(directory: Path) -> list[Path]:
    """Write a folder per kind and format, with one file each."""
    folders = []
    for kind in KINDS:
        records = make_records(kind)
        for suffix in FORMATS:
            content = _write(records, suffix)
            if content is not None:
                folders.append(directory / f"{kind}-{suffix}")
                folders[-1].mkdir()
                (folders[-1] / f"{kind}.{suffix}").write_bytes(content)
    return folders


def _write(records: list[Any], suffix: str) -> bytes | None:
    """Return the content of a file. None if the package that writes it is not installed."""
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    if suffix == "jsonl":
        return lines
    if suffix == "jsonl.gz":
        return gzip.compress(lines, mtime=0)
    if suffix == "json":
        return json.dumps(records, indent=1).encode()
    if importlib.util.find_spec("pyarrow") is None:
        return None
    import pyarrow as pa
    from pyarrow import parquet

    sink = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(records), sink, row_group_size=50)
    return sink.getvalue()


def mutate(path: Path, rng: random.Random) -> tuple[str, bytes]:
    """Return the kind of a mutation, and the mutated file."""
    kind = rng.choice([*mutate_records.KINDS, "value", "value", "value", "key", "key"])
    suffix = path.name.partition(".")[2]
    if kind in mutate_records.KINDS:
        return kind, mutate_records.mutate(path.read_bytes(), kind, rng)
    while True:
        records = [record for _, record in sorted(read_plainly(path).items())]
        _change(records[rng.choice([0, rng.randrange(ROWS)])], kind, rng)
        try:
            content = _write(records, suffix)
        except (ValueError, TypeError, OverflowError, NotImplementedError):  # a column has one type in Parquet
            continue
        assert content is not None
        return kind, content


def _change(record: dict[str, Any], kind: str, rng: random.Random) -> None:
    """Replace a value anywhere in a record, or remove or rename a key."""
    places = list(_walk(record))
    if kind == "value":
        holder, key = rng.choice(places)
        holder[key] = rng.choice(VALUES)
        return
    holder, key = rng.choice([(holder, key) for holder, key in places if isinstance(holder, dict)])
    value = holder.pop(key)
    if rng.random() < 0.5:
        holder[rng.choice(NAMES)] = value


def _walk(value: Any) -> Iterator[tuple[Any, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(pairs):
        yield value, key
        yield from _walk(item)


def read_plainly(path: Path) -> dict[int, Any]:
    """Read the records of a file by their line, element or row, with nothing of the library."""
    content = path.read_bytes()
    if path.suffix == ".parquet":
        from pyarrow import parquet

        table = parquet.read_table(io.BytesIO(content))
        return {number: _convert(table.slice(number, 1)) for number in range(len(table))}
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    content = content.removeprefix(b"\xef\xbb\xbf")
    if path.suffix == ".json" and content.lstrip()[:1] == b"[":
        return dict(enumerate(json.loads(content)))
    lines = enumerate(content.split(b"\n"), start=1)
    return {number: _parse(line) for number, line in lines if line.strip(b" \t\r")}


def _convert(row: Any) -> Any:
    """Return a row of a table; None for bytes that are not UTF-8, which must be left out."""
    try:
        return row.to_pylist()[0]
    except UnicodeDecodeError:
        return None


def _parse(line: bytes) -> Any:
    """Return a value of JSON; the bytes of a line without one, which must be left out."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line


class Setup(NamedTuple):
    """Options that load a case, and the texts that they make of records."""

    is_bytes: bool
    options: dict[str, Any]

    @classmethod
    def draw(cls, rng: random.Random) -> "Setup":
        from zoo.text import ChatTemplate, read_chat_template
        from zoo.text.chat.template import PLAIN_TEMPLATE
        from zoo.text.tokenizers import ByteTokenizer, FileTokenizer

        options: dict[str, Any] = {
            "seq_len": SEQ_LEN,
            "bad_records": rng.choice(["stop", "skip"]),
            "train_on": rng.choice(["all", "last"]),
            "too_long": "drop",
            "processes": 1,
        }
        is_bytes = rng.random() < 0.5
        if is_bytes:
            options["tokenizer"] = ByteTokenizer()
            options["template"] = ChatTemplate(PLAIN_TEMPLATE, {"eos_token": "\0"})
        else:
            options["tokenizer"] = FileTokenizer(FIXTURES / "tokenizer.json", 320)
            options["template"] = read_chat_template(FIXTURES / rng.choice(["chatml.jinja", "chatml_marked.jinja"]))
        return cls(is_bytes, options)

    def compare(self, text: str) -> str:
        """Return a text as it is compared. A token of the BPE may hold white space of the template, too."""
        return text if self.is_bytes else "".join(text.split())

    def render(self, messages: list[Any], prompt: bool = False) -> str:
        """Return a conversation without special tokens."""
        if self.is_bytes:
            turns = [f"{message['role'].capitalize()}:\n{message['content']}\n\n" for message in messages]
            return "".join(turns) + "Assistant:\n" * prompt
        turns = [f"{message['role']}\n{message['content']}\n" for message in messages]
        return "".join(turns) + "assistant\n" * prompt

    def list_items(self, kind: str, record: Any) -> list[Item]:
        """Return what rows are to hold of a record."""
        if kind == "text":
            return [self._make_item((record["text"], record["text"]))]
        if kind == "chat":
            messages = record["messages"]
            ends = [number + 1 for number, message in enumerate(messages) if message["role"] == "assistant"]
            if self.options["train_on"] == "last":
                return [self._make_item((self.render(messages[:end]), messages[end - 1]["content"])) for end in ends]
            return [self._make_item(self._join([], messages))]
        if kind == "prompts":
            fields = json.dumps({name: value for name, value in record.items() if name != "prompt"}, sort_keys=True)
            prompt = record["prompt"] if isinstance(record["prompt"], str) else self.render(record["prompt"], True)
            return [Item((self.compare(prompt),), ("",), 0.0, fields)]
        if kind == "preference":
            prompt = record.get("prompt", [])
            return [self._make_item(*(self._join(prompt, record[name]) for name in ("chosen", "rejected")))]
        item = self._make_item(self._join(record["prompt"], record["completion"]))
        return [item._replace(label=float(record["label"]) if kind == "labeled" else 0.0)]

    def _join(self, prompt: Any, answer: Any) -> tuple[str, str]:
        """Return the text of a prompt with an answer, and what is trained on."""
        if isinstance(answer, str):
            return (prompt or "") + answer, answer
        trained = [message["content"] for message in answer if message["role"] == "assistant"]
        return self.render([*prompt, *answer]), "".join(trained)

    def _make_item(self, *pairs: tuple[str, str]) -> Item:
        texts, trained = zip(*pairs, strict=True)
        return Item(tuple(map(self.compare, texts)), tuple(map(self.compare, trained)))

    def read_items(self, data: Any) -> list[Item]:
        """Return what the rows of both splits hold."""
        decode = self.options["tokenizer"].decode
        found = []
        for split in (data.train, data.validation):
            for row in (split.rows[number] for number in range(len(split.rows))):
                if data.kind == "prompts":
                    fields = json.dumps(split.read_fields(int(row["record"])), sort_keys=True)
                    found.append(Item((self.compare(decode(row["tokens"][row["mask"]])),), ("",), 0.0, fields))
                    continue
                pairs = []
                for segment in range(1, int(row["segment_ids"].max()) + 1):
                    here = row["segment_ids"] == segment
                    tokens = np.append(row["tokens"][here][:1], row["targets"][here])
                    pairs.append((decode(tokens), decode(row["targets"][here & (row["weights"] > 0)])))
                width = 2 if data.kind == "preference" else 1
                for first in range(0, len(pairs), width):
                    label = float(row["labels"][first]) if data.kind == "labeled" else 0.0
                    found.append(self._make_item(*pairs[first : first + width])._replace(label=label))
        return found


def load_case(case: tuple[Path, Path]) -> tuple[str, str]:
    """Return the outcome of a mutated folder, and a detail."""
    from zoo import train
    from zoo.text.records.token_store import RecordsError

    directory, source = case
    (path,) = directory.iterdir()
    (original,) = source.iterdir()
    setup = Setup.draw(random.Random(path.read_bytes()))
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # it says what it leaves out
                data = train.load_records(path, cache=cache, **setup.options)
        except (ValueError, OSError) as error:
            message = str(error)
            lines = message.splitlines()
            is_plain = type(error) in (ValueError, RecordsError, FileNotFoundError) and len(lines) < 25
            is_named = str(path) in message and max(map(len, lines)) < 1000 and not re.search(r"\bat 0x", message)
            return (REFUSED, message) if is_plain and is_named else (RAW, traceback.format_exc())
        listed = _read_places(cache, path)
        again = train.load_records(path, cache=cache, **setup.options)
        found = collections.Counter(setup.read_items(data))
        if again.digest != data.digest or collections.Counter(setup.read_items(again)) != found:
            return WRONG, "other rows from the cache"
    records = read_plainly(path)
    try:
        written = [setup.list_items(data.kind, record) for place, record in records.items() if place not in listed]
    except (LookupError, TypeError, AttributeError, ValueError):
        return WRONG, f"a record without the fields of {data.kind} was loaded\n{traceback.format_exc()}"
    expected = collections.Counter(item for items in written for item in items)
    missing = (expected - found).total()
    if found - expected or missing != data.counts["dropped"] or data.counts["rejected"] != len(listed):
        return WRONG, f"{data.kind}: {list(found - expected)[:2]} came, {list(expected - found)[:2]} is written"
    if listed:
        return SKIPPED, ""
    return (EQUAL, "") if list(records.values()) == list(read_plainly(original).values()) else (OTHER, "")


def _read_places(cache: Path, path: Path) -> set[int]:
    """Return the line, element or row of each record that was left out."""
    places = set()
    for listed in cache.glob("rejected-*.jsonl"):
        for line in listed.read_bytes().splitlines():
            place = json.loads(line)
            found = re.fullmatch(re.escape(str(path)) + r"(?::|, element |, row )(\d+)", place["place"])
            assert found is not None and place["fault"], place
            places.add(int(found[1]))
    return places


def main() -> int:
    options = parse_options(__doc__, cases=500)
    with tempfile.TemporaryDirectory() as folder:
        sources = make_files(Path(folder))

        def make_case(number: int, rng: random.Random, directory: Path) -> tuple[str, str, Path]:
            source = sources[number % len(sources)]
            (path,) = source.iterdir()
            kind, content = mutate(path, rng)
            directory.mkdir()
            (directory / path.name).write_bytes(content)
            return kind, f"{kind}, {path.name}", source

        return attack(load_case, sources, make_case, options, outcomes=OUTCOMES, num_allowed=4, seconds=SECONDS)


if __name__ == "__main__":
    raise SystemExit(main())
