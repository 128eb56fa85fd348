"""A checkpoint to evaluate: its tokens, its length, its adapter and its chat template."""

import json
import shutil

import jax
import numpy as np
import pytest

import zoo
from zoo.parallel.fingerprint import fingerprint
from zoo.text.chat.errors import NoChatTemplateError
from zoo.tools.evaluate import load_language_model

from .parity import FOLDER


@pytest.fixture
def directory(tmp_path):
    return shutil.copytree(FOLDER / "model", tmp_path / "model")


def rewrite(path, **values):
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(facts | values))


def test_tokens_and_length_are_those_of_the_checkpoint(directory):
    lm = load_language_model(directory)
    assert (lm.prefix_token, lm.stop_tokens, lm.length, lm.template) == (0, (2,), 256, None)
    assert load_language_model(directory, length=100).length == 100
    rewrite(directory / "tokenizer_config.json", bos_token=None)
    rewrite(directory / "generation_config.json", eos_token_id=[0, 999])
    lm = load_language_model(directory, chat=True)
    assert (lm.prefix_token, lm.stop_tokens) == (2, (0, 2))  # EOS, and what the model does not know is no stop
    assert lm.template is not None and "im_start" in lm.template.source


def test_what_is_missing_is_named(directory):
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(NoChatTemplateError, match="has no chat template"):
        load_language_model(directory, chat=True)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="has no tokenizer.json, and a vocabulary of 320 is not bytes"):
        load_language_model(directory)


def test_an_adapter_is_merged(directory, tmp_path):
    model = zoo.adapters.lora(zoo.load(directory), rank=2, targets=("query",), key=jax.random.key(0))
    numbers = np.random.default_rng(0)
    model = jax.tree.map(lambda x: x + numbers.normal(size=x.shape).astype(x.dtype) / 8, model)
    zoo.adapters.save(model, tmp_path / "adapter", base=directory)
    base = load_language_model(directory)
    found = load_language_model(directory, adapter=tmp_path / "adapter")
    assert fingerprint(found.model) != fingerprint(base.model)
    assert jax.tree.structure(found.model) == jax.tree.structure(base.model)
