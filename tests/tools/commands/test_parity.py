"""`zoo parity`: reports agreement with PyTorch, and names the first wrong layer, or step of training."""

import json
import shutil
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.cli import main
from zoo.tools.parity.comparison import norm_error, relative_error

FIXTURES = Path(__file__).parents[2] / "fixtures" / "models"
RUN = Path(__file__).parents[3] / "docs" / "fixtures" / "llama_training"


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
        (["--family", str(family)], "should define one zoo.models.hf.grammar.Family, and has 2: a, b"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["parity", str(qwen3), *words])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err


def test_relative_error_of_non_finite_or_other_shape_is_infinite():
    wanted = np.ones((2, 3), np.float32)
    assert relative_error(wanted, wanted) == 0
    assert relative_error(wanted[:1], wanted) == relative_error(wanted * np.nan, wanted) == float("inf")
    assert relative_error(None, wanted) == norm_error(None, wanted) == norm_error(wanted[:1], wanted) == float("inf")


def test_training_run_is_compared_step_by_step(tmp_path, capsys):
    run = Path(shutil.copytree(RUN, tmp_path / "run"))
    main(["parity", "--train", str(run), "--steps", "2"])
    text = capsys.readouterr().out
    assert "2 of 20 steps, 164 comparisons, all within tolerance" in text
    facts = json.loads((run / "run.json").read_text())
    facts["learning_rates"][1] *= 1.1
    (run / "run.json").write_text(json.dumps(facts))
    for words in ([], ["--json"]):
        with pytest.raises(SystemExit) as stopped:
            main(["parity", "--train", str(run), "--steps", "2", *words])
        assert stopped.value.code == 1
        text = capsys.readouterr().out
        if not words:
            assert "Step 1 is the first out of tolerance, in the optimizer: update of model.embed_tokens.weight" in text
    report = json.loads(text)
    assert report["first"] == {"step": 1, "phase": "optimizer", "comparison": "update of model.embed_tokens.weight"}
    assert not report["passed"] and len(report["steps"][1]["moments"]) == 40


def test_options_of_training_name_what_they_need(tmp_path, capsys):
    for words, message in (
        ([], "expected either a checkpoint directory or --train with the folder of a stored run"),
        (["somewhere", "--train", str(RUN)], "either a checkpoint directory or --train"),
        (["--train", str(RUN), "--expected", "a.safetensors"], "leave it out with --train"),
        (["somewhere", "--steps", "2"], "it needs --train"),
        (["--train", str(RUN), "--steps", "21"], "steps should be from 1 to 20, and is 21"),
        (["--train", str(tmp_path)], "expected a run of scripts/train_in_torch.py"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["parity", *words])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
