"""Operations are traced in name scopes after the fields of modules; methods are otherwise unchanged."""

import inspect
import pickle
import re
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

import zoo
from zoo.parallel import Module, named_by_class


class Scale(Module):
    weight: Float[Array, "features"]

    def __call__(self, x):
        return x * self.weight


class Pair(Module):
    """Two fields of one class, a field named by class, and a module that calls itself."""

    first: Scale
    second: Scale
    last: Module = named_by_class()

    def __call__(self, x, *, twice: bool = False):
        """Scale, and scale again."""
        return self.hidden(self(x) if twice else x)

    def hidden(self, x):
        return self.last(self.second(self.first(x)))

    def aside(self, x):
        return jnp.tanh(x)


class Other(Module):
    scale: Scale

    def __call__(self, x):
        remade = jax.tree.map(lambda x: x, self.scale)  # a new object, as after `gather`
        return jnp.sin(remade(x))


@pytest.fixture
def pair():
    return Pair(Scale(jnp.ones(3)), Scale(jnp.ones(3)), Other(Scale(jnp.ones(3))))


def scopes(function, *args):
    """Scope and primitive of each operation of a function without loops."""
    equations = jax.make_jaxpr(lambda *args: function(*args))(*args).eqns
    return ["/".join(filter(None, (str(x.source_info.name_stack), x.primitive.name))) for x in equations]


def test_scopes_of_fields_classes_and_modules_calling_themselves(pair):
    x = jnp.ones(3)
    assert {"Pair/first/mul", "Pair/second/mul", "Pair/last.Other/scale/mul", "Pair/last.Other/sin"} <= set(
        scopes(pair, x)
    )
    assert set(scopes(lambda x: pair(x, twice=True), x)) == set(scopes(pair, x)) == set(scopes(pair.hidden, x))
    assert "tanh" in scopes(pair.aside, x)
    same = Pair(pair.first, pair.first, pair.last)
    assert "Pair/Scale/mul" in scopes(same, x)  # one object in two fields goes by its class
    assert "Scale/mul" in scopes(lambda x: jnp.exp(pair.first(x)), x)


def test_scopes_in_the_gradient_of_a_transformer():
    model = zoo.models.Transformer(vocab=16, embed=8, layers=2, heads=2, mlp=8, remat="full", key=jax.random.key(0))
    batch = dict.fromkeys(("tokens", "targets"), jnp.zeros((2, 4), jnp.int32))
    arrays, rest = eqx.partition(model, eqx.is_array)
    gradient = jax.jit(jax.grad(lambda arrays: zoo.cross_entropy(eqx.combine(arrays, rest), batch)[0]))
    jax.config.update(
        "jax_compilation_cache_include_metadata_in_key", True
    )  # else an older program may have other names
    try:
        text = gradient.lower(arrays).compile().as_text()
    finally:
        jax.config.update("jax_compilation_cache_include_metadata_in_key", False)
    found = set(re.findall(r'op_name="jit\([^)]*\)/([^"]*dot_general)"', text))
    matrices = [f"mixer.Attention/{name}" for name in ("query", "key", "value", "out")]
    matrices += [f"ffn.GatedMLP/{name}" for name in ("gate", "up", "down")]
    for name in matrices:
        for when in (r"jvp\(Decoder\)", r"transpose\(jvp\(Decoder\)\)"):
            assert any(re.match(rf"{when}/stack/.*Block/{name}/dot_general", scope) for scope in found), (when, name)
    assert any(re.search(r"rematted_computation/.*Block/mixer.Attention/query/", scope) for scope in found)
    assert any(re.search(r"Unembedding\)?/table/dot_general", scope) for scope in found)


def test_scope_ends_with_an_error(pair):
    with pytest.raises(TypeError):
        pair(None)
    assert "Scale/mul" in scopes(pair.first, jnp.ones(3))


def test_scopes_of_threads_are_separate(pair):
    inside, done, found = threading.Event(), threading.Event(), []

    class Waits(Module):
        weight: Float[Array, "features"]

        def __call__(self, x):
            inside.set()
            assert done.wait(10)
            return x * self.weight

    waiting = eqx.tree_at(lambda pair: pair.first, pair, Waits(jnp.ones(3)))
    x = jnp.ones(3)
    thread = threading.Thread(target=lambda: found.extend(scopes(waiting, x)))
    thread.start()
    assert inside.wait(10)
    assert "Scale/mul" in scopes(pair.first, x)
    done.set()
    thread.join(10)
    assert "Pair/first/mul" in found


def test_scoped_methods_keep_signature_docstring_and_pickling(pair):
    assert list(inspect.signature(Pair.__call__).parameters) == ["self", "x", "twice"]
    assert list(inspect.signature(pair).parameters) == ["x", "twice"]
    assert Pair.__call__.__doc__ == "Scale, and scale again."
    assert Pair.__call__.__qualname__ == "Pair.__call__"
    assert zoo.layers.AbstractLinear.__abstractmethods__ == {"__call__", "transposed", "out_size"}
    again = pickle.loads(pickle.dumps(pair))
    assert eqx.tree_equal(again, pair) and pickle.loads(pickle.dumps(Pair.__call__)) is Pair.__call__
    hidden = eqx.filter_jit(pair.hidden)
    assert eqx.tree_equal(pair.hidden, pair.hidden) and jnp.array_equal(hidden(jnp.ones(3)), again(jnp.ones(3)))
