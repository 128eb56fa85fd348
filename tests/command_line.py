"""Fixtures: run `zoo`, and small checkpoints of any family, with and without a tokenizer, made without compilation."""

import dataclasses
import json
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import zoo
from zoo.cli import main
from zoo.models.hf.config import read_config
from zoo.models.hf.families import FAMILIES
from zoo.models.hf.spec import Origin

BOS, EOS = 254, 255
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def run(capsys):
    """Run `zoo` with arguments; return (standard output, standard error)."""

    def run(*words) -> tuple[str, str]:
        main(list(map(str, words)))
        return capsys.readouterr()

    return run


@pytest.fixture
def refused(capsys):
    """Run `zoo` with arguments that it refuses; return the one line on standard error."""

    def refused(*words) -> str:
        with pytest.raises(SystemExit) as stopped:
            main(list(map(str, words)))
        out, error = capsys.readouterr()
        assert (stopped.value.code, out, error.count("\n")) == (2, "", 1), error
        return error

    return refused


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Write a checkpoint of a family with this config."""

    def checkpoint(name: str, dtype: str = "float32", **config):
        family, given = FAMILIES[name], {"model_type": name, **config}
        random, key = np.random.default_rng(0), jax.random.key(0)
        model = eqx.filter_eval_shape(lambda: family.build(read_config(family, given), key=key))
        model = jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape) / 4, dtype), model)
        directory = tmp_path_factory.mktemp(name)
        zoo.save(dataclasses.replace(model, origin=Origin(family, json.dumps(given))), directory)
        return directory

    return checkpoint


@pytest.fixture(scope="session")
def bytes_model(checkpoint):
    """A byte-level model: vocabulary 256, no EOS."""
    return checkpoint("llama", vocab_size=256, num_hidden_layers=2, tie_word_embeddings=True, **SIZES)


@pytest.fixture(scope="session")
def text_model(bytes_model, tmp_path_factory):
    """The same with a byte-level tokenizer that adds BOS and EOS."""
    directory = tmp_path_factory.mktemp("text")
    shutil.copytree(bytes_model, directory, dirs_exist_ok=True)
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    letters = sorted(byte_level.alphabet())
    for byte in (0xF8, 0xFF):  # these bytes never occur in UTF-8: their ids are for special tokens
        letters.remove(chr(byte))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    tokenizer.enable_truncation(4)  # as some files have it, for training
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 300]}))
    return directory


@pytest.fixture(scope="session")
def gpt2(checkpoint):
    """A model with vocabulary 30, 64 learned positions and fused queries, keys and values."""
    return checkpoint("gpt2", "bfloat16", vocab_size=30, n_embd=16, n_layer=3, n_head=4, n_positions=64)
