"""`zoo.export`: what its programs compute without this library, for any number of rows, is what the model computes."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.adapters.perturb import perturb
from tests.processes import ROOT, make_environment
from zoo.layers import MixtureOfBlockAttention, NativeSparseAttention

FIXTURES = ROOT / "tests/fixtures"
ROWS = 5
SEQ_LEN = 4
LENGTH = 16
NEW = 4


def load_decoder(name: str):
    return zoo.load(FIXTURES / "models" / name, dtype="float32")


def load_with_lora(name: str):
    model = zoo.adapters.lora(load_decoder(name), rank=2, targets="query", key=jax.random.key(0))
    return perturb(model)


def write_decoder(model, folder: Path, **options) -> None:
    """Export a decoder, and write its logits and greedy tokens for prompts of 1 to 9 tokens."""
    zoo.export(model, folder, seq_len=SEQ_LEN, length=LENGTH, **options)
    random = np.random.default_rng(0)
    vocab = model.embedding.table_shape[0]
    tokens = random.integers(0, vocab, (ROWS, SEQ_LEN)).astype(np.int32)
    prompts = random.integers(0, vocab, (ROWS, 9)).astype(np.int32)
    mask = np.arange(9) >= np.array([0, 8, 3, 5, 1])[:, None]
    new = zoo.generate(model, jnp.asarray(prompts), mask=jnp.asarray(mask), max_new_tokens=NEW, length=LENGTH)
    logits = eqx.filter_jit(model)(jnp.asarray(tokens))
    np.savez(folder / "expected.npz", tokens=tokens, logits=logits, prompts=np.where(mask, prompts, -1), new=new)


def make_sparse():
    """A layer of each kind of attention to chosen blocks of keys."""
    options = {"heads": 4, "kv_heads": 2, "block": 2, "top": 2}
    pattern = [partial(NativeSparseAttention, window=3, **options), partial(MixtureOfBlockAttention, **options)]
    return zoo.models.Hybrid(vocab=32, embed=16, layers=2, pattern=pattern, mlp=16, key=jax.random.key(0))


def write_encoder(name: str, folder: Path) -> None:
    """Export an encoder of texts, and write its results for texts of 1 to 4 tokens."""
    model = zoo.load(FIXTURES / "encoders" / name, dtype="float32")
    zoo.export(model, folder, seq_len=SEQ_LEN)
    random = np.random.default_rng(0)
    tokens = random.integers(0, model.embedding.table_shape[0], (ROWS, SEQ_LEN)).astype(np.int32)
    inputs = {"tokens": tokens, "mask": np.arange(SEQ_LEN) < np.array([4, 1, 3, 2, 4])[:, None]}
    if model.type_embedding is not None:
        inputs["token_types"] = random.integers(0, 2, (ROWS, SEQ_LEN)).astype(np.int32)
    names = tuple(inputs)[1:]
    call = eqx.filter_jit(lambda model, tokens, *rest: model(tokens, **dict(zip(names, rest, strict=True))))
    write_results(folder, inputs, call(model, *map(jnp.asarray, inputs.values())))


def write_image_encoder(name: str, folder: Path) -> None:
    model = zoo.load(FIXTURES / "encoders" / name, dtype="float32")
    zoo.export(model, folder)
    shape = json.loads((folder / "export.json").read_text())["programs"]["forward"]["inputs"]["images"]["shape"]
    images = np.random.default_rng(0).normal(size=(ROWS, *shape[1:])).astype(np.float32)
    write_results(folder, {"images": images}, eqx.filter_jit(model)(jnp.asarray(images)))


def write_results(folder: Path, inputs: dict, result) -> None:
    results = {"logits": result}
    if isinstance(result, zoo.parallel.Module):
        results = {name: x for name, x in vars(result).items() if x is not None}
    np.savez(folder / "expected.npz", **inputs, **results)


CASES = {
    "hybrid": lambda folder: write_decoder(load_with_lora("jamba"), folder),
    "chosen blocks": lambda folder: write_decoder(make_sparse(), folder),
    "text encoder": lambda folder: write_encoder("bert_texts", folder),
    "windows": lambda folder: write_decoder(load_decoder("gemma3_text"), folder),
    "state space": lambda folder: write_decoder(load_decoder("mamba2"), folder),
    "delta rule": lambda folder: write_decoder(load_decoder("qwen3_next"), folder),
    "mixture": lambda folder: write_decoder(load_decoder("mixtral"), folder),
    "learned positions": lambda folder: write_decoder(load_decoder("gpt2"), folder),
    "shared layers": lambda folder: write_decoder(load_decoder("zamba2"), folder),
    "latent attention": lambda folder: write_decoder(load_decoder("deepseek_v3"), folder),
    "merged adapters": lambda folder: write_decoder(zoo.adapters.merge(load_with_lora("llama")), folder),
    "several platforms": lambda folder: write_decoder(load_decoder("llama"), folder, platforms=("cpu", "cuda", "tpu")),
    "text features": lambda folder: write_encoder("modernbert_masked", folder),
    "image encoder": lambda folder: write_image_encoder("vit_classes", folder),
    "image features": lambda folder: write_image_encoder("siglip_features", folder),
}
DEFAULT = ("hybrid", "text encoder")
OTHER_KINDS = ("mixture", "chosen blocks", "several platforms", "image encoder")
OTHERS = tuple(name for name in CASES if name not in DEFAULT + OTHER_KINDS)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(DEFAULT, id="default", marks=pytest.mark.ci),
        pytest.param(OTHER_KINDS, id="other kinds", marks=pytest.mark.ci),
        pytest.param(OTHERS, id="others", marks=pytest.mark.slow),
    ],
)
def test_programs_equal_the_model_without_the_library(names, tmp_path, no_type_checks):
    """For 1, 3 and 5 rows, and padded prompts in several pieces. Symbolic sizes are not an `int`."""
    folders = [tmp_path / name for name in names]
    for name, folder in zip(names, folders, strict=True):
        CASES[name](folder)
    command = [sys.executable, "-Werror::UserWarning", ROOT / "tests/tools/export/serve_cases.py", *folders]
    done = subprocess.run(command, env=make_environment() | {"PYTHONPATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    printed = json.loads(done.stdout)
    assert not {"zoo", "equinox", "jaxtyping", "safetensors", "einops"}.intersection(printed["imported"])
    for name, found in zip(names, printed["results"], strict=True):
        assert max(found["errors"]) < 2e-6, (name, found)
        assert all(found["new"]), (name, found)
