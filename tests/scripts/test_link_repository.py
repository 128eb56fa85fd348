"""The site's link to its repository, and the command that installs from it."""

import subprocess
from pathlib import Path

import pytest

from scripts.link_repository import find_repository, on_config, on_page_markdown

ROOT = Path(__file__).parents[2]
HOME = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def clone(folder: Path, remote: str) -> Path:
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    subprocess.run(["git", "-C", str(folder), "remote", "add", "origin", remote], check=True)
    return folder


def config(folder: Path, repo_url: str | None = None) -> dict:
    file = str(folder / "mkdocs.yml")
    return {"config_file_path": file, "repo_url": repo_url, "repo_name": None, "edit_uri": None}


REMOTES = (
    "https://example.org/someone/equizoo.git",
    "https://someone:secret@example.org/someone/equizoo",
    "git@example.org:someone/equizoo.git",
    "ssh://git@example.org:2222/someone/equizoo.git",
)


@pytest.mark.parametrize("remote", REMOTES)
def test_repository_is_the_page_of_a_remote(tmp_path, remote):
    assert find_repository(clone(tmp_path, remote)) == "https://example.org/someone/equizoo"


def test_repository_is_none_for_a_folder_or_no_remote(tmp_path):
    assert find_repository(clone(tmp_path / "a", "/somewhere/equizoo")) is None
    subprocess.run(["git", "init", "-q", str(tmp_path / "b")], check=True)
    assert find_repository(tmp_path / "b") is None


def test_config_of_a_fork_links_to_the_fork(tmp_path):
    found = on_config(config(clone(tmp_path, REMOTES[2])))
    assert found["repo_url"] == "https://example.org/someone/equizoo"
    assert (found["repo_name"], found["edit_uri"]) == ("someone/equizoo", "edit/main/docs/")
    page = on_page_markdown(HOME, config=found)
    assert 'pip install "equizoo[train,text,hub,tools] @ git+https://example.org/someone/equizoo"\n' in page
    assert "REPOSITORY" in HOME and "REPOSITORY" not in page


def test_config_keeps_an_address_of_its_own(tmp_path):
    own = on_config(config(clone(tmp_path, REMOTES[0]), repo_url="https://example.org/own/equizoo"))
    assert (own["repo_url"], own["repo_name"]) == ("https://example.org/own/equizoo", "own/equizoo")


def test_page_stays_without_an_address(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    found = on_config(config(tmp_path))
    assert found["repo_url"] is None and found["edit_uri"] is None
    assert on_page_markdown(HOME, config=found) == HOME
