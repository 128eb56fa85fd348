"""Natural mistakes of a first script: one line says what was expected, what came, and what would do."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.models import Transformer
from zoo.train import MeshOptions, RunOptions, load_records, load_text, stream_records

KEY = jax.random.key(0)
TOKENS = np.zeros((8, 4), np.int32)  # a row for each device of the tests
SIZES = {"embed": 16, "layers": 2, "heads": 2, "mlp": 16, "key": KEY}
BATCH = {"tokens": TOKENS, "targets": TOKENS}


@pytest.fixture(scope="module")
def model():
    return Transformer(vocab=32, **SIZES)


def make_equinox_attention(embed, *, key):
    return eqx.nn.MultiheadAttention(2, embed, key=key)


class PreTrainedTokenizerFast:
    """Stands for the class of transformers."""


class Tensor:
    """Stands for the class of PyTorch, which the tests do not need."""

    __module__ = "torch"
    dtype = "torch.int64"

    def __init__(self, x):
        self.shape = x.shape


def loss_of_logits(model, batch):
    return zoo.cross_entropy(jnp.zeros((*batch["tokens"].shape, 32)), batch)


MISTAKES = {
    "logits": (
        lambda model: zoo.cross_entropy(jnp.zeros((2, 4, 32)), BATCH),
        "expected a Decoder or Encoder of tokens, got an array float32[2, 4, 32]. Pass the model itself, as in "
        "zoo.cross_entropy(model, batch), which computes the logits; of logits, zoo.models.token_losses(logits, "
        "targets) returns the losses",
    ),
    "logits in a program": (
        lambda model: zoo.value_and_grad(loss_of_logits, zoo.make_mesh())(model, BATCH),
        "of tokens, got an array float32[1, 4, 32]. Pass the model itself, as in zoo.cross_entropy(model",
    ),
    "logits of log_probs": (
        lambda model: zoo.log_probs(jnp.zeros((2, 4, 32)), BATCH),
        "got an array float32[2, 4, 32]",
    ),
    "a batch for a model": (lambda model: zoo.cross_entropy(BATCH, model), "of tokens, got dict"),
    "a function for a model": (
        lambda model: zoo.score(Transformer, TOKENS),
        "got the function Transformer",
    ),
    "a mesh of JAX": (
        lambda model: zoo.place(model, jax.make_mesh((8,), ("data",))),
        "expected a mesh of zoo.make_mesh, got Mesh of jax.sharding, which lacks the layout that zoo.make_mesh(",
    ),
    "a mesh of JAX for a batch": (
        lambda model: zoo.place_batch(BATCH, jax.make_mesh((8,), ("data",))),
        "expected a mesh of zoo.make_mesh",
    ),
    "a mesh of JAX for text": (
        lambda model: zoo.generate(model, TOKENS, max_new_tokens=1, mesh=jax.make_mesh((8,), ("data",))),
        "expected a mesh of zoo.make_mesh",
    ),
    "a mesh first": (
        lambda model: zoo.value_and_grad(zoo.make_mesh(), zoo.cross_entropy),
        "got the function cross_entropy: the mesh comes second, as in zoo.value_and_grad(loss_fn, mesh)",
    ),
    "a mesh first, of a value": (lambda model: zoo.value(zoo.make_mesh(), zoo.cross_entropy), "the mesh comes second"),
    "a mesh first, of spmd": (lambda model: zoo.spmd(zoo.make_mesh(), sum, out=""), "the mesh comes second"),
    "a model for a mesh": (lambda model: zoo.place(zoo.make_mesh(), model), "got Decoder: the mesh comes second"),
    "sizes of a mesh": (
        lambda model: zoo.make_mesh((2, 4), ("data", "model")),
        "the size of a mesh axis is a whole number, as in zoo.make_mesh(data=2, tensor=4), not (2, 4): axes have names",
    ),
    "a model to initialize": (
        lambda model: zoo.init(model, KEY, zoo.make_mesh()),
        "expected a function key -> model, got Decoder: zoo.init(partial(make, ...), key, mesh) initializes",
    ),
    "two meshes": (
        lambda model: zoo.value(zoo.cross_entropy, zoo.make_mesh(data=2, fsdp=2, tensor=2))(
            zoo.place(model, zoo.make_mesh(data=1, fsdp=8)), BATCH
        ),
        "the model lies on fsdp 8, and this call is for data 2 x fsdp 2 x tensor 2: zoo.place(model, mesh) moves it",
    ),
    "two meshes of text": (
        lambda model: zoo.generate(
            zoo.place(model, zoo.make_mesh(tensor=2)), TOKENS, max_new_tokens=1, mesh=zoo.make_mesh()
        ),
        "the model lies on data 4 x tensor 2, and this call is for data 8",
    ),
    "a layer of Equinox": (
        lambda model: Transformer(vocab=32, **SIZES, mixer=make_equinox_attention),
        "Block.mixer: expected AbstractMixer, got equinox.nn.MultiheadAttention, whose arrays have no named dims: "
        "the page Add a layer shows how to write one",
    ),
    "a norm of Equinox": (
        lambda model: zoo.count(eqx.tree_at(lambda model: model.norm, model, eqx.nn.RMSNorm(16))),
        "Decoder.norm: expected AbstractNorm, got equinox.nn.RMSNorm",
    ),
    "a class of transformers": (
        lambda model: zoo.models.LlamaForCausalLM,
        "module 'zoo.models' has no attribute 'LlamaForCausalLM': zoo.load(directory) loads a checkpoint of any family",
    ),
    "an automatic class": (lambda model: zoo.AutoModelForCausalLM, "'AutoModelForCausalLM': zoo.load(directory) loads"),
    "sizes as in a config.json": (
        lambda model: Transformer(vocab_size=32, **SIZES),
        "Transformer has no argument 'vocab_size': vocab= is that here",
    ),
    "a misspelled size": (lambda model: Transformer(vocab=32, **SIZES, kv_head=1), "did you mean kv_heads=?"),
    "no argument": (
        lambda model: zoo.make_mesh(gpus=2),
        "no argument 'gpus': it takes data, fsdp, expert, context, te",
    ),
    "PEFT's rank": (lambda model: zoo.adapters.lora(model, r=8, key=KEY), "lora has no argument 'r': rank= is that"),
    "a maximum length": (
        lambda model: zoo.generate(model, TOKENS, max_length=8),
        "generate has no argument 'max_length': max_new_tokens= is that here",
    ),
    "a float for a size": (
        lambda model: Transformer(vocab=64.0, **SIZES),
        "vocab=64.0: expected a whole number, as an int",
    ),
    "a float for a length": (lambda model: zoo.generate(model, TOKENS, max_new_tokens=2.0), "max_new_tokens=2.0"),
    "a layer to check": (
        lambda model: zoo.testing.check_mixer(zoo.layers.MLP(4, 4, key=KEY)),
        "make: expected a class, a function or functools.partial of one, which is called with key= for each layer, "
        "not a layer, MLP",
    ),
    "a directory for a tokenizer": (
        lambda model: load_records([{"text": "a"}], tokenizer="checkpoints/base", seq_len=8),
        "expected a tokenizer of zoo.train.read_tokenizer(directory), which keeps every byte of a text, not str",
    ),
    "another library's tokenizer": (
        lambda model: load_text({"a": "b"}, tokenizer=PreTrainedTokenizerFast()),
        "keeps every byte of a text, not PreTrainedTokenizerFast",
    ),
    "a tokenizer of a stream": (
        lambda model: stream_records("x.jsonl", tokenizer=PreTrainedTokenizerFast(), batch_size=1, seq_len=8),
        "keeps every byte of a text, not PreTrainedTokenizerFast",
    ),
    "tensors of PyTorch": (
        lambda model: model(Tensor(TOKENS)),
        "tokens: expected an array of JAX or NumPy, got a tensor of PyTorch: pass x.numpy()",
    ),
    "a mask of PyTorch": (lambda model: model(TOKENS, mask=Tensor(TOKENS)), "mask: expected an array of JAX or NumPy"),
    "a batch of PyTorch": (
        lambda model: zoo.place_batch({"tokens": Tensor(TOKENS)}, zoo.make_mesh()),
        "tokens: expected an array of JAX or NumPy, got a tensor of PyTorch",
    ),
    "a prompt of PyTorch": (
        lambda model: zoo.generate(model, Tensor(TOKENS), max_new_tokens=1),
        "the prompt: expected an array of JAX or NumPy, got a tensor of PyTorch",
    ),
    "a loss of PyTorch's tensors": (
        lambda model: zoo.cross_entropy(model, {name: Tensor(x) for name, x in BATCH.items()}),
        "tokens: expected an array of JAX or NumPy, got a tensor of PyTorch",
    ),
    "a directory first": (
        lambda model: zoo.save("checkpoints/mine", model),
        "zoo.save(model, directory): expected a path, got Decoder",
    ),
    "devices that do not divide": (
        lambda model: MeshOptions(fsdp=3).make_mesh(),
        "--fsdp 3 takes a multiple of 3 devices, and there are 8: let the flags multiply to a divisor of 8, or show",
    ),
}


@pytest.mark.parametrize(("mistake", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_answered(model, mistake, words):
    with pytest.raises((TypeError, ValueError, AttributeError)) as raised:
        mistake(model)
    assert words in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "use",
    [
        lambda model, path: model(TOKENS),
        lambda model, path: zoo.cross_entropy(model, BATCH),
        lambda model, path: zoo.value(zoo.cross_entropy, zoo.make_mesh())(model, BATCH),
        lambda model, path: zoo.generate(model, TOKENS, max_new_tokens=1),
        lambda model, path: zoo.place(model, zoo.make_mesh()),
        lambda model, path: zoo.save(model, path),
    ],
)
def test_a_donated_model_is_answered(model, tmp_path, use):
    donated = jax.tree.map(jnp.copy, model)
    jax.tree.map(lambda x: x.delete(), donated)
    with pytest.raises(RuntimeError, match="was donated to an earlier call, which has reused its memory: go on"):
        use(donated, tmp_path)


def test_a_run_takes_a_folder_in_text(tmp_path):
    assert RunOptions(str(tmp_path)).checkpoints == tmp_path / "checkpoints"  # pyright: ignore[reportArgumentType]
