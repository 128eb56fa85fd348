"""Option groups of recipes: flattened flags and configurations."""

import dataclasses
import math
import typing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import pytest

import zoo
from zoo import train
from zoo.ops.attention import ATTENTION
from zoo.ops.moe.grouped_matmul import GROUPED_MATMUL
from zoo.ops.recurrence.delta_rule import DELTA_RULE
from zoo.parallel import SEQUENCE, ZERO1, ZERO2, ZERO3
from zoo.parallel.gradient import GPIPE
from zoo.parallel.layout import CONTEXT_FORMS
from zoo.train.options import flatten_config


@dataclass(frozen=True)
class Config:
    """A recipe's configuration."""

    steps: int = 2  # Optimizer steps.
    mesh: train.MeshOptions = train.MeshOptions(remat="full")
    run: train.RunOptions = train.RunOptions(Path("runs/x"))


def parse(*words: str, presets=None) -> Config:
    return train.run_cli(lambda config: config, Config, presets, arguments=words)


def test_option_groups_are_flat_flags(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--fsdp", "8", "--resume", "--out", "runs/y", "--zero-stage", "1", "--seed", "3"]
    mesh_options = train.MeshOptions(fsdp=8, zero_stage=1, remat="full")
    assert parse(*words) == Config(2, mesh_options, train.RunOptions(Path("runs/y"), 3, resume=True))
    presets = {"large": Config(mesh=train.MeshOptions(remat="dots"))}
    assert parse("large", "--tensor", "2", presets=presets).mesh == train.MeshOptions(remat="dots", tensor=2)
    with pytest.raises(SystemExit):
        parse("--help")
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--microbatches" in printed and "Continue from the newest checkpoint" in printed
    assert "Optimizer steps. (default: 2)" in printed


@pytest.mark.parametrize(
    ("words", "resume"), [([], False), (["--resume"], True), (["--resume", "200"], 200), (["--resume", "0"], 0)]
)
def test_resume_takes_a_step_or_none(tmp_path, words, resume):
    options = parse("--out", str(tmp_path), *words, "--seed", "3").run
    assert options == train.RunOptions(tmp_path, 3, resume=resume) and type(options.resume) is type(resume)


@pytest.mark.parametrize("words", [["-1"], ["newest"], ["1", "2"]])
def test_resume_refuses_other_words(capsys, words):
    with pytest.raises(SystemExit, match="2"):
        parse("--resume", *words)
    assert "resume" in capsys.readouterr().err


def test_mesh_options_make_the_mesh():
    mesh = train.MeshOptions(fsdp=2, tensor=2, zero_stage=1).make_mesh()
    assert mesh == train.MeshOptions(fsdp=2, tensor=2, zero_stage=1).make_mesh()
    assert mesh != train.MeshOptions(fsdp=2, tensor=2).make_mesh()
    assert str(jax.device_count() // 4) in str(mesh)
    stages = [train.MeshOptions(fsdp=2, zero_stage=stage).make_mesh().layout for stage in (1, 2, 3)]
    assert stages == [ZERO1, ZERO2, ZERO3]


def test_mesh_options_that_fit_no_mesh_are_named_as_flags():
    for sizes, flags in (({"fsdp": 3}, "--fsdp 3"), ({"fsdp": 3, "tensor": 2}, "--fsdp 3 --tensor 2")):
        asked = math.prod(sizes.values())
        expected = f"{flags} takes a multiple of {asked} devices, and there are 8: let the flags multiply to a divisor"
        with pytest.raises(ValueError, match=f"^{expected} of 8"):
            train.MeshOptions(**sizes).make_mesh()
    with pytest.raises(ValueError, match="XLA_FLAGS=--xla_force_host_platform_device_count=16"):
        train.MeshOptions(fsdp=16).make_mesh()


def test_mesh_options_shard_the_sequence():
    mesh = train.MeshOptions(tensor=2, context=2, context_attention="heads", sequence_parallel=True).make_mesh()
    assert (mesh.shape["context"], mesh.axes("seq"), mesh.axes("tokens")) == (2, ("context",), ("context", "tensor"))
    assert mesh.layout == dataclasses.replace(SEQUENCE, context="heads")
    both = train.MeshOptions(fsdp=2, tensor=2, zero_stage=2, sequence_parallel=True).make_mesh().layout
    assert both == ZERO2.with_dims(tokens=("context", "tensor"))
    assert set(typing.get_args(typing.get_type_hints(train.MeshOptions)["context_attention"])) == set(CONTEXT_FORMS)
    assert train.MeshOptions(expert=2).make_mesh().axes("experts") == ("expert",)


def test_mesh_options_make_a_pipeline():
    options = train.MeshOptions(pipe=2, schedule="1f1b", rounds=2, microbatches=4, fsdp=2, zero_stage=2)
    mesh = options.make_mesh()
    assert (mesh.shape["pipe"], mesh.layout) == (2, dataclasses.replace(ZERO2, rounds=2))
    assert options.accumulation == {"microbatches": 4, "schedule": zoo.parallel.Schedule("1f1b")}
    assert train.MeshOptions(microbatches=3).accumulation == {"microbatches": 3, "schedule": GPIPE}
    for ignored in (train.MeshOptions(schedule="1f1b"), train.MeshOptions(rounds=2)):
        with pytest.raises(ValueError, match="schedule=.* and rounds=.* are of a pipeline: set pipe above 1"):
            ignored.make_mesh()


def test_config_is_flat_and_leaves_out_resume_and_profile():
    config = Config(3, train.MeshOptions(fsdp=2), train.RunOptions(Path("a")))
    flat = flatten_config(config)
    assert flat == flatten_config({"steps": 3, "mesh_options": config.mesh, "run_options": config.run})
    assert flat["steps"] == 3 and flat["fsdp"] == 2 and flat["out"] == Path("a") and flat["seed"] == 0
    assert not flat.keys() & {"mesh", "run", "resume", "profile", "watchdog", "no_compile_cache", "deterministic"}
    assert flatten_config({"profile": True, "a": 1}) == {"a": 1}


def test_subrun_is_a_subdirectory():
    options = train.RunOptions(Path("runs/x"), seed=1, resume=True)
    assert options.subrun("a") == train.RunOptions(Path("runs/x/a"), seed=1, resume=True)


def test_mesh_options_apply_to_a_model():
    make = partial(zoo.models.Transformer, vocab=16, embed=8, heads=2, layers=2, mlp=8)
    model = eqx.filter_eval_shape(make, key=jax.random.key(0))
    stack: Any = train.MeshOptions(remat="full", attention="blockwise").apply(model).stack
    assert (stack.remat, stack.segments[0].blocks[0].mixer.implementation) == ("full", "blockwise")
    with pytest.raises(ValueError, match="recurrence='chunked': Decoder has no layer"):
        train.MeshOptions(recurrence="chunked").apply(model)


def test_mesh_options_name_all_implementations():
    names = {name: typing.get_args(kind) for name, kind in typing.get_type_hints(train.MeshOptions).items()}
    assert sorted(names["attention"]) == sorted(ATTENTION.names)
    assert sorted(names["recurrence"]) == sorted(DELTA_RULE.names)
    assert sorted(names["grouped_matmul"]) == sorted(GROUPED_MATMUL.names)
