"""BART's line: the bias of the logits, positions of M2M-100, and files that leave out or repeat what others have."""

import dataclasses
import json
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import Embedding, LayerNorm
from zoo.layers.token_info import token_info
from zoo.models.hf.config import read_config
from zoo.models.hf.errors import ConfigError
from zoo.models.hf.families import FAMILIES
from zoo.models.hf.families.bart_layers import BiasedEmbedding
from zoo.models.loss_request import LossRequest
from zoo.models.parameter_paths import list_parameter_paths
from zoo.tools.parity.checkpoint import read_expectations
from zoo.weights.safetensors import CheckpointError, open_tensors, write_safetensors

FIXTURES = Path(__file__).parents[3] / "fixtures" / "encoder_decoders"
KEY = jax.random.key(0)


def make_embedding() -> BiasedEmbedding:
    embedding = BiasedEmbedding(Embedding(8, 4, multiplier=2.0, key=KEY))
    return eqx.tree_at(lambda x: x.bias, embedding, jnp.arange(8.0))


def test_the_bias_is_added_to_logits_only_and_not_trained():
    embedding = make_embedding()
    x = jax.random.normal(KEY, (3, 4))
    np.testing.assert_allclose(embedding.transposed(x), x @ embedding.weight.T + np.arange(8), rtol=1e-5)
    np.testing.assert_array_equal(embedding(jnp.array([[3]]))[0, 0], 2 * embedding.weight[3])
    assert zoo.trainable(embedding).bias is None and zoo.trainable(embedding).weight is not None
    assert (embedding.with_weight(embedding.weight + 1).bias == embedding.bias).all()


def test_the_bias_is_sharded_with_the_vocabulary():
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    embedding = make_embedding()
    x = jax.random.normal(KEY, (8, 2, 4))
    unembed = zoo.spmd(lambda embedding, x: zoo.parallel.gather(embedding).transposed(x), mesh, out="batch seq vocab")
    placed = zoo.place(embedding, mesh)
    assert {shard.data.shape for shard in placed.bias.addressable_shards} == {(4,)}
    np.testing.assert_allclose(unembed(placed, x), embedding.transposed(x), rtol=1e-5, atol=1e-6)


def test_adapters_of_the_embedding_keep_the_bias():
    """In logits, in what the loss is told of the head, and after merging."""
    model = zoo.load(FIXTURES / "bart_base")
    adapted = zoo.adapters.lora(model, targets=("embedding", "query"), rank=2, key=KEY)
    shake = lambda x: None if x is None else 0.1 * jnp.cos(jnp.arange(float(x.size))).reshape(x.shape)
    adapted = eqx.combine(jax.tree.map(shake, zoo.trainable(adapted)), adapted)
    merged = zoo.adapters.merge(adapted)
    x = jax.random.normal(KEY, (3, 24))
    for other in (adapted, merged, zoo.adapters.merge(adapted, keep=True)):
        head = other.decoder.gather_unembedding()
        assert not LossRequest.from_head(head, x, 0.0, None).is_matrix
        wanted = x @ head.table.dense_weight.T + model.decoder.embedding.bias
        np.testing.assert_allclose(other.decoder.logits(x), wanted, rtol=1e-4, atol=1e-5)
    assert not np.allclose(merged.decoder.embedding.weight, model.decoder.embedding.weight)


def respell(folder: Path, name: str, change) -> Path:
    """Write a case with other tensors."""
    tensors = {key: tensor.read() for key, tensor in open_tensors(FIXTURES / name).items()}
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", change(tensors))
    (folder / "config.json").write_text((FIXTURES / name / "config.json").read_text())
    return folder


def test_older_files_repeat_the_embedding(tmp_path):
    shared = ("lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
    repeat = lambda tensors: tensors | dict.fromkeys(shared, tensors["model.shared.weight"])
    model = zoo.load(respell(tmp_path / "older", "bart_base", repeat))
    assert eqx.tree_equal(*(dataclasses.replace(x, origin=None) for x in (model, zoo.load(FIXTURES / "bart_base"))))
    differ = lambda tensors: tensors | {shared[1]: tensors["model.shared.weight"] + 1}
    with pytest.raises(CheckpointError, match=r"model\.encoder\.embed_tokens\.weight is not model\.shared\.weight"):
        zoo.load(respell(tmp_path / "untied", "bart_base", differ))


def test_files_without_a_head_lack_a_prefix_and_the_bias(tmp_path):
    def strip(tensors: dict) -> dict:
        return {key.removeprefix("model."): x for key, x in tensors.items() if key != "final_logits_bias"}

    folder = respell(tmp_path / "base", "bart_base", strip)
    model = zoo.load(folder)
    assert not model.decoder.embedding.bias.any()
    zoo.save(model, tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_tables_of_sinusoids_may_be_in_the_file_or_not(tmp_path):
    drop = lambda tensors: {key: x for key, x in tensors.items() if "embed_positions" not in key}
    without = zoo.load(respell(tmp_path / "computed", "pegasus_base", drop))
    given = {key: x.read() for key, x in open_tensors(FIXTURES / "pegasus_base").items()}
    for stack in ("encoder", "decoder"):
        table = given[f"model.{stack}.embed_positions.weight"]
        found = getattr(without, stack).position_embedding(jnp.arange(len(table))[None])[0]
        np.testing.assert_allclose(found, table, atol=1e-5)


def test_positions_that_depend_on_padding_are_refused_by_name():
    family = FAMILIES["m2m_100"]
    config = json.loads((FIXTURES / "m2m_100_base/config.json").read_text()) | {"decoder_start_token_id": 1}
    with pytest.raises(ConfigError, match="pad_token_id = 1, and targets begin with it"):
        family.build(read_config(family, config), key=KEY)
    family = FAMILIES["marian"]
    with pytest.raises(ConfigError, match="decoder_vocab_size = 9: only models of one vocabulary"):
        family.build(read_config(family, {"vocab_size": 8, "decoder_vocab_size": 9}), key=KEY)


def test_blenderbot_is_pegasus_with_learned_positions(tmp_path):
    """The two are one function where the learned positions are those of the file of PEGASUS."""
    folder = respell(tmp_path / "blenderbot", "pegasus_base", lambda tensors: tensors)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "blenderbot"}
    (folder / "config.json").write_text(json.dumps(config))
    model = zoo.load(folder)
    expected = read_expectations(FIXTURES / "pegasus_base/expected.safetensors")
    logits = model(jnp.asarray(expected["input_ids"]), jnp.asarray(expected["decoder_input_ids"]))
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-5 * np.abs(expected["logits"]).max())
    assert "decoder.position_embedding.weight" in {path.name for path in list_parameter_paths(zoo.trainable(model))}


def test_blenderbot_small_normalizes_tokens_that_are_not_scaled():
    """Before it adds positions. The embeddings here are so small that the epsilon counts."""
    model = zoo.load(FIXTURES / "blenderbot_small_base")
    decoder = eqx.tree_at(lambda x: x.embedding.weight, model.decoder, replace_fn=lambda table: 1e-2 * table)
    tokens = jnp.array([[3, 5, 8]])
    norm = LayerNorm(24)  # with the epsilon of transformers
    given = decoder.embedding_projection.norm
    norm = eqx.tree_at(lambda x: (x.weight, x.bias), norm, (given.weight, given.bias))
    wanted = norm(decoder.embedding.weight[tokens]) + decoder.position_embedding.weight[:3]
    np.testing.assert_allclose(decoder.embed(tokens, token_info(tokens)).x, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "named, given, start", [({}, {}, ()), ({"forced_bos_token_id": 7}, {"decoder_start_token_id": 2}, (2, 7))]
)
def test_targets_begin_as_either_file_says(tmp_path, named, given, start):
    """mBART's config may name no token, or generation_config.json another than the config."""
    folder = respell(tmp_path / "mbart", "mbart_base", lambda tensors: tensors)
    config = json.loads((folder / "config.json").read_text())
    del config["decoder_start_token_id"]
    (folder / "config.json").write_text(json.dumps({**config, "forced_bos_token_id": None, **named}))
    (folder / "generation_config.json").write_text(json.dumps(given))
    assert zoo.load(folder).start == start


@pytest.mark.parametrize(
    "name, change",
    [
        ("bart_base", {"decoder_layers": 10**9}),
        ("t5gemma_base", {"encoder": {"num_hidden_layers": 10**9}}),
    ],
)
def test_more_layers_than_tensors_are_refused_by_name(tmp_path, name, change):
    """Wherever the config counts them."""
    folder = respell(tmp_path / "deep", name, lambda tensors: tensors)
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"_layers = 1000000000, and the checkpoint has \d+ tensors"):
        zoo.load(folder)
