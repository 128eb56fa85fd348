"""All recurrences, in both modes, against float64: outputs, last states and gradients."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from scripts.make_op_fixtures import case
from tests.parity_ops import MODES, OPS, check_folder, evaluate, failures, files
from tests.quick import mark_slow

FIXTURES = Path(__file__).parents[2] / "fixtures" / "ops"
MORE = os.environ.get("ZOO_PARITY")


def test_parity_fixtures_cover_every_op():
    assert {file.name.split(".")[0] for file in files(FIXTURES)} == set(OPS)


def test_parity_script_reproduces_the_fixtures():
    with jax.enable_x64(True):
        made = case("hgrn", "strong")
    held = load_file(FIXTURES / "hgrn.strong.safetensors")
    assert made.keys() == held.keys()
    for name, x in made.items():
        np.testing.assert_allclose(x, held[name], rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.one_case
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", OPS)
def test_parity_of_ops_with_float64(op, mode):
    assert [line for file in FIXTURES.glob(f"{op}.*.safetensors") for line in failures(file, mode)] == []


@pytest.mark.one_case
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", mark_slow(["hgrn", "rg_lru", "rwkv4", "mamba1"], but=["rg_lru", "mamba1"]))
def test_parity_of_ops_without_jit(op, mode):
    arrays = load_file(FIXTURES / f"{op}.base.safetensors")
    inputs = {key.removeprefix("in."): jnp.asarray(x) for key, x in arrays.items() if key.startswith("in.")}
    for ours, theirs in zip(evaluate(op, mode, inputs), ("f64.o", "f64.state"), strict=True):
        np.testing.assert_allclose(ours, arrays[theirs], rtol=1e-4, atol=1e-5)


def test_parity_reports_a_wrong_result(tmp_path):
    source = FIXTURES / "hgrn.base.safetensors"
    arrays = load_file(source)
    arrays["f64.grad.g"][0, 3, 2] += 0.01
    save_file(arrays, tmp_path / source.name)
    wrong = check_folder(tmp_path)
    assert len(wrong) == 2
    assert all("grad.g is off by" in line for line in wrong)


def test_parity_raises_for_an_unknown_input():
    with pytest.raises(ValueError, match="hgrn takes x g and s0, not q"):
        evaluate("hgrn", "recurrent", {"q": jnp.ones(())})


def test_parity_raises_for_an_empty_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="no <op>"):
        check_folder(tmp_path)


def find_external_cases(op):
    """Return the cases of an operation in the folders `ops` and `ops_more`."""
    return sorted(Path(str(MORE)).glob(f"ops*/{op}.*.safetensors"))


@pytest.mark.slow  # computed as the cases of tests/fixtures are
@pytest.mark.skipif(not MORE, reason="ZOO_PARITY names no folder")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", OPS)
def test_parity_of_external_cases(op, mode):
    """Only the last case of each operation, the strong one if there is one: each shape compiles two programs."""
    found = find_external_cases(op)
    if not found:
        pytest.skip(f"no case of {op}")
    assert list(failures(found[-1], mode)) == []


@pytest.mark.slow
@pytest.mark.skipif(not MORE, reason="ZOO_PARITY names no folder")
def test_parity_of_all_external_cases():
    found = [file for op in OPS for file in find_external_cases(op)]
    assert found and [line for file in found for mode in MODES for line in failures(file, mode)] == []
