"""Our entrants: a training step as in the recipes, the first step of a deep model, and decoding."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import zoo
from zoo.inspect.program import CompiledProgram
from zoo.layers import TokenInfo
from zoo.models.stack import swap_stack
from zoo.ops.matmul import einsum_fp32_accum
from zoo.parallel import SaveNames
from zoo.parallel.mesh import is_array_or_shape
from zoo.parallel.remat import Remat, RematPolicy


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a model and its batch; the defaults are those of all CPU figures. With `experts`, each layer is a
    mixture of that many gated MLPs of width `mlp`, of which a token uses `top`."""

    vocab: int = 4096
    embed: int = 256
    layers: int = 8
    heads: int = 4
    mlp: int = 768
    batch: int = 8
    seq: int = 256
    experts: int = 0
    top: int = 2

    def make(self, key: Any, **options: Any) -> zoo.models.Decoder:
        """Build the model, with tied embeddings."""
        sizes = {"vocab": self.vocab, "embed": self.embed, "layers": self.layers, "heads": self.heads, "mlp": self.mlp}
        if self.experts:
            mixture = {"experts": self.experts, "top": self.top}
            return zoo.models.MixtureOfExperts(**sizes, **mixture, **options, key=key)
        return zoo.models.Transformer(**sizes, **options, key=key)

    @property
    def model_flops(self) -> int:
        """Model FLOPs of a training step: two per parameter and token forward, four backward, and the causal half of
        attention's products. Recomputation does not count; of the experts, only the active ones and the router do."""
        used = 3 * self.mlp * self.top + self.experts if self.experts else 3 * self.mlp
        matrices = self.layers * self.embed * (4 * self.embed + used) + self.vocab * self.embed
        attended = self.layers * self.embed * self.seq
        return 6 * self.batch * self.seq * (matrices + attended)


MIXTURE = Sizes(mlp=384, experts=8)
"""A mixture with as many active parameters as the dense model, plus a router."""
ONE_BILLION = Sizes(vocab=32768, embed=2048, layers=20, heads=16, mlp=5632, batch=1, seq=4096)


def parse_policy(word: str) -> Remat:
    """Return the rematerialization policy of a word: its name, or activations to save, joined by a plus.

    **Raises** `ValueError` for another word.
    """
    policies: dict[str, RematPolicy] = {policy: policy for policy in get_args(RematPolicy)}
    if word in policies:
        return policies[word]
    try:
        return SaveNames(tuple(word.split("+")))
    except ValueError as error:
        raise ValueError(f"--remat {word}: {error}, joined by a plus; or {', '.join(policies)}") from None


def build(make: Callable, key: Any, device: Any = None) -> Any:
    """Return `make(key)`, computed in one program; for an imagined device, its shapes."""
    if device is None:
        return jax.block_until_ready(eqx.filter_jit(make)(key))
    return put_shapes(eqx.filter_eval_shape(make, key), device)


def put_shapes(tree: Any, device: Any) -> Any:
    """Put arrays and shapes on an imagined device, as shapes."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    put = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) if is_array_or_shape(x) else x
    return jax.tree.map(put, tree)


class Training:
    """AdamW training on one device; a call runs one step and blocks until it is done."""

    def __init__(
        self,
        sizes: Sizes,
        dtype: str,
        remat: str,
        *,
        adapt: Callable = lambda model: model,
        device: Any = None,
        **options: Any,
    ):
        """`remat` is a word for `parse_policy`; `options` go to the model; `adapt` wraps it, e.g. in adapters. For an
        imagined `device` there are shapes, and `program` compiles the step."""
        mesh = zoo.make_mesh(devices=jax.devices()[:1] if device is None else [device])
        options["remat"] = parse_policy(remat)
        optimizer = optax.adamw(1e-3, weight_decay=0.1)
        make = lambda key: adapt(sizes.make(key, **options))
        draw = lambda key: jax.random.randint(key, (sizes.batch, sizes.seq + 1), 0, sizes.vocab)
        if device is None:
            self.model = zoo.init(make, jax.random.key(0), mesh)
            state = optimizer.init(zoo.trainable(self.model))
            tokens = draw(jax.random.key(1))
            batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        else:
            self.model = zoo.place(eqx.filter_eval_shape(make, jax.random.key(0)), mesh)
            state = jax.eval_shape(optimizer.init, zoo.trainable(self.model))
            batch = dict.fromkeys(("tokens", "targets"), jax.ShapeDtypeStruct((sizes.batch, sizes.seq), jnp.int32))
        self.state = zoo.place(state, mesh.optimizer)
        self.batch = zoo.place_batch(batch, mesh)

        def loss_fn(model, batch):
            return zoo.cross_entropy(zoo.cast(model, dtype), batch)

        @eqx.filter_jit(donate="all-except-first")
        def step(batch, model, state):
            loss, grads = zoo.value_and_grad(loss_fn, mesh)(model, batch)
            updates, state = optimizer.update(grads, state, zoo.trainable(model))
            return zoo.place(eqx.apply_updates(model, updates), mesh), state, loss

        self.step = step

    def __call__(self) -> None:
        self.model, self.state, loss = self.step(self.batch, self.model, self.state)
        jax.block_until_ready((self.model, loss))

    def program(self) -> CompiledProgram:
        """Compile the step and return its FLOPs, bytes and memory."""
        return zoo.inspect.compiled(self.step, self.batch, self.model, self.state)

    def executed(self) -> dict[str, Any]:
        """Return the executed FLOPs, which include recomputation, the bytes moved, and the temporaries."""
        program = self.program()
        memory = program.memory.temporaries if program.memory else None
        return {"executed_flops": program.flops.total, "bytes_moved": program.bytes_moved, "temporaries": memory}


def first_step(layers: int, remat: str = "elementwise") -> dict[str, float]:
    """Measure the seconds to initialize model and optimizer, of the first step, and of a later one."""
    start = time.perf_counter()
    run = Training(Sizes(layers=layers), "float32", remat)
    jax.block_until_ready((run.model, run.state))
    return {"born": time.perf_counter() - start, **first_and_later(run)}


def first_and_later(run: Callable[[], object]) -> dict[str, float]:
    """Measure the seconds of the first call, and the shortest of three more."""
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return {"first": seconds[0], "later": min(seconds[1:])}


class Decoding:
    """Greedy decoding after a prompt; a call generates all tokens and blocks until they are there."""

    def __init__(
        self,
        sizes: Sizes,
        batch: int,
        *,
        prompt: int = 16,
        new: int = 128,
        dtype: str = "float32",
        device: Any = None,
    ):
        """For an imagined `device` there are shapes, and `program` compiles a step."""
        self.batch, self.new, self.prompt = batch, new, prompt
        unstack = lambda model: swap_stack(model, zoo.models.Stack.unstack)  # once, as for many calls
        model = build(lambda key: zoo.cast(sizes.make(key), dtype), jax.random.key(0), device)
        self.model = unstack(model) if device is None else put_shapes(eqx.filter_eval_shape(unstack, model), device)
        self.tokens = build(lambda key: jax.random.randint(key, (batch, prompt), 0, sizes.vocab), jax.random.key(1))
        self.generate = functools.partial(zoo.generate, max_new_tokens=new)
        self.device = device

    def __call__(self) -> None:
        jax.block_until_ready(self.generate(self.model, self.tokens))

    def program(self) -> CompiledProgram:
        """Compile one step, a greedy token for each row, which updates the states of the layers in place."""

        @eqx.filter_jit(donate="all-except-first")
        def step(model, states, token, position):
            hidden, states = model.hidden(token, TokenInfo(position), states)
            return model.logits(hidden.x).argmax(-1), states

        states = self._make_states(self.prompt + self.new)
        token = jnp.zeros((self.batch, 1), jnp.int32)
        if self.device is not None:
            states, token = put_shapes((states, token), self.device)
        return zoo.inspect.compiled(step, self.model, states, token, token)

    def bytes_a_token(self) -> float:
        """Return the bytes read per token: all parameters, including the embedding since the head is tied, and on
        average the filled part of the KV cache; recurrent states are read and written."""
        one, two = (count_bytes(self._make_states(length)) for length in (1, 2))
        slot = two - one
        return count_bytes(self.model) + slot * (self.prompt + self.new / 2) + 2 * (one - slot)

    def _make_states(self, length: int) -> Any:
        """Return the shapes of the states of all layers."""
        return eqx.filter_eval_shape(lambda model: model.init_state(self.batch, length), self.model)


def count_bytes(tree: Any) -> int:
    """Count the bytes of floating-point arrays and shapes."""
    arrays = [x for x in jax.tree.leaves(tree) if is_array_or_shape(x) and jnp.issubdtype(x.dtype, jnp.inexact)]
    return sum(x.size * x.dtype.itemsize for x in arrays)


class Kernel:
    """A function of drawn arrays, or the first of its results with the gradients of all floating-point inputs. A call
    runs it `calls` times and blocks at the end."""

    def __init__(
        self, function: Callable, draw: Callable[[], tuple], *, gradient: bool, calls: int = 1, device: Any = None
    ):
        self.calls = calls
        self.gradient = gradient
        inputs = build(lambda _: draw(), jax.random.key(0), device)
        self.run = self._make(function)
        output = _first(jax.eval_shape(function, *inputs))
        draw_weights = lambda key: jax.random.normal(key, output.shape, output.dtype)
        self.arguments = inputs
        if gradient:
            self.arguments = (build(draw_weights, jax.random.key(1), device), *inputs)

    def __call__(self) -> None:
        for _ in range(self.calls):
            results = self.run(*self.arguments)
        jax.block_until_ready(results)

    def program(self) -> CompiledProgram:
        """Compile the function."""
        return zoo.inspect.compiled(self.run, *self.arguments)

    def bytes_passed(self) -> int:
        """Count the bytes of inputs and results."""
        return count_bytes((self.arguments, jax.eval_shape(self.run, *self.arguments)))

    def compare(self, reference: Callable) -> list[float]:
        """Return the relative errors of the output and of each gradient, |x - y| / |y|, where y is what `reference`
        gives for the same inputs in float32."""
        up = [x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in self.arguments]
        with jax.default_matmul_precision("highest"):
            wanted = self._make(reference)(*up)
        error = jax.jit(lambda x, y: jnp.linalg.norm((x.astype(jnp.float32) - y).ravel()) / jnp.linalg.norm(y.ravel()))
        found = self.run(*self.arguments)
        return [float(error(*pair)) for pair in zip(*map(jax.tree.leaves, (found, wanted)), strict=True)]

    def _make(self, function: Callable) -> Callable:
        if not self.gradient:
            return jax.jit(function)

        def run(weights, *inputs):
            output, pull_back = jax.vjp(lambda *inputs: _first(function(*inputs)), *inputs)
            gradients = [x for x in pull_back(weights) if x.dtype != jax.dtypes.float0]
            return output, gradients

        return jax.jit(run)


def _first(results: Any) -> Any:
    return jax.tree.leaves(results)[0]


def count(sizes: Sizes) -> int:
    """Count the parameters without allocating them."""
    return zoo.count(eqx.filter_eval_shape(sizes.make, jax.random.key(0)))


class GroupedMatmul:
    """The grouped product of 4,096 rows of 256 with matrices of 384 by 256, with or without its gradient. `loads` are
    the rows per expert."""

    ROWS, IN, OUT = 4096, 256, 384

    def __init__(self, implementation: Callable, loads: Sequence[int], *, gradient: bool, dtype: str = "float32"):
        keys = jax.random.split(jax.random.key(0), 2)
        x = jax.random.normal(keys[0], (self.ROWS, self.IN), dtype)
        weight = jax.random.normal(keys[1], (len(loads), self.OUT, self.IN), dtype)
        self.arguments = x, weight, jnp.asarray(loads, jnp.int32)
        total = lambda x, weight, sizes: (implementation(x, weight, sizes).astype(jnp.float32) ** 2).sum()
        self.run = jax.jit(jax.grad(total, (0, 1)) if gradient else implementation)
        self.flops = 2 * self.ROWS * self.IN * self.OUT * (3 if gradient else 1)

    def __call__(self) -> None:
        jax.block_until_ready(self.run(*self.arguments))


def batched(x: Any, weight: Any, sizes: Any) -> Any:
    """Compute the dense product of the same size: an equal number of rows per expert, without dispatch."""
    rows = einsum_fp32_accum("eri,eoi->ero", x.reshape(len(weight), -1, x.shape[1]), weight)
    return rows.reshape(len(x), -1)


def loads(experts: int, active: int, uneven: bool = False) -> list[int]:
    """Return the rows per expert: the first `active` get equal numbers, or if `uneven` in proportion to 1, 2, 3, ..."""
    parts = [i + 1 if uneven else 1 for i in range(active)]
    rows = [GroupedMatmul.ROWS * part // sum(parts) for part in parts]
    rows[-1] += GroupedMatmul.ROWS - sum(rows)
    return rows + [0] * (experts - active)
