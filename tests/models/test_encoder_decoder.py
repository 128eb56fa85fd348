"""Encoders with a decoder: the preset, dropout, any mixer in the decoder, generation, and what is refused."""

import dataclasses
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.weights.test_families_on_meshes import compare_meshes
from zoo.layers import MLP, AbstractMixer, Dropout, GatedDeltaNet, IdentityNorm, TokenInfo
from zoo.layers.attention.cross import EncodedSource
from zoo.models import EncoderDecoderTransformer
from zoo.models.cross_blocks import AddNormCrossBlock, CrossBlock, SourceHidden

FIXTURES = Path(__file__).parents[1] / "fixtures" / "encoder_decoders"
SIZES = {"vocab": 24, "embed": 16, "layers": 2, "heads": 2, "mlp": 24}
KEY = jax.random.key(0)
SOURCE = jax.random.randint(jax.random.key(1), (3, 8), 1, 24)
MASK = np.arange(8) < np.array([[8], [5], [3]])
TARGET = jax.random.randint(jax.random.key(2), (3, 6), 1, 24)


@eqx.filter_jit
def run(model, source, tokens, mask=None, key=None):
    return model(source, tokens, mask=mask, key=key)


@pytest.fixture(scope="module")
def model():
    return EncoderDecoderTransformer(**SIZES, start=(0, 3), key=KEY)


@pytest.mark.parametrize("mixer", [None, pytest.param(GatedDeltaNet, marks=pytest.mark.ci)])
def test_cached_greedy_tokens_are_those_of_whole_passes(mixer):
    """With a recurrence in the decoder, too; sources have their padding on the right, on the left, and in buckets."""
    model = EncoderDecoderTransformer(**SIZES, mixer=mixer, start=(0, 3), key=KEY)
    tokens = np.tile([[0, 3, 0, 0, 0, 0]], (3, 1))
    for last in range(1, 5):  # what follows the last token is padding on the right
        tokens[:, last + 1] = np.asarray(run(model, SOURCE, tokens, MASK)[:, last]).argmax(-1)
    np.testing.assert_array_equal(zoo.generate(model, SOURCE, mask=MASK, max_new_tokens=4), tokens[:, 2:])
    anything = np.where(MASK, SOURCE, 99)  # in the place of padding
    np.testing.assert_array_equal(zoo.generate(model, anything, mask=MASK, max_new_tokens=4), tokens[:, 2:])
    left = np.stack([np.roll(row, 8 - mask.sum()) for row, mask in zip(np.asarray(SOURCE), MASK, strict=True)])
    new = zoo.generate(model, left, mask=MASK[:, ::-1], max_new_tokens=4)
    np.testing.assert_array_equal(new, tokens[:, 2:])
    alone = zoo.generate(model, SOURCE[2:, : MASK[2].sum()], max_new_tokens=4)
    np.testing.assert_array_equal(alone, tokens[2:, 2:])


def test_samples_and_details_of_a_source(model):
    options = {"mask": MASK, "max_new_tokens": 4, "temperature": 1.0, "key": jax.random.key(3)}
    several = zoo.generate(model, SOURCE, samples=2, **options)
    repeated = zoo.generate(model, np.repeat(SOURCE, 2, 0), **{**options, "mask": np.repeat(MASK, 2, 0)})
    np.testing.assert_array_equal(several, repeated)
    found = zoo.generate(model, SOURCE, mask=MASK, max_new_tokens=4, details=True)
    text = np.concatenate([np.tile([[0, 3]], (3, 1)), found.tokens], 1)
    log_probs = jax.nn.log_softmax(run(model, SOURCE, text[:, :-1], MASK))
    wanted = np.take_along_axis(np.asarray(log_probs)[:, 1:], np.asarray(found.tokens)[..., None], 2)[..., 0]
    np.testing.assert_allclose(found.log_probs, wanted, atol=1e-5)


def test_a_bound_decoder_is_the_model(model):
    decoder = model.read(SOURCE, mask=MASK)
    logits = eqx.filter_jit(lambda decoder: decoder(TARGET))(decoder)
    np.testing.assert_allclose(logits, run(model, SOURCE, TARGET, MASK), atol=1e-5)
    _, seen = zoo.capture(decoder, "layers.1.cross_attention.probabilities")(TARGET)
    probabilities = seen["layers.1.cross_attention.probabilities"]
    assert probabilities.shape == (3, 2, 6, 8)
    assert np.abs(np.where(MASK[:, None, None], 0, probabilities)).max() == 0


def test_dropout_differs_in_encoder_and_decoder():
    model = EncoderDecoderTransformer(**SIZES, dropout=0.5, key=KEY)
    draws = [run(model, SOURCE, TARGET, key=jax.random.key(seed)) for seed in (4, 4, 5)]
    assert (draws[0] == draws[1]).all() and not np.allclose(draws[0], draws[2])
    encoder = model.whole_encoder
    key = jax.random.key(4)
    of_its_own, _ = encoder.hidden(SOURCE, encoder.token_info(SOURCE, key=key))
    assert not np.allclose(model.encode(SOURCE, key=key).x, of_its_own.x)  # with the keys of the decoder's layers


class Ones(AbstractMixer):
    """A mixer and a cross-attention of ones."""

    def __call__(self, x, info, state=None):
        return jnp.ones_like(x), state

    def init_state(self, batch, length, dtype=jnp.float32):
        return ()

    def read(self, source):
        return ()


@pytest.mark.parametrize("block", [CrossBlock, AddNormCrossBlock])
def test_sublayers_of_a_block_drop_out_by_themselves(block):
    norms = {name: IdentityNorm() for name in ("mixer_norm", "cross_norm", "ffn_norm")}
    ffn = MLP(4, 4, key=KEY)
    ffn = jax.tree.map(jnp.zeros_like, ffn)
    layer = block(mixer=Ones(), cross=Ones(), ffn=ffn, dropout=Dropout(0.5), **norms)
    info = TokenInfo(keys=jax.random.split(KEY, 2))
    hidden, _ = layer(SourceHidden(jnp.zeros((2, 64, 4)), source=EncodedSource(jnp.zeros((2, 1, 4)))), info)
    counts = [int((hidden.x == value).sum()) for value in (0, 2, 4)]
    assert sum(counts) == 512 and min(counts) > 80 and counts[1] > 200  # 1/4, 1/2, 1/4


@pytest.mark.ci
@pytest.mark.parametrize("axes", [("data", "fsdp", "tensor"), ("data", "context", "tensor")])
def test_remat_and_scans_on_a_mesh_equal_one_device(axes):
    """Rotary positions of a source that `context` shards are counted over all of it."""
    model = EncoderDecoderTransformer(**SIZES, remat="full", loop="scan", key=KEY)
    repeat = partial(np.tile, reps=(4, 1))
    source, mask, target = (repeat(np.asarray(x)[:2]) for x in (SOURCE, MASK, TARGET))
    batch = {"source": source, "source_mask": mask, "tokens": target, "targets": np.roll(target, -1, 1)}
    compare_meshes(model, batch, batch, zoo.cross_entropy, axes)


def test_the_loss_names_what_a_batch_lacks(model):
    batch = {"source": SOURCE, "tokens": TARGET, "targets": TARGET}
    with pytest.raises(ValueError, match="the batch has no source, only tokens, targets"):
        zoo.cross_entropy(model, {key: x for key, x in batch.items() if key != "source"})
    with pytest.raises(ValueError, match="source: expected a row for each of 3 targets, got 2"):
        zoo.cross_entropy(model, batch | {"source": SOURCE[:2]})
    with pytest.raises(ValueError, match="has one source, and so one target: do not pack it"):
        zoo.cross_entropy(model, batch | {"segment_ids": jnp.ones((3, 6), int)})
    with pytest.raises(ValueError, match="source: 99 is outside the vocabulary"):
        zoo.cross_entropy(model, batch | {"source": SOURCE.at[0, 0].set(99)})
    with pytest.raises(ValueError, match="'source' that nothing reads"):
        zoo.cross_entropy(zoo.models.Transformer(**SIZES, key=KEY), batch)


def test_generation_names_what_it_does_not_take(model):
    decoder = zoo.models.Transformer(**SIZES, key=KEY)
    prefix = zoo.prefill(decoder, TARGET)
    with pytest.raises(ValueError, match="prefix: the target of a source begins with the start token"):
        zoo.generate(model, SOURCE, max_new_tokens=2, prefix=prefix)
    with pytest.raises(ValueError, match="draft: the target of a source"):
        zoo.generate(model, SOURCE, max_new_tokens=2, draft="prompt")
    with pytest.raises(ValueError, match="row 1 has no real token"):
        zoo.generate(model, SOURCE, mask=MASK & (np.arange(3) != 1)[:, None], max_new_tokens=2)
    with pytest.raises(ValueError, match="source: 24 is outside the vocabulary"):
        zoo.generate(model, SOURCE.at[0, 0].set(24), max_new_tokens=2)
    with pytest.raises(ValueError, match="length=4 does not hold 2 tokens of the prompt and 5 new ones"):
        zoo.generate(model, SOURCE, max_new_tokens=5, length=4)


def test_other_functions_say_to_read_the_source(model):
    with pytest.raises(TypeError, match=r"decoder = model\.read\(source\)"):
        zoo.score(model, TARGET)
    with pytest.raises(ValueError, match="attends to a source, and was given none"):
        model.decoder(TARGET)
    with pytest.raises(TypeError, match="shares the embedding of its decoder"):
        model.encoder(SOURCE)
    with pytest.raises(AttributeError, match=r"zoo\.generate\(model, tokens"):
        _ = model.generate


def test_adapters_per_row_in_the_encoder_are_of_their_rows(model):
    """Three rows, which would be padded to four."""
    adapted = zoo.adapters.lora(model, rank=2, targets=("bidirectional_attention.query",), key=KEY)
    grown = jax.tree.map(
        lambda x: None if x is None else jnp.cos(jnp.arange(x.size)).reshape(x.shape), zoo.trainable(adapted)
    )
    adapted = eqx.combine(grown, adapted)
    options = {"mask": MASK, "max_new_tokens": 4, "details": True}
    per_row = zoo.adapters.select_per_row(adapted, ["lora", None, "lora"])
    found = zoo.generate(per_row, SOURCE, **options).log_probs
    on, off = (zoo.generate(each, SOURCE, **options).log_probs for each in (adapted, model))
    np.testing.assert_allclose(found, np.where([[True], [False], [True]], on, off), atol=1e-6)
    assert not np.allclose(on, off)


def test_what_generates_nothing_says_why(model):
    with pytest.raises(ValueError, match="a source of at least 1 row"):
        zoo.generate(model, SOURCE[:0], max_new_tokens=1)
    with pytest.raises(TypeError, match=r"by the whole model, which reads it: zoo\.generate\(model, source\)"):
        zoo.generate(model.read(SOURCE), TARGET, max_new_tokens=1)


def test_sources_longer_than_the_learned_positions():
    """Padding has no position, so a longer row of it is read."""
    model = zoo.load(FIXTURES / "bart_base")
    source = jnp.full((1, 45), 5)
    for run in (
        lambda x: model(x, TARGET[:1], mask=jnp.ones(x.shape, bool)),
        partial(zoo.generate, model, max_new_tokens=1),
    ):
        with pytest.raises(ValueError, match="45 tokens are too many: the encoder learned 40 positions"):
            run(source)
    new = zoo.generate(model, source, mask=np.arange(45)[None] < 4, max_new_tokens=3)
    np.testing.assert_array_equal(new, zoo.generate(model, source[:, :4], max_new_tokens=3))


def test_features_of_a_recording_may_have_any_float_and_no_mask():
    model = zoo.load(FIXTURES / "whisper_base", dtype="bfloat16")
    features = jnp.zeros((1, 10, 32), jnp.bfloat16)
    assert zoo.generate(model, features, max_new_tokens=2).shape == (1, 2)
    with pytest.raises(ValueError, match="mask: a window of audio is read as a whole"):
        zoo.generate(model, features, mask=np.ones((1, 4), bool), max_new_tokens=2)


def test_another_start_than_the_files_have_is_told_on_saving(tmp_path, caplog):
    model = zoo.load(FIXTURES / "bart_base")
    zoo.save(model, tmp_path)
    assert not caplog.messages
    zoo.save(dataclasses.replace(model, start=(2, 9)), tmp_path)
    assert caplog.messages == [f"{tmp_path}: targets begin with (2,) by its files, and with (2, 9) here"]


def test_edits_of_the_encoder_are_not_saved(tmp_path):
    model = zoo.load(FIXTURES / "t5_relu_tied")
    edited = dataclasses.replace(model, encoder=zoo.patch(model.encoder, {"layers.0": lambda x: 2 * x}))
    with pytest.raises(ValueError, match=r"no place for edits, and the model has one of layers\.0"):
        zoo.save(edited, tmp_path)


def test_a_pipeline_is_refused(model):
    mesh = zoo.make_mesh(pipe=2, devices=jax.devices()[:2])
    batch = {"source": SOURCE, "tokens": TARGET, "targets": TARGET}
    with pytest.raises(NotImplementedError, match="pipe"):
        zoo.value(zoo.cross_entropy, mesh)(zoo.place(model, mesh), batch)


def test_start_may_be_replaced(model):
    other = dataclasses.replace(model, start=(0, 7))
    first = zoo.generate(other, SOURCE, max_new_tokens=1)
    logits = run(model, SOURCE, np.tile([[0, 7]], (3, 1)))
    np.testing.assert_array_equal(first[:, 0], np.asarray(logits[:, -1]).argmax(-1))
