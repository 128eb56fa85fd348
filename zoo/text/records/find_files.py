"""Files of records from paths, folders, patterns and names on the Hugging Face hub, and the digests of their bytes."""

import contextlib
import difflib
import glob
import hashlib
import itertools
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from zoo._files import open_regular, read_json, walk_files, write_json
from zoo._optional import import_optional
from zoo.text.remote_files import download, is_url

from .array_record import ArrayRecords
from .json_lines import JsonLines
from .record_file import INSTALL, RecordFile, quote
from .tables import ArrowTable, Parquet

_logger = logging.getLogger("zoo")

_LINES = tuple(f"{kind}{packed}" for kind in (".jsonl", ".ndjson", ".json") for packed in ("", ".gz", ".zst"))
_READERS: dict[str, Callable[[Path], RecordFile]] = {
    **dict.fromkeys(_LINES, JsonLines),
    ".parquet": Parquet,
    ".arrow": ArrowTable,
    ".array_record": ArrayRecords,
}
_TEXT = (".txt", ".md", ".py", ".rst", ".html", ".tex")
_TABLES = {".csv": "pandas.read_csv(path)", ".tsv": "pandas.read_csv(path, sep='\\t')"}
_INFO = "dataset_info.json"
_STATE = "state.json"
_DICT = "dataset_dict.json"
_METADATA = (_INFO, _STATE, _DICT, "dataset_infos.json")
_HUB_NAME = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(:(?P<split>.*))?")
_FIELDS = {"text", "messages", "prompt", "conversations", "instruction"}
_DIGESTS = "digests.json"
_SETTLED_SECONDS = 2.0


def find_record_files(source: str | Path | Sequence[str | Path]) -> list[RecordFile]:
    """Find files of records, sorted by path, each once.

    `source` is one of these, or several:

    - a file: JSON lines (`.jsonl`, `.ndjson` or `.json`, also with `.gz` or `.zst`), `.parquet`, `.arrow` or
      `.array_record`;
    - a folder: all such files below it, without hidden ones. A folder that `datasets` wrote by `save_to_disk` counts
      as the Arrow files that it lists;
    - a pattern, `web/*.parquet` or `**/*.jsonl`;
    - a URL of such a file, folder or pattern, `s3://bucket/chats/*.jsonl`, which is copied first
      (`zoo.text.remote_files`);
    - where no such path exists, a dataset on the Hugging Face hub: `org/name`, or `org/name:split`. The split is
      "train" by default.

    Empty files are left out.

    **Raises** `FileNotFoundError` for a path, pattern or dataset that does not exist; `ValueError` for a file or folder
    of another kind, with what reads or converts it, for a folder of several splits, and if all files are empty;
    `ImportError` for a dataset of the hub without the package `datasets`.
    """
    sources = [source]
    if isinstance(source, Sequence) and not isinstance(source, str | bytes):
        sources = list(source)
    if not sources:
        raise ValueError("expected files of records, got an empty list")
    paths = {}
    for each in sources:
        if not isinstance(each, str | Path):
            raise TypeError(f"expected a path or a name to read records from, got {type(each).__name__}")
        for path in _find_paths(each):
            paths.setdefault(os.path.abspath(path), path)
    filled = [paths[name] for name in sorted(paths) if _get_size(paths[name]) > 0]
    if not filled:
        raise ValueError(f"{', '.join(map(str, sources))}: expected records, and there are none: no file has a byte")
    return [_READERS[_get_suffix(path)](path) for path in filled]


def digest_files(files: Sequence[RecordFile], cache: Path) -> list[str]:
    """Return a digest of each file's bytes, in hexadecimal.

    A table in the folder `cache` keeps them by path, size and time of change. A file that changed within the last two
    seconds is not entered: a further change could leave both as they are.

    **Raises** `ValueError` for a file that changes meanwhile, and as `open_regular` does.
    """
    known = _read_table(cache / _DIGESTS)
    paths = [os.path.abspath(file.path) for file in files]

    def digest(path: str) -> tuple[list[Any], bool]:
        entry = known.get(path)
        with open_regular(Path(path)) as file:
            before = os.fstat(file.fileno())
            stamp = [before.st_size, before.st_mtime_ns]
            if entry is not None and entry[:2] == stamp:
                return entry, True
            digest = _digest_content(file)
            after = os.fstat(file.fileno())
        if [after.st_size, after.st_mtime_ns] != stamp:
            raise ValueError(f"{path} changed while it was read: let nothing write to it, and try again")
        is_settled = time.time() - before.st_mtime > _SETTLED_SECONDS
        return [*stamp, digest], is_settled

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digested = list(pool.map(digest, paths))
    table = {path: entry for path, entry in known.items() if os.path.exists(path)}
    for path, (entry, is_settled) in zip(paths, digested, strict=True):
        table.pop(path, None)
        if is_settled:
            table[path] = entry
    if table != known:
        with contextlib.suppress(OSError):  # a folder that cannot be written may hold all that is needed
            cache.mkdir(parents=True, exist_ok=True)
            write_json(cache / _DIGESTS, table)
    return [entry[-1] for entry, _ in digested]


def _digest_content(file: Any) -> str:
    return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def holds_records(path: Path) -> bool:
    """Return True for a file or folder that `find_record_files` takes and that is not a text.

    A `.json` file counts if its first record has one of the usual fields; a folder, if all of its files do.
    """
    if path.is_dir():
        if (path / _DICT).exists() or _is_saved_dataset(path):
            return True
        files = [file for file in walk_files(path) if not _is_metadata(file)]
        return bool(files) and all(map(holds_records, files))
    suffix = _get_suffix(path)
    if suffix == ".json":
        return bool(_FIELDS & _read_first_record(path).keys())
    return suffix in _READERS


def find_table(path: Path) -> Path | None:
    """Return a CSV or TSV file: the path itself, or the first one of a folder that holds nothing else."""
    files = [path]
    if path.is_dir():
        files = list(walk_files(path))
    if files and all(file.suffix.lower() in _TABLES for file in files):
        return files[0]
    return None


def describe_conversion(path: Path) -> str:
    """Return the line of Python that makes JSON lines of a CSV or TSV file."""
    read = _TABLES[path.suffix.lower()]
    return f"`{read}.to_json('{path.stem}.jsonl', orient='records', lines=True)`"


def _find_paths(source: str | Path) -> list[Path]:
    if is_url(source):
        source = download(source)
    path = Path(source)
    if os.path.isdir(path):  # False for a name that is too long
        return _choose_files(walk_files(path), str(source))
    if os.path.exists(path):
        return _choose_files([path], str(source))
    found = _HUB_NAME.fullmatch(str(source)) if isinstance(source, str) else None
    if found is not None and not path.name.lower().endswith((*_READERS, *_TEXT, *_TABLES)):
        return _download_dataset(found["name"], found["split"] or "train", path)
    if glob.has_magic(str(source)):
        matches = [Path(match) for match in glob.glob(str(source), recursive=True)]
        if not matches:
            raise FileNotFoundError(f"{source}: no file matches this pattern")
        files = [match for match in matches if not match.is_dir()]
        for folder in matches:
            if folder.is_dir() and ((folder / _DICT).exists() or _is_saved_dataset(folder)):
                files += walk_files(folder)
        return _choose_files(files, str(source))
    raise FileNotFoundError(f"{quote(str(source))}: there is no such file or folder{_name_neighbors(path)}")


def _choose_files(files: Iterable[Path], origin: str) -> list[Path]:
    """Return the files with records. **Raises** `ValueError` if there are none, or for a folder of several splits."""
    files = list(files)
    for file in files:
        if file.name == _DICT:
            _raise_splits(file)
    datasets = {file.parent for file in files if file.name == _STATE and _is_saved_dataset(file.parent)}
    chosen = [file for file in files if file.parent not in datasets and not _is_metadata(file)]
    readable = [file for file in chosen if _get_suffix(file) in _READERS]
    for folder in datasets:
        readable += _list_data_files(folder)
    if not readable and not datasets:
        _raise_unreadable(origin, chosen)
    return readable


def _is_metadata(path: Path) -> bool:
    """Return True for what `datasets` writes next to its data, and for its cached results of `map` and `filter`."""
    is_cached = path.match("cache-*.arrow") and (path.parent / _INFO).exists()
    return path.name in _METADATA or is_cached


def _is_saved_dataset(folder: Path) -> bool:
    return (folder / _INFO).exists() and (folder / _STATE).exists()


def _list_data_files(folder: Path) -> list[Path]:
    """**Raises** `ValueError` for a damaged folder, and one with a mapping of indices, as `datasets` 1 wrote them."""
    state = read_json(folder / _STATE)
    try:
        indices = state.get("_indices_data_files") or state.get("_indices_files")
        names = [entry["filename"] for entry in state["_data_files"]]
        are_names = all(Path(name).name == name for name in names)
    except (LookupError, TypeError, AttributeError):
        raise ValueError(f"{folder / _STATE} is damaged: expected a list of `_data_files` with names") from None
    if not are_names:
        raise ValueError(f"{folder / _STATE} is damaged: `_data_files` are not names of files in this folder: {names}")
    if indices:
        raise ValueError(
            f"{folder} has its rows in the order of a mapping of indices, which is not read: load it with "
            "`datasets.load_from_disk`, and save `flatten_indices()` of it"
        )
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise FileNotFoundError(f"{folder}: {', '.join(missing[:3])} is missing, of {len(names)} files of data")
    return [folder / name for name in names]


def _raise_splits(path: Path) -> None:
    """**Raises** `ValueError` with the splits of a `DatasetDict` as paths."""
    content = read_json(path)
    splits = content.get("splits") if isinstance(content, dict) else None
    if not isinstance(splits, list):
        raise ValueError(f"{path} is damaged: expected a list of `splits`")
    choices = " or ".join(str(path.parent / str(split)) for split in splits)
    raise ValueError(f"{path.parent} holds several splits, expected one: take {choices}")


def _raise_unreadable(origin: str, files: Sequence[Path]) -> None:
    """**Raises** `ValueError` for files of other kinds, with what reads or converts them."""
    suffixes = Counter(file.suffix.lower() or file.name for file in files)
    if not files:
        raise ValueError(f"{origin}: expected files of records, and there are no files")
    first, _ = suffixes.most_common(1)[0]
    if first in _TEXT:
        advice = "`train.load_text` reads texts"
    elif first in _TABLES:
        table = next(file for file in files if file.suffix.lower() == first)
        advice = f"{describe_conversion(table)} converts one"
    else:
        advice = f"records are read from {', '.join(_READERS)}"
    found = ", ".join(f"{count} {suffix}" for suffix, count in suffixes.most_common(5))
    raise ValueError(f"{origin}: expected a file of records, and there is {found}: {advice}")


def _get_size(path: Path) -> int:
    with open_regular(path) as file:
        return os.fstat(file.fileno()).st_size


def _name_neighbors(path: Path) -> str:
    """Name files of the same folder with similar names."""
    if not os.path.exists(path.parent):
        return f", nor a folder {quote(str(path.parent))}"
    names = [entry.name for entry in path.parent.iterdir()]
    close = difflib.get_close_matches(path.name, names, n=3)
    return f"; similar: {', '.join(str(path.parent / name) for name in close)}" if close else ""


def _get_suffix(path: Path) -> str:
    """Return the suffix of a known kind, or ""."""
    name = path.name.lower()
    return next((suffix for suffix in _READERS if name.endswith(suffix)), "")


def _download_dataset(name: str, split: str, path: Path) -> list[Path]:
    """Return the Arrow files in the cache of `datasets` that hold a split of a dataset of the hub."""
    missing = f"there is no file or folder {path}{_name_neighbors(path)}"
    if not re.fullmatch(r"\w[\w.-]*", split):
        raise ValueError(f"{missing}, and of a dataset of the Hugging Face hub a whole split is read, not {split!r}")
    datasets = import_optional("datasets", f"{missing}, and datasets of the Hugging Face hub need {INSTALL}")
    try:
        dataset = datasets.load_dataset(name, split=split, keep_in_memory=False)
    except Exception as error:  # builders, readers of files and the network each have errors of their own
        lines = str(error).strip().splitlines() or [""]
        reason = f"{type(error).__name__}: {lines[0][:200].rstrip('.')}"
        kind = FileNotFoundError if isinstance(error, OSError) else ValueError
        raise kind(
            f"{missing}, and the split {split!r} of the dataset {name} of the Hugging Face hub cannot be loaded: "
            f"{reason}. Where there is a network, `hf download --repo-type dataset {name} --local-dir FOLDER` makes a "
            f"folder to copy, and a pattern, 'FOLDER/**/{split}*', takes its files"
        ) from None
    files = [Path(entry["filename"]) for entry in dataset.cache_files]
    _logger.info("%s, split %s: %s rows in %d files", name, split, f"{len(dataset):,}", len(files))
    return files


def _read_first_record(path: Path) -> dict[str, Any]:
    """Return the first record of JSON lines; an empty one if it has a fault, or there is none."""
    file = JsonLines(path)
    try:
        records = [record for unit in file.split()[:1] for _, record in itertools.islice(file.read(unit), 1)]
    except (OSError, ValueError):
        return {}
    return records[0] if records and isinstance(records[0], dict) else {}


def _read_table(path: Path) -> dict[str, list[Any]]:
    """Return the entries of a table of digests: size, time and digest by path. A damaged table counts as empty."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        return {name: entry for name, entry in read_json(path).items() if list(map(type, entry)) == [int, int, str]}
    return {}
