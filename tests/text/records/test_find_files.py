"""Sources of records become files, wrong ones an error that says what to take, and digests are computed once."""

import json
import os
import sys
import types

import pytest

from tests.text.records.reading import read_records
from zoo.text.records import find_files
from zoo.text.records.array_record import ArrayRecords
from zoo.text.records.find_files import digest_files, find_record_files, holds_records
from zoo.text.records.json_lines import JsonLines
from zoo.text.records.tables import ArrowTable, Parquet

STATE = {"_data_files": [{"filename": "data-0.arrow"}, {"filename": "data-1.arrow"}], "_fingerprint": "f"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with files of all kinds in `all`."""
    monkeypatch.chdir(tmp_path)
    names = ["b.jsonl", "a.JSONL", "deep/c.ndjson.gz", "deep/d.json", "e.parquet", "f.arrow", "deep/g.array_record"]
    make_files("all", [*names, ".hidden.jsonl", ".git/h.jsonl", "README.md"])
    make_files("all", ["empty.jsonl"], content="")
    return tmp_path


def make_files(root, names, content='{"text": "a"}\n'):
    for name in names:
        path = os.path.join(root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(content)


def make_dataset(root, state=STATE):
    make_files(root, ["data-0.arrow", "data-1.arrow", "cache-12.arrow", "dataset_info.json"])
    make_files(root, ["state.json"], content=json.dumps(state))


def list_paths(source):
    return [str(file.path) for file in find_record_files(source)]


def test_folder_gives_all_its_files_sorted(folder):
    files = find_record_files("all")
    names = ["a.JSONL", "b.jsonl", "deep/c.ndjson.gz", "deep/d.json", "deep/g.array_record", "e.parquet", "f.arrow"]
    assert [str(file.path) for file in files] == [f"all/{name}" for name in names]
    assert [type(file) for file in files] == [*[JsonLines] * 4, ArrayRecords, Parquet, ArrowTable]


@pytest.mark.parametrize(
    ("source", "expected"),
    {
        "all/b.jsonl": ["all/b.jsonl"],
        "all/*.jsonl": ["all/b.jsonl"],
        "all/**/*.json*": ["all/b.jsonl", "all/deep/d.json"],
        "all/d*/*": ["all/deep/c.ndjson.gz", "all/deep/d.json", "all/deep/g.array_record"],
        ("all/e.parquet", "all/b.jsonl", "./all/b.jsonl", "all/*.jsonl"): ["all/b.jsonl", "all/e.parquet"],
    }.items(),
)
def test_patterns_and_several_sources(folder, source, expected):
    assert list_paths(source) == expected


def test_path_with_brackets_is_a_path_first(folder):
    make_files("x[1]", ["y.jsonl"])
    assert list_paths("x[1]") == list_paths("x[1]/y.jsonl") == ["x[1]/y.jsonl"]


def test_saved_dataset_gives_the_files_that_it_lists(folder):
    make_dataset("saved/train")
    make_files("saved", ["more.jsonl"])
    data = ["saved/train/data-0.arrow", "saved/train/data-1.arrow"]
    assert list_paths("saved/train") == list_paths("saved/t*") == list_paths("saved/train/*") == data
    assert list_paths("saved") == ["saved/more.jsonl", *data]
    assert list_paths("saved/train/data-1.arrow") == data[1:]


def test_cached_results_of_datasets_are_left_out(folder):
    make_files("cache", ["x-train.arrow", "cache-0123.arrow", "dataset_info.json"])
    assert list_paths("cache") == ["cache/x-train.arrow"]


def test_several_splits_name_the_choices(folder):
    make_dataset("both/train")
    make_files("both", ["dataset_dict.json"], content='{"splits": ["train", "test"]}')
    for source in ("both", "bot*", "."):
        with pytest.raises(ValueError, match="both holds several splits, .*: take both/train or both/test"):
            find_record_files(source)


DAMAGES = {
    "indices": ({**STATE, "_indices_data_files": [{"filename": "i.arrow"}]}, "a mapping of indices, which is not read"),
    "no list": ({"_data_files": 3}, "state.json is damaged: expected a list of `_data_files` with names"),
    "no object": ([], "state.json is damaged: expected a list of `_data_files`"),
    "elsewhere": ({"_data_files": [{"filename": "../data-0.arrow"}]}, "are not names of files in this folder"),
    "no name": ({"_data_files": [{"filename": 7}]}, "state.json is damaged: expected a list of `_data_files`"),
    "missing": ({"_data_files": [{"filename": "data-9.arrow"}]}, "data-9.arrow is missing, of 1 files of data"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_dataset_is_an_error(folder, damage):
    state, message = DAMAGES[damage]
    make_dataset("saved", state)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        find_record_files("saved")


WRONG = {
    "notes.txt": "notes.txt: expected a file of records, and there is 1 .txt: `train.load_text` reads texts",
    "t.csv": r"there is 1 .csv: `pandas.read_csv\(path\).to_json\('t.jsonl', orient='records', lines=True\)` converts",
    "t.tsv": r"`pandas.read_csv\(path, sep='\\t'\).to_json",
    "model.safetensors": "1 .safetensors: records are read from .jsonl, .jsonl.gz, .jsonl.zst, .ndjson, .*.parquet",
    "Makefile": "there is 1 Makefile: records are read from",
}


@pytest.mark.parametrize("name", WRONG)
def test_file_of_another_kind_says_what_reads_it(folder, name):
    make_files("wrong", [name])
    for source in (f"wrong/{name}", "wrong", "wrong/*"):
        with pytest.raises(ValueError, match=WRONG[name].removeprefix("notes.txt: ")):
            find_record_files(source)


@pytest.mark.parametrize(
    ("source", "message"),
    {
        "all/bb.jsonl": "'all/bb.jsonl': there is no such file or folder; similar: all/b.jsonl",
        "nowhere/b.jsonl": "'nowhere/b.jsonl': there is no such file or folder, nor a folder 'nowhere'",
        "all/*.ndjson": r"all/\*.ndjson: no file matches this pattern",
        "a" * 5000: "there is no such file or folder",
    }.items(),
    ids=["near", "no folder", "pattern", "too long"],
)
def test_missing_file_is_named_with_its_neighbors(folder, source, message):
    with pytest.raises(FileNotFoundError, match=message) as caught:
        find_record_files(source)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("source", [7, None, ["all", 7], b"all"])
def test_source_that_is_not_a_path_is_an_error(folder, no_type_checks, source):
    with pytest.raises(TypeError, match="expected a path or a name to read records from, got"):
        find_record_files(source)


def test_empty_sources_are_errors(folder):
    os.mkdir("none")
    make_files("blank", ["a.jsonl", "b.jsonl"], content="")
    with pytest.raises(ValueError, match="got an empty list"):
        find_record_files([])
    with pytest.raises(ValueError, match="none: expected files of records, and there are no files"):
        find_record_files("none")
    with pytest.raises(ValueError, match="blank: expected records, and there are none: no file has a byte"):
        find_record_files("blank")


def test_pipe_is_an_error(folder):
    os.mkfifo("all/z.jsonl")
    with pytest.raises(ValueError, match="z.jsonl is a pipe: expected a file"):
        find_record_files("all")


class Loaded:
    """What `load_dataset` returns, as far as it is used."""

    def __init__(self, *paths):
        self.cache_files = [{"filename": str(path)} for path in paths]

    def __len__(self):
        return 1


def test_name_on_the_hub_is_loaded_by_datasets(folder, monkeypatch):
    asked = []

    def load_dataset(name, *, split, keep_in_memory):
        asked.append((name, split, keep_in_memory))
        return Loaded("all/f.arrow")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert list_paths("org/name") == list_paths(["org/name:test.x"]) == ["all/f.arrow"]
    assert asked == [("org/name", "train", False), ("org/name", "test.x", False)]
    with pytest.raises(ValueError, match=r"a dataset of the Hugging Face hub a whole split is read, not 'train\[:9\]'"):
        find_record_files("org/name:train[:9]")
    assert list_paths("all/deep") and len(asked) == 2


@pytest.mark.parametrize(
    ("error", "kind"),
    [(ConnectionError("no route\nat all"), FileNotFoundError), (ValueError('Unknown split "x".'), ValueError)],
)
def test_dataset_that_does_not_load_is_an_error(folder, monkeypatch, error, kind):
    def load_dataset(name, **options):
        raise error

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    message = (
        "there is no file or folder all/deap:x; similar: all/deep, and the split 'x' of the dataset all/deap of the "
    )
    message += f"Hugging Face hub cannot be loaded: {type(error).__name__}: "
    with pytest.raises(kind, match=message) as caught:
        find_record_files("all/deap:x")
    assert "hf download --repo-type dataset all/deap" in str(caught.value) and "\n" not in str(caught.value)


def test_name_without_the_package_names_the_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"there is no file or folder org/name.*pip install 'equizoo\[data\]'"):
        find_record_files("org/name")


@pytest.mark.neighbors("datasets")
def test_split_of_datasets_is_read_from_its_cache(folder, monkeypatch):
    import datasets

    make_files("local/data", ["train.jsonl"], content='{"text": "a"}\n{"text": "b"}\n')
    load = datasets.load_dataset
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, **options: load("local/data", cache_dir="cache", **options)
    )
    datasets.disable_progress_bars()
    (file,) = find_record_files("org/name")
    assert [record for _, record in read_records(file)] == [{"text": "a"}, {"text": "b"}]


def test_digests_are_of_the_bytes_and_computed_once(folder, monkeypatch):
    files = find_record_files(["all/a.JSONL", "all/b.jsonl", "all/deep/d.json"])
    for file in files:
        os.utime(file.path, (1, 1))
    first = digest_files(files, folder / "cache")
    assert len(set(first)) == 1 and len(first) == 3  # equal contents
    with monkeypatch.context() as patched:
        patched.setattr(find_files, "_digest_content", lambda file: pytest.fail("read again"))
        assert digest_files(files, folder / "cache") == first
    files[0].path.write_text('{"text": "b"}\n')  # of the same size
    os.utime(files[0].path, (2, 2))
    changed = digest_files(files, folder / "cache")
    assert changed[0] != first[0] and changed[1:] == first[1:]
    files[1].path.unlink()
    assert digest_files([files[0], files[2]], folder / "cache") == [changed[0], changed[2]]
    table = json.loads((folder / "cache/digests.json").read_text())
    assert sorted(table) == sorted(str(folder / file.path) for file in (files[0], files[2]))


def test_digest_of_a_file_just_written_is_not_kept(folder):
    files = find_record_files("all/b.jsonl")
    (first,) = digest_files(files, folder / "cache")
    times = os.stat("all/b.jsonl")
    make_files("all", ["b.jsonl"], content='{"text": "z"}\n')
    os.utime("all/b.jsonl", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert digest_files(files, folder / "cache") != [first]


@pytest.mark.parametrize("table", ["", "[]", '{"x": 1}', "{", '{"FILE": [14, 1000000000, 7]}'])
def test_damaged_table_of_digests_is_ignored(folder, table):
    files = find_record_files("all/b.jsonl")
    os.utime("all/b.jsonl", (1, 1))
    make_files("cache", ["digests.json"], content=table.replace("FILE", str(folder / "all/b.jsonl")))
    (digest,) = digest_files(files, folder / "cache")
    assert len(digest) == 32
    assert json.loads((folder / "cache/digests.json").read_text()) == {
        str(folder / "all/b.jsonl"): [14, 1_000_000_000, digest]
    }


def test_file_that_changes_while_it_is_digested_is_an_error(folder, monkeypatch):
    digest = find_files._digest_content

    def change(file):
        found = digest(file)
        make_files("all", ["b.jsonl"], content="longer" * 9)
        return found

    monkeypatch.setattr(find_files, "_digest_content", change)
    with pytest.raises(ValueError, match="b.jsonl changed while it was read"):
        digest_files(find_record_files("all/b.jsonl"), folder / "cache")


@pytest.mark.parametrize(
    ("content", "expected"),
    {
        '{"text": "a"}\n{"text": "b"}': True,
        '\ufeff{"messages": []}': True,
        '[\n {"instruction": "a"},\n {}]': True,
        '{"a": 1}\n': False,
        '{\n "text": "a"}': False,
        '[{"a": 1}]': False,
        '["text"]': False,
        "text": False,
        "": False,
    }.items(),
)
def test_json_holds_records_by_its_first_fields(folder, content, expected):
    make_files("j", ["a.json"], content=content)
    assert holds_records(folder / "j/a.json") == holds_records(folder / "j") == expected
