"""Rules for the files of the repository, and the contents of the wheel."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
LONGEST = 500

# Concatenated, so that this file does not contain them.
HOSTS = ("py" + "pi.org", "pythonhosted" + ".org", "anaconda" + ".org", "npm" + "js.org", "npm" + "js.com")
# Absolute paths of one machine.
MACHINE = re.compile(r"(?<![\w.:/~$}<>-])/(?:home|root|Users|work|workspace|scratch)/[\w.-]")


def sources() -> list[Path]:
    return sorted([*ROOT.glob("zoo/**/*.py"), *ROOT.glob("recipes/**/*.py")])


def tracked() -> list[Path]:
    """Every file that git tracks or would add; without git, the sources."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode:
        return sources()
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_files_stay_short():
    lengths = {path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines()) for path in sources()}
    assert not {path: length for path, length in lengths.items() if length > LONGEST}


def test_every_public_module_has_a_docstring():
    public = [path for path in sources() if path.stem == "__init__" or not path.stem.startswith("_")]
    bare = [path for path in public if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))]
    assert not [str(path.relative_to(ROOT)) for path in bare]


def test_no_package_host_is_mentioned():
    found = []
    for path in tracked():
        text = path.read_bytes().decode("utf-8", errors="ignore")
        found += [f"{path.relative_to(ROOT)}: {host}" for host in HOSTS if host in text]
    assert not found


def test_no_absolute_paths_of_one_machine():
    found = []
    for path in tracked():
        lines = path.read_bytes().decode("utf-8", errors="ignore").splitlines()
        found += [f"{path.relative_to(ROOT)}:{n}" for n, line in enumerate(lines, start=1) if MACHINE.search(line)]
    assert not found


def test_every_slow_test_is_scheduled():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "slow.yml").read_text(encoding="utf-8"))
    jobs = workflow["jobs"]["slow"]["strategy"]["matrix"]["tests"]
    scheduled = [ROOT / name for job in jobs for name in job.split()]
    assert all(path.exists() for path in scheduled) and len(set(scheduled)) == len(scheduled)
    marks = re.compile(r"mark\.slow|mark_slow")
    others = sorted({*ROOT.glob("tests/**/test_*.py")} - {Path(__file__)})
    slow = [path for path in others if marks.search(path.read_text(encoding="utf-8"))]
    assert len(slow) > 50
    assert not [path for path in slow if not any(path.is_relative_to(place) for place in scheduled)]


def test_wheel_contains_recipes_and_types(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    recipes = {f"zoo/{path.relative_to(ROOT).as_posix()}" for path in ROOT.glob("recipes/*.py")}
    assert recipes
    assert names >= recipes | {"zoo/__init__.py", "zoo/py.typed"}
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"zoo"}

    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    command = [sys.executable, "-P", "-m", "zoo.cli", "fork", "transformer"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "zoo fork finetune" in (tmp_path / "transformer.py").read_text()
