"""The committed reference cases are those of the script, and it makes them again where transformers is installed."""

import json
from pathlib import Path

import pytest

from scripts import make_fixtures

from .reproduction import assert_made_again

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "tests/fixtures/models"
FILES = {"config.json", "config_hub.json", "expected.safetensors", "meta.json"}


def test_fixtures_are_complete_and_small():
    metas = {path: json.loads((path / "meta.json").read_text()) for path in MODELS.iterdir()}
    of_others = {path for path, meta in metas.items() if meta.get("format") == "fla" or meta.get("mtp")}
    folders = {path.name: path for path in metas.keys() - of_others}
    folders |= {name: ROOT / "docs/fixtures" / name for name in make_fixtures.PAGES}
    assert set(folders) == set(make_fixtures.CASES)
    for name, folder in folders.items():
        files = {path.name for path in folder.iterdir()}
        assert files > FILES and any(file.startswith("model") for file in files), name
        assert json.loads((folder / "meta.json").read_text())["note"] == make_fixtures.CASES[name].note
    assert sum(file.stat().st_size for path in folders.values() for file in path.iterdir()) < 50_000 * len(folders)
    assert sum(file.stat().st_size for path in of_others for file in path.iterdir()) < 350_000 * len(of_others)


def test_fixtures_without_transformers_raise(monkeypatch, tmp_path):
    monkeypatch.setattr(make_fixtures, "transformers", None)
    with pytest.raises(SystemExit, match="pip install torch"):
        make_fixtures.main(out=tmp_path)


@pytest.mark.neighbors("torch", "transformers")
@pytest.mark.filterwarnings("default")
def test_fixtures_are_reproduced(tmp_path):
    make_fixtures.main(out=tmp_path, only=("gpt2_hub",))
    assert_made_again(tmp_path / "gpt2_hub", MODELS / "gpt2_hub")
