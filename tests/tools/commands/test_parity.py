"""`zoo parity`: reports agreement with PyTorch, and names the first wrong layer."""

import json
import shutil
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.cli import main
from zoo.tools.parity.report import relative_error

FIXTURES = Path(__file__).parents[2] / "fixtures" / "models"


@pytest.fixture
def qwen3(tmp_path):
    return Path(shutil.copytree(FIXTURES / "qwen3", tmp_path / "qwen3"))


def test_parity_with_stored_results(qwen3, capsys):
    main(["parity", str(qwen3)])
    text = capsys.readouterr().out
    assert "layer 1 (attention, gated_mlp) and the final norm" in text and "all within tolerance" in text
    # the five largest gradient errors, and PyTorch's error in bfloat16
    assert text.count("gradient of") == 5 and "--all shows them" in text and "PyTorch's" in text
    main(["parity", str(qwen3), "--all", "--json", "--expected", str(qwen3 / "expected.safetensors")])
    report = json.loads(capsys.readouterr().out)
    logits = next(line for line in report["lines"] if line["name"] == "logits")
    assert report["passed"] and logits["error"] < 1e-5
    assert 0 < logits["bfloat16"] < 3 * logits["theirs"]


def test_parity_names_the_first_wrong_layer(qwen3, capsys):
    """One wrong number in layer 1: later activations are wrong too, but alone only that layer is."""
    model = zoo.load(qwen3)
    weight = model.stack.segments[0].blocks[0].ffn.down.weight
    zoo.save(with_weight(model, weight.at[1, 0, 0].add(jnp.asarray(0.5, weight.dtype))), qwen3)
    with pytest.raises(SystemExit) as stopped:
        main(["parity", str(qwen3)])
    text = capsys.readouterr().out
    assert stopped.value.code == 1
    assert "Look first at layer 1" in text and "<- out of tolerance" in text
    layer = next(line for line in text.splitlines() if line.startswith("layer 0"))
    assert "out of tolerance" not in layer


def with_weight(model, weight):
    return eqx.tree_at(lambda model: model.stack.segments[0].blocks[0].ffn.down.weight, model, weight)


def test_parity_errors_name_the_problem(qwen3, tmp_path, capsys):
    family = tmp_path / "two.py"
    family.write_text("from zoo.models.hf.families import FAMILIES\na, b = FAMILIES['llama'], FAMILIES['gemma']\n")
    (tmp_path / "none.safetensors").write_bytes((qwen3 / "model.safetensors").read_bytes())
    for words, message in (
        (["--expected", "nowhere.safetensors"], "there is no file nowhere.safetensors"),
        (["--expected", str(tmp_path / "none.safetensors")], "expectations need input_ids"),
        (["--family", "nowhere.py"], "there is no Python file nowhere.py"),
        (["--family", str(family)], "should define one zoo.models.Family, and has 2: a, b"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["parity", str(qwen3), *words])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err


def test_relative_error_of_non_finite_or_other_shape_is_infinite():
    wanted = np.ones((2, 3), np.float32)
    assert relative_error(wanted, wanted) == 0
    assert relative_error(wanted[:1], wanted) == relative_error(wanted * np.nan, wanted) == float("inf")
