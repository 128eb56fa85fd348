"""What the tests of several recipes start from: a little text, and a model that was left in a directory."""

import random

import jax
import jaxtyping
import numpy as np
import pytest

import zoo
from zoo import train


@pytest.fixture(scope="session", autouse=True)
def token_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def without_type_checks():
    """Recipes run as users run them, who have no checks of annotations; tests of what they call have these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        yield


@pytest.fixture(scope="module")
def without_samples():
    """Let reports show one letter for each token: lora.py and transformer.py are tested with samples, and to decode
    takes programs of its own, before training and after."""
    with pytest.MonkeyPatch.context() as patch:
        repeat = lambda model, tokens, *, max_new_tokens, **options: np.full((len(tokens), max_new_tokens), ord("a"))
        patch.setattr("zoo.train.samples.generate", repeat)
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "it", "was", "flat"]
    pick = random.Random(0)
    for number in range(40):
        (folder / f"{number}.txt").write_text(" ".join(pick.choice(words) for _ in range(100)))
    return folder


@pytest.fixture(scope="session")
def start(text, tmp_path_factory):
    """A model as transformer.py leaves it, untrained."""
    sizes = {"vocab": 256, "embed": 16, "layers": 2, "heads": 4, "mlp": 32}
    model = zoo.models.Transformer(**sizes, qk_norm=True, key=jax.random.key(0))
    return train.export(model, train.load_text((text,)), tmp_path_factory.mktemp("start") / "export", seq_len=16)
