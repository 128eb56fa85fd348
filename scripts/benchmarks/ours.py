"""Our side: a training step as recipes write it, the first step of a deep model, and decoding."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import optax

import zoo
from zoo.ops import attention


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A model and its batch; the defaults are those that all figures on a CPU are for."""

    vocab: int = 4096
    embed: int = 256
    layers: int = 8
    heads: int = 4
    mlp: int = 768
    batch: int = 8
    seq: int = 256

    def make(self, key: Any, **options: Any) -> zoo.models.Decoder:
        """A Transformer of these sizes, its head the embedding's table."""
        sizes = {"vocab": self.vocab, "embed": self.embed, "layers": self.layers, "heads": self.heads, "mlp": self.mlp}
        return zoo.models.Transformer(**sizes, **options, key=key)

    @property
    def model_flops(self) -> int:
        """What a training step has to multiply: two FLOPs a parameter and token forwards, four backwards, and the
        causal half of attention's products. What is computed again does not count."""
        matrices = self.layers * (4 * self.embed**2 + 3 * self.embed * self.mlp) + self.vocab * self.embed
        attended = self.layers * self.embed * self.seq
        return 6 * self.batch * self.seq * (matrices + attended)


ONE_BILLION = Sizes(vocab=32768, embed=2048, layers=20, heads=16, mlp=5632, batch=1, seq=4096)


class Training:
    """A step of AdamW on one device that keeps its model; called, it takes one, and returns when the step is done."""

    def __init__(self, sizes: Sizes, dtype: str, remat: zoo.parallel.Remat, form: Callable = attention.grouped):
        mesh = zoo.make_mesh(devices=jax.devices()[:1])
        options = {"remat": remat, "form": form}
        self.model = zoo.init(lambda key: sizes.make(key, **options), jax.random.key(0), mesh)
        optimiser = optax.adamw(1e-3, weight_decay=0.1)
        self.state = zoo.place(optimiser.init(zoo.trainable(self.model)), mesh)
        tokens = jax.random.randint(jax.random.key(1), (sizes.batch, sizes.seq + 1), 0, sizes.vocab)
        self.batch = zoo.place_batch({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}, mesh)

        def loss_fn(model, batch):
            return zoo.cross_entropy(zoo.cast(model, dtype), batch)

        @eqx.filter_jit(donate="all-except-first")
        def step(batch, model, state):
            loss, grads = zoo.value_and_grad(loss_fn, mesh)(model, batch)
            updates, state = optimiser.update(grads, state, zoo.trainable(model))
            return zoo.place(eqx.apply_updates(model, updates), mesh), state, loss

        self.step = step

    def __call__(self) -> None:
        self.model, self.state, loss = self.step(self.batch, self.model, self.state)
        jax.block_until_ready((self.model, loss))

    def program(self) -> zoo.inspect.Program:
        """What the step costs, read off the compiled program."""
        return zoo.inspect.compiled(self.step, self.batch, self.model, self.state)


def first_step(layers: int, remat: zoo.parallel.Remat = "elementwise") -> dict[str, float]:
    """Seconds in which a new process makes its model and optimiser, takes a first step, and a later one."""
    start = time.perf_counter()
    run = Training(Sizes(layers=layers), "float32", remat)
    jax.block_until_ready((run.model, run.state))
    return {"born": time.perf_counter() - start, **first_and_later(run)}


def first_and_later(run: Callable[[], object]) -> dict[str, float]:
    """Seconds of the first call, and of the shortest of three more."""
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return {"first": seconds[0], "later": min(seconds[1:])}


class Decoding:
    """Greedy tokens after a prompt; called, it makes them all, and returns when they are there."""

    def __init__(self, sizes: Sizes, batch: int, *, prompt: int = 16, new: int = 128, dtype: str = "float32"):
        self.batch, self.new, self.prompt = batch, new, prompt
        make = lambda key: zoo.cast(sizes.make(key), dtype)
        model = jax.block_until_ready(eqx.filter_jit(make)(jax.random.key(0)))
        self.model = zoo.models.swap_stack(model, zoo.models.Stack.unstacked)  # once, as for many calls
        self.tokens = jax.random.randint(jax.random.key(1), (batch, prompt), 0, sizes.vocab)
        self.generate = functools.partial(zoo.generate, max_new_tokens=new)

    def __call__(self) -> None:
        jax.block_until_ready(self.generate(self.model, self.tokens))

    def bytes_a_token(self) -> float:
        """What a token has to read: every parameter but the rows of the embedding that it does not ask for, which a
        tied head reads all the same; and, on average, the filled part of the cache."""
        arrays = jax.tree.leaves(eqx.filter(self.model, eqx.is_inexact_array))
        caches = self.model.init_state(self.batch, 1)
        slot = sum(x.nbytes for x in jax.tree.leaves(caches) if eqx.is_inexact_array(x))
        return sum(x.nbytes for x in arrays) + slot * (self.prompt + self.new / 2)


def fused_attention() -> Callable:
    """The kernel of cuDNN where there is one to run it, and the default otherwise."""
    if jax.default_backend() == "gpu":
        return functools.partial(attention.fused, implementation="cudnn")
    return attention.grouped


def count(sizes: Sizes) -> int:
    """Parameters, without making any."""
    return zoo.count(eqx.filter_eval_shape(sizes.make, jax.random.key(0)))
