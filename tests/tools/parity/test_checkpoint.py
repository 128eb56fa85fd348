"""Compare every family with PyTorch on reference cases: activations, gradients, padding, greedy decoding, saving.

A case is a small checkpoint with the results of transformers, or of flash-linear-attention. The project's own cases are
in `tests/fixtures/models`; the environment variable ZOO_PARITY names a directory with more. A new family needs cases,
and nothing here.
"""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.torch_top_k import select_as_torch, select_visible_as_torch
from zoo.layers.attention import compressed, indexed
from zoo.layers.token_info import token_info
from zoo.models import balance_loss
from zoo.models.decoder import UnrolledStack
from zoo.models.hf.families import FAMILIES
from zoo.models.hf.wrappers import read_text_config
from zoo.models.parameter_paths import find_differences, list_parameter_paths
from zoo.models.scoring import unstack_blocks
from zoo.tools.parity.activations import DecoderInputs, join_streams, run_decoder
from zoo.tools.parity.checkpoint import compare_checkpoint, read_expectations
from zoo.tools.parity.comparison import GRADIENT_FLOOR, TOLERANCE, relative_error
from zoo.tools.parity.model_kinds import make_next_token_batch
from zoo.weights.safetensors import open_tensors

FIXTURES = Path(__file__).parents[2] / "fixtures" / "models"
PARITY = os.environ.get("ZOO_PARITY")
REQUIRED_CASES = {
    *("llama2_gqa_tied", "llama2_mha", "llama3_rope", "llama_bf16", "llama_dynamic", "llama_fp16_sharded"),
    *("llama_gqa4_bias_tied", "llama_gqa8_headdim", "llama_linear", "llama_mqa_bias", "llama_sharded", "llama_yarn"),
    *("mistral_nowindow", "mistral_swa", "qwen2_tied", "qwen2_untied_gqa8", "qwen3_base", "qwen3_untied_bias"),
    *("gemma_base", "gemma_gqa2", "gpt2_base", "gpt2_hubnames", "gpt2_untied"),
    *("neox_full_rotary_tied", "neox_parallel"),
    *("mixtral_base", "mixtral_top1_tied", "qwen2_moe_shared", "qwen3_moe_base", "qwen3_moe_sparse"),
    *("olmoe_clip", "granitemoe_base", "gpt_oss_base", "gpt_oss_mxfp4"),
    *("mamba_base", "mamba_untied_wide", "falcon_mamba_base", "mamba2_g1", "mamba2_g4_tied", "rwkv4_base"),
}


WHOLE = {"llama", "deepseek_v3", "rwkv"}
"""Cases that run whole, and decode, without `-m slow`: attention, latent attention with a mixture of experts, and a
recurrence. Of the others `test_logits_and_files_match_pytorch` takes logits and files."""


QUICK = {"llama_dynamic", "llama_fp16_sharded", "phi3_longrope"}
"""Reference cases that compute otherwise than the fixtures of their family, or are stored otherwise: their logits and
files are compared in every run."""


FLOAT64_NORMS = {
    "qwen3_next_mixed": {
        "model.layers.2.linear_attn.A_log": 0.0005219151620683957,
        "model.layers.2.linear_attn.dt_bias": 0.0003969017521503544,
    },
    "wrap_qwen3_5": {
        "model.language_model.layers.2.linear_attn.A_log": 0.002025473429972611,
        "model.language_model.layers.2.linear_attn.dt_bias": 0.0015874601475114331,
    },
}
"""Norms of gradients that PyTorch rounds by more than 2e-4 in float32, as its class computes them in float64."""


WAYS_OF_DECODING = {"gated_deltanet", "gemma3_text", "gpt_oss", "mamba2", "qwen3_5_text"}
"""Cases of `test_logits_and_files_match_pytorch` that `make test` runs, besides those of `WHOLE`."""

SWITCHES = {"phi3_longrope": 24}
"""Length from which a case rotates by other factors. PyTorch's tokens are those of a forward pass each, which switches
between two tokens; the test below fixes the length, and with it the factors."""


TIED = {
    "deepseek_v4_base": (compressed, select_as_torch),
    "qwen4_exp_base": (indexed, select_visible_as_torch),
}
"""Cases of an indexer with equal scores, all 0, of which PyTorch selects others: see `tests.torch_top_k`. By the rule
of the library, 58 and 65 of the 66 tokens have PyTorch's logits."""


@pytest.fixture(autouse=True)
def select_equal_scores_as_torch(request, monkeypatch):
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if "folder" in parameters and parameters["folder"].name in TIED:
        module, select = TIED[parameters["folder"].name]
        monkeypatch.setattr(module, "select_highest", select)


def list_case_folders(kind: str = "causal") -> list[Path]:
    """All cases of decoders, or those of encoders of texts and images."""
    return [folder for folder in find_cases() if is_encoder(folder) == (kind == "encoder")]


def is_encoder(folder: Path) -> bool:
    return read(folder / "meta.json").get("kind") in ("image", "features", "mlm", "dual")


@cache
def find_cases() -> list[Path]:
    """All cases, in folders that are read once."""
    more = ("models", "models_more", "models_2026", "models_fla", "models_vision")
    roots = [FIXTURES, *([Path(PARITY) / folder for folder in more] if PARITY else [])]
    folders = [folder for root in roots for folder in sorted(root.iterdir()) if (folder / "config.json").exists()]
    type_of_text = lambda folder: read_text_config(read(folder / "config.json"))["model_type"]
    names = zoo.families()
    is_read = lambda folder: type_of_text(folder) in names and read(folder / "meta.json").get("kind") != "image_text"
    return list(filter(is_read, folders))


def list_cases(quick: Collection[str] = WHOLE) -> list:
    """All cases as parameters. Those that `quick` does not name are run by `pytest -m slow tests/weights`."""
    marks = lambda folder: () if folder.name in quick else pytest.mark.slow
    return [pytest.param(folder, id=folder.name, marks=marks(folder)) for folder in list_case_folders()]


def list_other_fixtures() -> list:
    """The project's own cases whose gradients, padding and decoding are slow, and QUICK, as parameters. One for each
    way of decoding is not marked ci."""
    folders = [x for x in list_case_folders() if x.name in QUICK or (x.parent == FIXTURES and x.name not in WHOLE)]
    marks = lambda folder: () if folder.name in WAYS_OF_DECODING else pytest.mark.ci
    return [pytest.param(folder, id=folder.name, marks=marks(folder)) for folder in folders]


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def test_parity_cases_cover_every_family():
    names = {case.id for case in list_cases()}
    kinds = ("models", "encoders", "encoder_decoders", "image_text", "block_denoisers")
    folders = [folder for kind in kinds for folder in FIXTURES.with_name(kind).iterdir()]
    without_class = {"llada", "dream"}  # tests/models/hf/families/test_llada.py holds them to the formula
    assert {read(folder / "config.json")["model_type"] for folder in folders} | without_class >= set(FAMILIES)
    assert not PARITY or names >= REQUIRED_CASES


@pytest.mark.parametrize("folder", list_cases())
def test_parity_with_pytorch(folder: Path, tmp_path: Path):
    expected, meta = read_expectations(folder / "expected.safetensors"), read(folder / "meta.json")
    meta["grad_norm"] |= FLOAT64_NORMS.get(folder.name, {})
    model = zoo.load(folder, dtype=jnp.float32)

    in_float32 = {name: x for name, x in expected.items() if not name.startswith("bfloat16.")}
    report = compare_checkpoint(folder, in_float32, gradient_norms=meta["grad_norm"])
    assert report.passed, report.first_failure
    assert len(report.comparisons) >= len(model.stack.init_state(1, 1)) + 3 + len(meta["grad_norm"])
    states = [name for name in expected if name.startswith("hidden_states.")]
    assert sum(line.own is not None for line in report.comparisons) == len(states) - 1  # each layer by itself, too
    routed = {name for name in expected if name.startswith("router_logits.")}
    assert routed == {line.name for line in report.comparisons if line.name.startswith("router_logits.")}

    if any("selection_bias" in path.name for path in list_parameter_paths(model)):
        expected.pop("aux_loss", None)  # transformers counts the top experts without the bias, not those that are used
    if folder.name in TIED:  # the choice depends on the number of masked blocks
        expected |= {"padleft.input_ids": expected["input_ids"]}
        expected |= {"padleft.attention_mask": np.ones_like(expected["input_ids"])}
    loaded = check_hub_config_loads_the_same_model(folder, tmp_path / "hub")
    config = read(folder / "config.json")
    balance = config.get("router_aux_loss_coef", config.get("aux_loss_coef", 0.0))
    check_padding_changes_no_logits(model, expected, balance, switches=folder.name in {*SWITCHES, *TIED})
    check_saved_files_equal_loaded_files(loaded, folder, tmp_path / "again")
    if folder.parent == FIXTURES:  # once per family, since `compare_checkpoint` checks the gradients of every case
        check_saved_gradients(model, expected, tmp_path / "gradients")


@pytest.mark.parametrize("folder", list_other_fixtures())
def test_logits_and_files_match_pytorch(folder: Path, tmp_path: Path):
    """Every family in every run: `test_parity_with_pytorch` without what compiles for long."""
    expected = read_expectations(folder / "expected.safetensors")
    loaded = check_hub_config_loads_the_same_model(folder, tmp_path / "hub")
    is_float32 = all(x.dtype == jnp.float32 for x in jax.tree.leaves(loaded))
    model = loaded if is_float32 else zoo.load(folder, dtype=jnp.float32)
    blocks = unstack_blocks(jax.tree.map(np.asarray, model))  # slices of numpy arrays compile nothing
    # As `compare_checkpoint` does, but models whose embedding and head are alike share their programs.
    shell = dataclasses.replace(model, stack=UnrolledStack(()), origin=None)
    with jax.default_matmul_precision("highest"):
        logits = run_decoder(shell, blocks, DecoderInputs(jnp.asarray(expected["input_ids"])), {}).outputs["logits"]
    assert relative_error(logits, expected["logits"]) <= TOLERANCE
    check_saved_files_equal_loaded_files(loaded, folder, tmp_path / "again")


@pytest.mark.one_case
@pytest.mark.parametrize("folder", list_cases())
def test_greedy_decoding_matches_pytorch(folder: Path):
    """With caches and states."""
    expected = read_expectations(folder / "expected.safetensors")
    prompts, mask, wanted = read_generations(expected)
    wanted = wanted[:, : SWITCHES.get(folder.name, 10**6) - prompts.shape[1]]
    new = zoo.generate(
        zoo.load(folder, dtype=jnp.float32),
        jnp.asarray(prompts),
        max_new_tokens=wanted.shape[1],
        mask=jnp.asarray(mask),
        length=prompts.shape[1] + wanted.shape[1],
    )
    np.testing.assert_array_equal(new, wanted)


@pytest.mark.parametrize("folder", list_cases(quick=("mixtral",)))
def test_bfloat16_errors_are_reported(folder: Path):
    expected = read_expectations(folder / "expected.safetensors")
    forward = {key: expected[key] for key in ("input_ids", "logits", "bfloat16.logits") if key in expected}
    if len(forward) < 3:
        pytest.skip("the case has no bfloat16 logits")
    (logits,) = compare_checkpoint(folder, forward).comparisons
    assert logits.passed and 0 < logits.bfloat16 < np.inf and 0 < logits.theirs < np.inf
    if folder.name in ("mixtral", "mamba"):  # other families round in other places than transformers does
        assert logits.bfloat16 < 3 * logits.theirs


@pytest.mark.one_case
@pytest.mark.parametrize("folder", list_cases(quick=("llama", "mamba")))
def test_hidden_states_match_pytorch(folder: Path):
    model = zoo.load(folder, dtype=jnp.float32)
    expected = join_streams(model, read_expectations(folder / "expected.safetensors"))
    states = zoo.hidden_states(model, jnp.asarray(expected["input_ids"]))
    assert len(states) == sum(key.startswith("hidden_states.") for key in expected)
    for number, state in enumerate(states):
        assert relative_error(state, expected[f"hidden_states.{number}"]) <= TOLERANCE, number


def check_hub_config_loads_the_same_model(folder: Path, copy: Path) -> Any:
    shutil.copytree(folder, copy)
    if (folder / "config_hub.json").exists():
        shutil.copyfile(folder / "config_hub.json", copy / "config.json")
    new, old = zoo.load(folder), zoo.load(copy)
    assert not list(find_differences(new, old))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True))
    return new


def check_padding_changes_no_logits(
    model: zoo.models.Decoder, expected: dict, balance: float, *, switches: bool = False
) -> None:
    """Rows without padding, padded left and padded right, in one batch, so that the longest row is as long as before.

    The routing of the rows without padding also gives PyTorch's auxiliary loss of a mixture of experts. Where PyTorch's
    generated text is as long as these rows, it is in the batch too: each of its tokens is the most likely one after
    those before it.
    """
    rows = [expected["input_ids"], expected["padleft.input_ids"], expected["padright.input_ids"]]
    masks = [np.ones_like(rows[0]), expected["padleft.attention_mask"], expected["padright.attention_mask"]]
    num_rows, (prompts, prompt_mask, generated) = len(rows[0]), read_generations(expected)
    if prompts.shape[1] + generated.shape[1] == rows[0].shape[1] and not switches:
        rows.append(np.concatenate([prompts, generated], 1))
        masks.append(np.concatenate([prompt_mask, np.ones_like(generated)], 1))
    tokens, mask = np.concatenate(rows), np.concatenate(masks) > 0

    @eqx.filter_jit
    def run(model, tokens, mask):
        if "aux_loss" not in expected:
            return model(tokens, mask=mask), None
        hidden, _ = model.hidden(tokens, token_info(tokens, mask=mask))
        unpadded = jax.tree.map(lambda x: x[:num_rows], hidden.routing)
        return model.logits(hidden.x), balance_loss(unpadded, over="layers")

    logits, aux_loss = jax.device_get(run(model, tokens, mask))
    padded = slice(3 * num_rows)
    for ours, is_token, wanted in zip(
        logits[padded], mask[padded], np.concatenate(3 * [expected["logits"]]), strict=True
    ):
        assert np.abs(ours[is_token] - wanted[: is_token.sum()]).max() <= 1e-4 * np.abs(expected["logits"]).max()
    if len(rows) > 3:
        after_prompt = logits[3 * num_rows :, prompts.shape[1] - 1 : -1]
        np.testing.assert_array_equal(after_prompt.argmax(-1), generated)
    if aux_loss is not None:
        shifted = np.float64(logits[:num_rows, :-1])
        scores = np.take_along_axis(shifted, rows[0][:, 1:, None], -1)[..., 0]
        loss = (np.log(np.exp(shifted).sum(-1)) - scores).mean()
        for ours, name in ((aux_loss, "aux_loss"), (loss + balance * aux_loss, "loss_with_aux")):
            assert abs(ours - expected[name]) <= 1e-5 * abs(expected[name]), name
        assert balance * expected["aux_loss"] > 1e-4 * expected["loss"], "the auxiliary loss is too small to matter"


def read_generations(expected: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return PyTorch's prompts, without padding and padded left, their mask, and the tokens that follow."""
    prompts = np.concatenate([expected["generate.prompt"], expected["generate_padleft.prompt"]])
    unpadded = np.ones_like(expected["generate.prompt"])
    mask = np.concatenate([unpadded, expected["generate_padleft.attention_mask"]]) > 0
    return prompts, mask, np.concatenate([expected["generate.tokens"], expected["generate_padleft.tokens"]])


def check_saved_files_equal_loaded_files(model: Any, folder: Path, copy: Path) -> None:
    if "quantization_config" in read(folder / "config.json"):
        model = zoo.load(folder, packed=True)
    source = folder if model.origin.left_aside else None
    zoo.save(jax.tree.map(np.asarray, model), copy, source=source)  # slices of numpy arrays compile nothing
    original, saved = open_tensors(folder), open_tensors(copy)
    assert read(copy / "config.json") == read(folder / "config.json")
    assert model.origin is not None
    for name in original.keys() - saved.keys():  # only tensors that no model reads
        assert any(re.search(pattern, name) for pattern in model.origin.family.ignored_tensors), name
    for name, tensor in saved.items():
        assert tensor.dtype == original[name].dtype
        assert tensor.read().tobytes() == original[name].read().tobytes(), name
    if original.keys() == saved.keys() and (folder / "model.safetensors").exists():
        assert (copy / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def check_saved_gradients(model: zoo.models.Decoder, expected: dict, directory: Path) -> None:
    mesh = zoo.make_mesh(devices=jax.devices()[:1])
    batch = make_next_token_batch(expected["input_ids"])
    with jax.default_matmul_precision("highest"):  # the program that `compare_checkpoint` has compiled
        _, grads = zoo.value_and_grad(zoo.cross_entropy, mesh)(zoo.place(model, mesh), batch)
    zoo.save(jax.tree.map(np.asarray, grads), directory)
    saved = open_tensors(directory)
    lacks_prefix = model.origin is not None and model.origin.lacks_base_prefix
    largest = max(np.linalg.norm(wanted) for name, wanted in expected.items() if name.startswith("grad."))
    for name, wanted in expected.items():
        if name.startswith("grad."):
            name = name.removeprefix("grad.")
            name = name.removeprefix(name.partition(".")[0] + ".") if lacks_prefix else name
            bound = max(2e-4 * np.linalg.norm(wanted), GRADIENT_FLOOR * largest)
            assert np.linalg.norm(saved[name].read() - wanted) <= bound, name
