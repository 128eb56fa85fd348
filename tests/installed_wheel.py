"""Fixture: the wheel, built from the source distribution and installed into an environment of its own."""

import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command, folder, environment=None):
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The `bin` folder of an environment that has the wheel, and the packages of this environment but not its zoo."""
    folder = tmp_path_factory.mktemp("release")
    build = (sys.executable, "-m", "hatchling", "build", "--directory", folder / "dist", "--target")
    run(*build, "sdist", folder=ROOT)
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    run(*build, "wheel", folder=unpacked)
    (wheel,) = (folder / "dist").glob("*.whl")
    run(sys.executable, "-m", "venv", folder / "venv", folder=folder)
    bin_folder = folder / "venv" / "bin"
    run(bin_folder / "python", "-m", "pip", "install", "--no-index", "--no-deps", wheel, folder=folder)
    (site_packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # The path only: files there that put a checkout on the path are not read.
    (site_packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return bin_folder
