"""`zoo.parity.compare`: names the first value that differs, of modules with PyTorch's hooks and of plain functions."""

import re
import types
from collections import OrderedDict
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.parity import compare

TOKENS = np.arange(16).reshape(2, 8)
NAMES = {
    "model.embed_tokens": "embedding",
    "model.layers.*.self_attn": "layers.*.attention",
    "model.layers.*.mlp.input": "layers.*.gated_mlp.input",
    "model.layers.*": "layers.*",
    "model.norm": "norm",
}


class Replayed:
    """A module with the hooks of `torch.nn.Module`, whose submodules return stored values, one after another."""

    def __init__(self, script, result, training=False):
        self.script = script
        self.result = result
        self.training = training
        names = [name.removesuffix(".input") for name in script]
        self.modules = {name: types.SimpleNamespace(before=[], after=[]) for name in ["", *names]}
        for module in self.modules.values():
            module.register_forward_hook = self.make_register(module.after)
            module.register_forward_pre_hook = self.make_register(module.before)

    @staticmethod
    def make_register(hooks):
        def register(hook, with_kwargs=False):
            hooks.append(hook)
            return types.SimpleNamespace(remove=lambda: hooks.remove(hook))

        return register

    def named_modules(self):
        return self.modules.items()

    def __call__(self, *args, **kwargs):
        for name, value in self.script.items():
            module = self.modules[name.removesuffix(".input")]
            for hook in module.before if name.endswith(".input") else ():
                hook(module, (), {"hidden_states": value})
            for hook in module.after if not name.endswith(".input") else ():
                hook(module, (), (value, None))
        return self.result


@pytest.fixture(scope="module")
def model():
    return zoo.models.Transformer(vocab=32, embed=8, layers=2, heads=2, mlp=8, key=jax.random.key(0))


@pytest.fixture(scope="module")
def script(model):
    """Values of the model under the names of Llama, in the order in which they are computed."""
    logits, seen = zoo.capture(model, *NAMES.values())(jnp.asarray(TOKENS))
    values = {"model.embed_tokens": seen["embedding"]}
    for layer in range(2):
        name = f"model.layers.{layer}"
        values[f"{name}.self_attn"] = seen["layers.*.attention"][layer]
        values[f"{name}.mlp.input"] = seen["layers.*.gated_mlp.input"][layer]
        values[name] = seen["layers.*"][layer]
    values["model.norm"] = seen["norm"]
    return {name: np.asarray(x) for name, x in values.items()}, np.asarray(logits)


@pytest.mark.ci
def test_values_are_compared_in_the_order_of_the_forward_pass(model, script):
    values, logits = script
    theirs = Replayed(values, logits)
    report = compare(theirs, model, TOKENS, dict(reversed(NAMES.items())))
    assert report.passed and not report.notes
    assert [line.name for line in report.comparisons] == [*values, "result"]
    assert not any(module.before or module.after for module in theirs.modules.values())
    assert str(report).endswith(f"{len(values) + 1} comparisons, all within tolerance")


def test_first_value_out_of_tolerance_is_named(model, script):
    values, logits = script
    wrong = {name: x + 0.01 for name, x in values.items() if name.startswith(("model.layers.1", "model.norm"))}
    report = compare(Replayed({**values, **wrong}, logits + 1, training=True), model, TOKENS, NAMES)
    assert not report.passed and report.first_failure.name == "model.layers.1.self_attn"
    assert [line.name for line in report.comparisons if not line.passed] == [*wrong, "result"]
    assert report.notes == ("theirs ran in train mode",)
    assert "Look first at model.layers.1.self_attn" in str(report) and str(report).count("<- out of tolerance") == 5


def test_names_without_one_value_are_refused(model, script):
    values, logits = script
    theirs = Replayed(values, logits)
    for names, message in (
        ({"model.layers.0.self_attention": "layers.0.attention"}, "no module 'model.layers.0.self_attention'; did you"),
        ({"model.layers.*.mixer": "layers.*.attention"}, "theirs has no module 'model.layers.*.mixer'; it has model"),
        ({"model.layers.*": "layers.1"}, "'model.layers.*' and 'layers.1': expected one star on both sides"),
        ({"model.layers.*": "layers.*.*_norm"}, "expected one star on both sides"),
        ({"model.norm": "final_norm"}, "no value is named 'final_norm'"),
        ({"model.layers.0.mlp": "layers.0.gated_mlp"}, "model.layers.0.mlp of theirs does not run"),
        (
            {"model.norm": "layers.1.attention.queries"},
            "model.norm is [2, 8, 8] and layers.1.attention.queries [2, 8",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            compare(theirs, model, TOKENS, names)
    more = Replayed({**values, "model.layers.2": values["model.norm"]}, logits)
    with pytest.raises(ValueError, match="theirs has 3 layers with model.layers.0, and ours 2 of layers"):
        compare(more, model, TOKENS, {"model.layers.*": "layers.*"})
    with pytest.raises(ValueError, match="there is no model.norm to name in a function"):
        compare(np.tanh, model, TOKENS, {"model.norm": "norm"})


class Repeated(Replayed):
    def __call__(self, *args, **kwargs):
        super().__call__()
        return super().__call__()


def test_module_that_runs_twice_is_refused(model, script):
    with pytest.raises(ValueError, match=r"model\.norm of theirs runs 2 times"):
        compare(Repeated(*script), model, TOKENS, {"model.norm": "norm"})


class Output(NamedTuple):
    logits: np.ndarray
    states: tuple
    cache: object = None


def test_results_are_paired_by_structure():
    x = np.linspace(-1, 1, 6).reshape(2, 3)

    def theirs(x, *, scale):
        return OrderedDict(logits=scale * x, states=[x, {"last": x}], loss=None, extra=x)

    def ours(x, *, scale):
        return Output(scale * x, (x, {"last": x + 1e-6}), cache=x)

    report = compare(theirs, ours, {"x": x, "scale": 2})
    assert [line.name for line in report.comparisons] == ["logits", "states[0]", "states[1].last"]
    assert report.passed and 5e-7 < report.comparisons[2].error < 2e-6
    assert report.notes == ("extra is in theirs only, and not compared", "cache is in ours only, and not compared")
    assert compare(lambda a, b: (a + b).sum(), lambda a, b: (a + b).sum(), (x, x)).comparisons[0].name == "result"
    for result, message in (
        (
            lambda x: x,
            "with logits, and of ours an array of [2, 3]: return a dict of ours, such as lambda *",
        ),
        (lambda x: {"logit": x}, "dict with logits, and of ours dict with logit: no field is shared"),
        (
            lambda x: {"logits": (x, x)},
            "logits of theirs is an array of [2, 3], and of ours a tuple of 2: return",
        ),
        (lambda x: {"logits": x.T}, "shapes of theirs and ours differ: logits is [2, 3] and logits [3, 2]"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            compare(lambda x: {"logits": x}, result, x)


def test_numbers_of_any_dtype_are_compared():
    x = np.arange(4)
    for theirs, ours in ((np.exp, jnp.exp), (lambda x: x > 1, lambda x: x > 1), (lambda x: 0 * x, lambda x: 0 * x)):
        assert compare(theirs, ours, x).passed
    assert compare(lambda x: x * 1j, lambda x: x * 1j, x).passed
    assert compare(lambda x: x * 1j, lambda x: x * -1j, x).comparisons[0].error == 2
    assert compare(lambda x: 0 * x, lambda x: x, x).comparisons[0].error == float("inf")
    assert not compare(lambda x: x * 1.0, lambda x: x / 0, x).passed
    half = jnp.asarray([1, 2], jnp.bfloat16)
    assert compare(lambda x: x, lambda x: x * 1.0078125, half).comparisons[0].error == 0.0078125


def test_directory_names_the_function_for_checkpoints(no_type_checks):
    with pytest.raises(TypeError, match=r"zoo\.parity\.compare_checkpoint\(directory, expected\)"):
        compare("directory", {})
    with pytest.raises(TypeError, match="compare takes two callables, and one is dict"):
        compare(np.exp, {}, TOKENS)
