"""`jax_enable_x64` changes neither parameters nor results: NumPyro, Diffrax and others set it for a whole process."""

import subprocess
import sys

import pytest

from tests.docs.parallel_matrix import MIXERS
from tests.processes import ROOT, make_environment

QUICK = ["softmax attention"]
KINDS = ["latent attention", "Mamba-2", "RWKV-7", "Gated DeltaNet", "mLSTM"]
"""Latents, a scan, a mixer with interpolated tokens, a delta rule, and exponential gates."""
OTHERS = [name for name in MIXERS if name not in QUICK + KINDS]
FAMILIES = [
    *("models/bloom", "models/deepseek_v32", "models/gemma3n_text", "models/gemma4_text", "models/hunyuan_v1_dense"),
    *("models/jetmoe", "models/llama4_text", "models/mimo_v2_flash", "models/qwen3_5_text", "models/gpt_oss"),
    *("encoders/bert_masked", "encoders/deberta_masked", "encoders/siglip_features", "encoders/dinov3_features"),
]
"""Families that have the mixers which `MIXERS` lacks, and encoders."""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="quick"),
        pytest.param(["training"], id="training", marks=pytest.mark.ci),
        pytest.param(KINDS, id="mixers", marks=pytest.mark.ci),
        pytest.param(OTHERS[::2], id="more mixers", marks=pytest.mark.slow),
        pytest.param(OTHERS[1::2], id="other mixers", marks=pytest.mark.slow),
        pytest.param(FAMILIES, id="families", marks=pytest.mark.slow),
    ],
)
def test_x64_changes_no_parameter_and_no_result(names):
    """Initialization, forward pass, gradients and generation of each mixer; adapters and optimizers."""
    command = [sys.executable, "-m", "tests.models.x64_program", *names]
    run = subprocess.run(command, env=make_environment(), cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
