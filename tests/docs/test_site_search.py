"""The site's search: guides come before the API, and no word breaks it."""

import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import browse_site, site_search

material = pytest.importorskip("material")

THEME = Path(material.__file__).parent / "templates"
FIRST = {
    "lora": "adapters.html",
    "sft": "sft.html",
    "batch size": "choose_mesh.html",
    "checkpoint": "checkpoints.html",
    "gradient clipping": "train.html",
    "mamba": "recurrences.html",
    "pipeline": "pipelines.html",
    "fsdp": "parallelism.html",
    "resume": "resume.html",
    "BatchNorm": "tutorials/from-pytorch-2.html",
    "pmap": "tutorials/from-pytorch-3.html",
    "GSPMD": "tutorials/from-pytorch-3.html",
    "Flax": "tutorials/from-flax.html",
    "Haiku": "tutorials/from-flax.html",
    "Pax": "tutorials/from-flax.html",
    "StableHLO": "read-a-program.html",
    "jax.export": "export.html",
    "DLPack": "arrays.html",
    "Hessian": "second-derivatives.html",
    "XLA flags": "read-a-program.html",
    "evaluate": "evaluate.html",
    "muon": "optimizers.html",
    "DPO": "preferences.html",
    "KTO": "preferences.html",
    "size": None,
    "cuda": None,
}
"""The page that the search puts first, or none in particular, by what a reader types."""
DATA = ("sft", "chat", "instruction", "jsonl", "dataset", "finetune", "huggingface")
"""Words by which a reader finds the pages on data and supervised fine-tuning."""

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="Node runs the theme's worker")


@pytest.fixture
def site(tmp_path):
    """A site of one page with numbers for which lunr's automaton mixes up its states; few sets of numbers do."""
    worker = next(THEME.glob(site_search.WORKERS))
    folder = tmp_path / "assets" / "javascripts" / "workers"
    folder.mkdir(parents=True)
    shutil.copy(worker, folder)
    draw = random.Random(7)
    text = " ".join(str(draw.randrange(10**6)) for _ in range(2000))
    docs = [{"location": "page.html", "title": "Numbers", "text": f"<p>{text}</p>"}]
    fields = {"title": {"boost": 10}, "text": {"boost": 1}, "tags": {"boost": 1}}
    config = {"lang": ["en"], "separator": r"[\s]+", "pipeline": ["stopWordFilter"], "fields": fields}
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "search_index.json").write_text(json.dumps({"config": config, "docs": docs}))
    return tmp_path


@needs_node
def test_mended_search_finds_words_with_digits(site):
    assert list(site_search.find_faults(site)), "lunr needs no mending any more"
    (worker,) = site.glob(site_search.WORKERS)
    worker.write_text(site_search.mend_worker(worker.read_text(encoding="utf-8")), encoding="utf-8")
    assert list(site_search.find_faults(site)) == []
    answers = site_search.ask(site, ["7", "76", "763", "8", "87"])
    assert [answer["found"] for answer in answers] == [["page.html"]] * 5


def test_mend_refuses_a_worker_of_another_form():
    with pytest.raises(ValueError, match="found 0 times"):
        site_search.mend_worker("e=e+s")


def test_front_matter_overrides_boosts():
    def read(path, **meta):
        page = SimpleNamespace(meta=meta, file=SimpleNamespace(src_uri=path))
        assert site_search.on_page_markdown("text", page=page) == "text"
        return page.meta["search"]

    assert read("api/zoo.md")["boost"] < read("glossary.md")["boost"] < read("train.md")["boost"]
    assert read("train.md", search={"boost": 7}) == {"boost": 7}
    assert read("tree.md", search={"exclude": True})["exclude"]


def test_words_are_those_of_the_index(site):
    words = site_search.list_words(site, count=200)
    assert {"a", "0", "z", "9"} <= set(words)
    assert "p" in words and "<p>000" not in words
    assert sum(" " in word for word in words) == 100


def ask(site, words):
    """Ask by Node, or by a browser where there is no Node."""
    if shutil.which("node"):
        return {answer["words"]: answer["found"] for answer in site_search.ask(site, words)}
    if browse_site.find_chromium() is None:
        pytest.skip("neither Node nor Chromium")
    answers = browse_site.browse(site, widths=(), search=words)
    return {answer["words"]: answer["found"] or [] for answer in answers}


@pytest.mark.slow
def test_search_of_the_built_site(built):
    assert not shutil.which("node") or list(site_search.find_faults(built)) == []
    found = ask(built, list(FIRST))
    assert [words for words in FIRST if not found[words]] == []
    first = {words: places[0].partition("#")[0].partition("?")[0] for words, places in found.items()}
    found = ask(built, DATA)
    pages = ("your-data.html", "sft.html")
    missed = [word for word in DATA if not any(place.startswith(pages) for place in found[word][:4])]
    assert missed == [], {word: found[word][:4] for word in missed}
    assert {words: first[words] for words, page in FIRST.items() if page} == {k: v for k, v in FIRST.items() if v}
