"""The committed adapter fixtures are those of the script, which reproduces them if PEFT is installed."""

import json
from pathlib import Path

import pytest

from scripts import make_adapter_fixtures

from .reproduction import assert_made_again

ROOT = Path(__file__).parents[2]
ADAPTERS = ROOT / "tests/fixtures/adapters"
FILES = {"adapter_config.json", "adapter_model.safetensors", "expected.safetensors", "meta.json"}


def test_fixtures_are_complete_and_small():
    folders = {path.name: path for path in [*ADAPTERS.iterdir(), ROOT / "docs/fixtures/peft"]}
    assert set(folders) == set(make_adapter_fixtures.CASES)
    for name, folder in folders.items():
        case, meta = make_adapter_fixtures.CASES[name], json.loads((folder / "meta.json").read_text())
        assert {path.name for path in folder.iterdir() if path.is_file()} == FILES, name
        assert (meta["note"], meta["base"]) == (case.note, case.base)
    assert sum(path.stat().st_size for path in ADAPTERS.rglob("*") if path.is_file()) < 400_000


def test_fixture_of_the_tutorial_has_its_base():
    base = ROOT / "tests/fixtures/models" / make_adapter_fixtures.CASES["peft"].base
    for path in (ROOT / "docs/fixtures/peft/base").iterdir():
        assert path.read_bytes() == (base / path.name).read_bytes()


def test_fixtures_without_peft_raise(monkeypatch, tmp_path):
    monkeypatch.setattr(make_adapter_fixtures, "peft", None)
    with pytest.raises(SystemExit, match="pip install torch"):
        make_adapter_fixtures.main(out=tmp_path)


@pytest.mark.neighbors("peft", "transformers")
@pytest.mark.filterwarnings("default")
def test_fixtures_are_reproduced(tmp_path):
    make_adapter_fixtures.main(out=tmp_path, only=("adalora_allocated",))
    assert_made_again(tmp_path / "adalora_allocated", ADAPTERS / "adalora_allocated")
