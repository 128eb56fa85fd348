"""`check_family` passes checkpoints of the library's families, and refuses a family with a planted error."""

import dataclasses
from pathlib import Path

import pytest

import zoo
from zoo.models.hf.families import FAMILIES
from zoo.tools.testing import check_family

FIXTURES = Path(__file__).parents[2] / "fixtures" / "models"
CHECKS = {
    *("causal", "rows separate", "padding", "packed = separate", "pieces = whole", "decode = read", "gradients"),
    *("dtype", "modes agree", "mesh = one device", "generate = read", "save = load", "config", "PyTorch"),
}


@pytest.fixture(scope="module")
def mesh():
    return zoo.make_mesh(data=2, fsdp=2, tensor=2)


@pytest.mark.slow  # docs/port.md calls it for one
@pytest.mark.parametrize("folder", sorted(FIXTURES.iterdir()), ids=lambda folder: folder.name)
def test_check_family_passes_a_checkpoint(folder, mesh):
    report = check_family(folder, meshes=[mesh])
    assert {check.name for check in report.checks} == CHECKS
    assert [check.name for check in report.checks if check.difference is None] == ["modes agree"]


@pytest.mark.slow
def test_check_family_refuses_swapped_names(mesh):
    """Gate and up have one shape, so that a wrong order loads, and writes the file that it has read."""
    llama = FAMILIES["llama"]
    swap = {"mlp.gate_proj": "mlp.up_proj", "mlp.up_proj": "mlp.gate_proj"}

    def names(config):
        right = llama.names(config)
        swapped = {name: next((name.replace(a, b) for a, b in swap.items() if a in name), name) for name in right}
        return {swapped[name]: place for name, place in right.items()}

    with pytest.raises(AssertionError) as refusal:
        check_family(FIXTURES / "llama", family=dataclasses.replace(llama, names=names), meshes=[mesh])
    head, line = str(refusal.value).splitlines()
    assert head.startswith("llama fails 1 of 17 checks")
    assert line.strip().startswith("PyTorch: 25 activations and gradients, and PyTorch's, differ by")
    assert "layer 0 (attention, gated_mlp)" in line
