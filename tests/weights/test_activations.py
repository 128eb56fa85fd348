"""Compare vision families with PyTorch on reference cases: activations, outputs, gradients, saving."""

from pathlib import Path

import pytest

import zoo
from tests.weights.test_parity import (
    check_hub_config_loads_the_same_model,
    check_saved_files_equal_loaded_files,
    list_case_folders,
    read,
)
from zoo.models.scoring import unstack_blocks
from zoo.weights.parity import compare, read_expectations

CASES = [pytest.param(folder, id=folder.name) for folder in list_case_folders(images=True)]


@pytest.mark.parametrize("folder", CASES)
def test_images_match_pytorch(folder: Path, tmp_path: Path):
    expected, norms = read_expectations(folder / "expected.safetensors"), read(folder / "meta.json")["grad_norm"]
    report = compare(folder, expected, gradient_norms=norms)
    assert report.passed, report.first_failure
    results = {"logits", "last_hidden_state", "pooler_output", "loss"} & expected.keys()
    assert results and results <= {line.name for line in report.comparisons}
    assert len(report.comparisons) >= len(unstack_blocks(zoo.load(folder))) + 1 + len(results) + len(norms)

    model = check_hub_config_loads_the_same_model(folder, tmp_path / "hub")
    check_saved_files_equal_loaded_files(model, folder, tmp_path / "again")
