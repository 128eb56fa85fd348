"""Annotations are checked, with arrays and without, in methods and in inner functions."""

import importlib
import sys

import jax.numpy as jnp
import jaxtyping
import pytest

SOURCE = """
import dataclasses
from collections.abc import Iterator
from jaxtyping import Array, Float

def count(x: int, *more: int) -> int:
    return "one" if x == 1 else x

def iterate(x: int) -> Iterator[int]:
    yield x

def add(x: Float[Array, "a"], y: Float[Array, "a"]) -> Float[Array, "a"]:
    return x + y

def make(unit: str):
    def scale(x: float) -> str:
        return f"{x} {unit}" if x else None
    return scale

class Box:
    def take(self, other: "Box") -> "Box":
        return other

    @property
    def size(self) -> int:
        return "large"

@dataclasses.dataclass
class Point:
    x: int

class Named:
    def __init__(self, name: str):
        self.name = name

class Titled(Named):
    pass
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "annotated_module.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    with jaxtyping.install_import_hook("annotated_module", "beartype.beartype"):
        yield importlib.import_module("annotated_module")
    del sys.modules["annotated_module"]


def test_right_types_pass(module):
    assert module.count(2) == 2 and list(module.iterate(3)) == [3]
    assert module.make("m")(1.5) == "1.5 m" and module.make("s")(2.0) == "2.0 s"
    assert module.add(jnp.ones(2), jnp.ones(2)).shape == (2,)
    box = module.Box()
    assert box.take(box) is box
    assert module.Point(1).x == 1 and module.Titled("a").name == "a"


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.count("2"),
        lambda m: m.count(2, "3"),
        lambda m: m.count(1),
        lambda m: m.iterate("3"),
        lambda m: m.add(jnp.ones(2), jnp.ones(3)),
        lambda m: m.make(3),
        lambda m: m.make("m")("1"),
        lambda m: m.make("m")(0.0),
        lambda m: m.Box().size,
        lambda m: m.Point("1"),
        lambda m: m.Titled(1),
    ],
)
def test_wrong_types_raise(module, call):
    with pytest.raises(jaxtyping.TypeCheckError):
        call(module)


def test_checks_can_be_switched_off(module, no_type_checks):
    assert module.count(1) == "one" and module.count("2") == "2" and module.Box().size == "large"
