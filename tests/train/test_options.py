"""Option groups of recipes: flattened flags and configurations."""

from pathlib import Path

import jax
import pytest

from zoo import train
from zoo.train.options import flatten_config


def main(
    *,
    steps: int = 2,
    mesh_options: train.MeshOptions = train.MeshOptions(remat="full"),
    run_options: train.RunOptions = train.RunOptions(Path("runs/x")),
):
    """Return the arguments.

    Args:
        steps: Optimizer steps.
    """
    return steps, mesh_options, run_options


def test_option_groups_are_flat_flags(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--fsdp", "8", "--resume", "--out", "runs/y", "--zero-stage", "1", "--seed", "3"]
    mesh_options = train.MeshOptions(fsdp=8, zero_stage=1, remat="full")
    assert train.run_cli(main, arguments=words) == (2, mesh_options, train.RunOptions(Path("runs/y"), 3, resume=True))
    presets = {"large": {"mesh_options": train.MeshOptions(remat="dots")}}
    assert train.run_cli(main, presets=presets, arguments=["large", "--tensor", "2"])[1].remat == "dots"
    with pytest.raises(SystemExit):
        train.run_cli(main, arguments=["--help"])
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--microbatches" in printed and "Continue from the newest checkpoint" in printed


@pytest.mark.parametrize(
    ("words", "resume"), [([], False), (["--resume"], True), (["--resume", "200"], 200), (["--resume", "0"], 0)]
)
def test_resume_takes_a_step_or_none(tmp_path, words, resume):
    options = train.run_cli(main, arguments=["--out", str(tmp_path), *words, "--seed", "3"])[2]
    assert options == train.RunOptions(tmp_path, 3, resume=resume) and type(options.resume) is type(resume)


@pytest.mark.parametrize("words", [["-1"], ["newest"], ["1", "2"]])
def test_resume_refuses_other_words(capsys, words):
    with pytest.raises(SystemExit, match="2"):
        train.run_cli(main, arguments=["--resume", *words])
    assert "resume" in capsys.readouterr().err


def test_mesh_options_make_the_mesh():
    mesh = train.MeshOptions(fsdp=2, tensor=2, zero_stage=1).make_mesh()
    assert mesh == train.MeshOptions(fsdp=2, tensor=2, zero_stage=1).make_mesh()
    assert mesh != train.MeshOptions(fsdp=2, tensor=2).make_mesh()
    assert str(jax.device_count() // 4) in str(mesh)


def test_config_is_flat_and_leaves_out_resume_and_profile():
    config = {"steps": 3, "mesh_options": train.MeshOptions(fsdp=2), "run_options": train.RunOptions(Path("a"))}
    flat = flatten_config(config)
    assert flat["steps"] == 3 and flat["fsdp"] == 2 and flat["out"] == Path("a") and flat["seed"] == 0
    assert not flat.keys() & {"mesh_options", "run_options", "resume", "profile", "no_compile_cache"}
    assert flatten_config({"profile": True, "a": 1}) == {"a": 1}


def test_subrun_is_a_subdirectory():
    options = train.RunOptions(Path("runs/x"), seed=1, resume=True)
    assert options.subrun("a") == train.RunOptions(Path("runs/x/a"), seed=1, resume=True)
