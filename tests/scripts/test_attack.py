"""The attacks find what they look for, and a small share of them finds nothing."""

import random
import shutil

import numpy as np
import pytest

from scripts.attack import hostile_files, mutate_datasets, mutate_models, mutate_records
from scripts.attack.mutations import MUTATIONS, WHOLE, build_arrays, read_arrays, read_files, write_files
from scripts.attack.watched import HANG, RAW, Watched, print_table

LLAMA = hostile_files.MODEL


@pytest.mark.parametrize("kind", MUTATIONS)
def test_mutations_of_a_model_are_refused_or_load_equal(kind, tmp_path):
    for name in ("llama_sharded", "gpt2", "qwen2_moe"):
        source, rng = LLAMA.parent / name, random.Random(name)
        files = read_files(source)
        what = MUTATIONS[kind](files, rng)
        write_files(tmp_path / name, files)
        outcome, detail = mutate_models.load_case((tmp_path / name, source))
        assert outcome in (mutate_models.REFUSED, mutate_models.EQUAL), (what, detail)


def test_mutations_report_a_silently_wrong_model(tmp_path):
    files = read_files(LLAMA)
    arrays = read_arrays(files[WHOLE])
    write_files(tmp_path / "same", files | {WHOLE: build_arrays(arrays)})
    assert mutate_models.load_case((tmp_path / "same", LLAMA)) == (mutate_models.EQUAL, "")
    arrays["model.norm.weight"] = np.nextafter(arrays["model.norm.weight"], np.float32(9))
    write_files(tmp_path / "other", files | {WHOLE: build_arrays(arrays)})
    assert mutate_models.load_case((tmp_path / "other", LLAMA)) == (mutate_models.WRONG, "other numbers")


def test_mutations_of_records_are_refused_or_read_as_json(tmp_path):
    binary = ("parquet", "arrow", "array_record")  # their readers are not Python: one that dies would end the tests
    sources = [source for source in mutate_records.make_files(tmp_path) if source.name not in binary]
    assert len(sources) >= 5
    for number in range(150):
        rng = random.Random(number)
        source = sources[number % len(sources)]
        (path,) = source.iterdir()
        mutated = tmp_path / f"{number}" / path.name
        mutated.parent.mkdir()
        mutated.write_bytes(mutate_records.mutate(path.read_bytes(), rng.choice(mutate_records.KINDS), rng))
        outcome, detail = mutate_records.read_case((mutated.parent, source))
        assert outcome in mutate_records.OUTCOMES[:4], (number, path.name, detail)


def test_mutations_report_a_wrong_record(tmp_path, monkeypatch):
    source = mutate_records.make_files(tmp_path)[0]
    assert mutate_records.read_case((source, source)) == (mutate_records.EQUAL, "")
    found = mutate_records.read(source)
    monkeypatch.setattr(mutate_records, "read", lambda directory: [*found[:-1], (found[-1][0], {})])
    assert mutate_records.read_case((source, source)) == (mutate_records.WRONG, f"{found[-1][0]}: {{}}")
    monkeypatch.setattr(mutate_records, "read", lambda directory: found[:-1])
    assert mutate_records.read_case((source, source)) == (mutate_records.WRONG, "other places")


@pytest.mark.parametrize("kind", mutate_datasets.KINDS)
def test_mutations_of_a_dataset_are_refused_or_loaded_as_written(kind, tmp_path):
    sources = [source for source in mutate_datasets.make_files(tmp_path) if source.name.startswith(kind)]
    assert mutate_datasets.load_case((sources[0], sources[0])) == (mutate_datasets.EQUAL, "")
    for number, source in enumerate(2 * sources[:3]):  # a reader that dies of a Parquet file would end the tests
        rng = random.Random(f"{kind} {number}")
        (path,) = source.iterdir()
        mutated = tmp_path / f"{number}" / path.name
        mutated.parent.mkdir()
        what, content = mutate_datasets.mutate(path, rng)
        mutated.write_bytes(content)
        outcome, detail = mutate_datasets.load_case((mutated.parent, source))
        assert outcome in mutate_datasets.OUTCOMES[:4], (number, what, path.name, detail)


def test_mutations_report_a_wrong_text_and_a_wrong_mask(tmp_path, monkeypatch):
    (source, *_) = [path for path in mutate_datasets.make_files(tmp_path) if path.name == "chat-jsonl"]
    assert mutate_datasets.load_case((source, source)) == (mutate_datasets.EQUAL, "")
    read = mutate_datasets.Setup.read_items
    for change in ({"texts": ("",)}, {"trained": ("",)}):
        wrong = lambda self, data, change=change: [item._replace(**change) for item in read(self, data)]
        monkeypatch.setattr(mutate_datasets.Setup, "read_items", wrong)
        outcome, detail = mutate_datasets.load_case((source, source))
        assert outcome == mutate_datasets.WRONG and detail.startswith("chat: [Item(")


def test_watched_cases_that_hang_or_fail(capsys):
    watched = Watched(eval, "0", seconds=0.5)
    assert watched.run("('fine', 'x')") == ("fine", "x")
    outcome, detail = watched.run("1 / 0")
    assert outcome == RAW and "ZeroDivisionError" in detail
    assert watched.run("__import__('time').sleep(9)") == (HANG, "")
    assert watched.run("__import__('os')._exit(1)") == (HANG, "")
    assert watched.run("('fine', 'again')") == ("fine", "again")
    watched.close()
    assert print_table({"a": {"fine": 2}}, ("fine", RAW), {RAW: []}, 1) == 0
    assert print_table({"a": {RAW: 2}}, ("fine", RAW), {RAW: ["first", "second"]}, 1) == 1
    assert capsys.readouterr().out.endswith("\nraw traceback: first\n")


@pytest.mark.parametrize("name", sorted({*hostile_files.LINKS} - {"convert over links", "fork over links"}))
def test_links_are_not_followed(name, tmp_path):
    assert hostile_files.attack_with_links(tmp_path, name) == (hostile_files.NOTHING, "")


def test_links_that_are_followed_are_reported(tmp_path, monkeypatch):
    monkeypatch.setitem(hostile_files.LINKS, "copy", lambda folder, victim: shutil.copy(LLAMA / "config.json", victim))
    assert hostile_files.attack_with_links(tmp_path, "copy")[0] == hostile_files.DONE
