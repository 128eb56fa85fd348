"""A stored run of PyTorch: every step agrees, and a fault is named by its step, phase and tensor."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import zoo
from zoo.tools.parity import compare_training

RUN = Path(__file__).parents[3] / "docs" / "fixtures" / "llama_training"
KINDS = {"gradient", "first moment", "second moment", "update"}


@pytest.fixture
def run(tmp_path):
    return Path(shutil.copytree(RUN, tmp_path / "run"))


def change_facts(run, **changes):
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, **changes}))
    return facts


def change_tensors(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_every_step_agrees_with_pytorch():
    report = compare_training(RUN)
    assert report.passed, report.first_failure
    assert len(report.steps) == report.stored == 20
    names = json.loads((RUN / "run.json").read_text())["parameters"].keys()
    for step in report.steps:
        lines = (*step.gradients[:-1], *step.moments, *step.updates)
        assert sorted(line.name for line in lines) == sorted(f"{kind} of {name}" for kind in KINDS for name in names)
        # A hundredth of the tolerances, except for updates, which float32 rounds
        assert step.forward[0].error < 1e-6 and step.drift < 1e-6
        assert max(line.error for line in step.gradients) < 1e-5
        assert max(line.error for line in step.moments) < 2e-6
        assert max(line.error for line in step.updates) < 5e-5
    assert "20 of 20 steps, 1640 comparisons, all within tolerance" in str(report)
    assert len(str(report).splitlines()) == 1 + 11 + 2
    assert len(report.format(every_step=True).splitlines()) == 1 + 20 + 2


def double_gradient(x):
    """The identity, with a gradient that is twice too large."""
    return 2 * x - jax.lax.stop_gradient(x)


def loss_with_wrong_gradient(model, batch):
    return zoo.cross_entropy(zoo.patch(model, {"layers.1.attention": double_gradient}), batch)


def test_wrong_gradient_nearest_to_the_loss_is_named():
    report = compare_training(RUN, 1, loss_fn=loss_with_wrong_gradient)
    step, phase, line = report.first_failure
    assert (step, phase) == (0, "gradient") and 0.1 < line.error < 2
    assert line.name.startswith("gradient of model.layers.1.")
    wrong = {other.name.removeprefix("gradient of ") for other in report.steps[0].gradients if not other.passed}
    assert "model.layers.1.self_attn.o_proj.weight" in wrong and "model.layers.0.mlp.down_proj.weight" in wrong
    assert not wrong & {"model.norm.weight", "model.layers.1.mlp.down_proj.weight"}
    assert report.steps[0].forward[0].passed and all(x.passed for x in report.steps[0].moments)


def test_wrong_weight_is_an_error_of_the_forward_pass(run):
    def change(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][0] += 0.3

    change_tensors(run / "initial/model.safetensors", change)
    step, phase, line = compare_training(run, 1).first_failure
    assert (step, phase, line.name) == (0, "forward", "loss")


FAULTS = {
    "eps": ({"eps": 1e-6}, "update of "),
    "b1": ({"b1": 0.91}, "first moment of "),
    "b2": ({"b2": 0.951}, "second moment of "),
    "weight_decay": ({"weight_decay": 0.11}, "update of model.layers."),
    "clip": ({"clip": 0.71}, "first moment of "),
    "no weight decay": ({"decayed": []}, "update of model.layers."),
}


FAULT_CASES = [name if name in ("eps", "b2") else pytest.param(name, marks=pytest.mark.ci) for name in FAULTS]


@pytest.mark.parametrize("fault", FAULT_CASES)
def test_wrong_hyperparameter_is_an_error_of_the_optimizer(run, fault):
    changes, tensor = FAULTS[fault]
    change_facts(run, **changes)
    step, phase, line = compare_training(run, 1).first_failure
    assert (step, phase) == (0, "optimizer") and line.name.startswith(tensor)


def test_first_wrong_step_is_named_and_later_ones_agree_again(run, capsys):
    """A learning rate that is wrong in step 1 only, by an optimizer of one's own: steps start from PyTorch's state."""
    facts = change_facts(run)
    rates = np.array(facts["learning_rates"])
    rates[1] *= 1.01
    decays = lambda params: jax.tree.map(lambda x: x.ndim == 3, params)  # stacked matrices; the embedding has two dims
    adamw = optax.adamw(lambda step: jax.numpy.asarray(rates)[step], 0.9, 0.95, weight_decay=0.1, mask=decays)
    report = compare_training(run, 3, optimizer=optax.chain(optax.clip_by_global_norm(0.7), adamw))
    first = report.first_failure
    assert (first.step, first.phase) == (1, "optimizer") and 0.005 < first.comparison.error < 0.02
    assert report.steps[0].first_failure is None and report.steps[2].first_failure is None
    assert "Step 1 is the first out of tolerance, in the optimizer: update of " in str(report)


def test_damaged_runs_are_refused_by_name(run):
    raises = lambda words: pytest.raises(zoo.CheckpointError, match=words)
    with raises("has 20 steps: steps should be from 1 to 20, and is 21"):
        compare_training(run, 21)
    with raises("run.json: expected a run of scripts/train_in_torch.py"):
        compare_training(run / "initial")
    facts = change_facts(run, b2=1.5)
    with raises("run.json: b2 should be a number from 0 to below 1"):
        compare_training(run)
    names = facts["parameters"]
    change_facts(run, b2=0.95, parameters={**names, "model.layers.2.mlp.up_proj.weight": [4, 8]})
    with raises("a parameter model.layers.2.mlp.up_proj.weight, which the model in .* has not; did you mean"):
        compare_training(run)
    change_facts(run, parameters={**names, "model.norm.weight": [9]})
    with raises(r"model.norm.weight is \[9\] in the run, and \[8\] in the model"):
        compare_training(run)
    change_facts(run, parameters={name: names[name] for name in names if name != "model.norm.weight"})
    with raises("the model has a parameter model.norm.weight, which the run has not trained"):
        compare_training(run)
    change_facts(run, parameters=names)
    change_tensors(run / "step-0000.safetensors", lambda tensors: tensors.update(weights=tensors["weights"][1:]))
    with raises(r"weights is \[711\]: expected \[712\]"):
        compare_training(run)
    change_tensors(run / "step-0000.safetensors", lambda tensors: tensors.pop("loss"))
    with raises("step-0000.safetensors has no loss, but "):
        compare_training(run)
    (run / "step-0000.safetensors").unlink()
    with raises("step-0000.safetensors cannot be read"):
        compare_training(run)


def test_optimizers_that_cannot_be_compared_are_refused(run):
    with pytest.raises(ValueError, match="the optimizer has 0 states with mu and nu"):
        compare_training(RUN, 1, optimizer=optax.sgd(0.1))
    name = "model.layers.1.mlp.up_proj.weight"
    facts = change_facts(run)
    change_facts(run, decayed=[other for other in facts["decayed"] if other != name])
    with pytest.raises(ValueError, match=f"model.layers.0.mlp.up_proj.weight decays and {name} does not"):
        compare_training(run)


@pytest.mark.neighbors("torch", "transformers")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_of_the_script_agrees(tmp_path, dtype):
    from scripts.train_in_torch import main

    main(out=tmp_path, dtype=dtype)
    report = compare_training(tmp_path)
    assert report.passed and len(report.steps) == 20, report.first_failure
    assert max(step.drift for step in report.steps) < (1e-6 if dtype == "float32" else 2e-3)
    for gradient in (report.steps[0].gradients[0], report.steps[19].gradients[0]):
        assert gradient.error < (1e-5 if dtype == "float32" else 0.1)


@pytest.mark.neighbors("torch", "transformers")
@pytest.mark.slow
def test_the_script_writes_the_stored_run(tmp_path):
    from scripts.train_in_torch import main

    main(out=tmp_path, vocab=12, embed=8, mlp=4, batch=4, seq_len=8, clip=0.7)
    for path in RUN.glob("**/*.safetensors"):
        written = load_file(tmp_path / path.relative_to(RUN))
        stored = load_file(path)
        assert written.keys() == stored.keys()
        for name, x in stored.items():
            np.testing.assert_allclose(written[name], x, rtol=1e-3, atol=1e-6, err_msg=f"{path.name} {name}")
