"""Write the reference cases of the recurrences to tests/fixtures/ops, one file per operation and variant.

    python scripts/make_op_fixtures.py                                  # all
    python scripts/make_op_fixtures.py --only gla kda --out /tmp/ops    # some, to another folder

Each operation is a loop over tokens in float64, independent of the library; NumPy computes the values, and `jax.grad`
of the same loop in float64 the gradients. A file <op>.<variant>.safetensors has

    in.NAME                     the inputs, float32
    weight.o, weight.state      cotangents: loss = sum(o * weight.o) + sum(state * weight.state)
    f64.o, f64.state            outputs and the last state
    f64.grad.NAME               the loss's gradients

in the layout [batch, time, heads, dim]. `base` has mild decays, `strong` log decays down to about -20 per token, where
dividing by a cumulative decay overflows; operations without a decay among their inputs have no `strong`. All have the
same number of tokens, so that the tests compile each mode once. It takes half a minute; the same versions give the same
bytes.
"""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from safetensors.numpy import save_file

BATCH, HEADS, KEY, VALUE, CHANNELS, STATE = 1, 2, 4, 5, 6, 4
TOKENS = 21
SEED = 0

Inputs = dict[str, Any]
Result = tuple[Any, Any]


def sigmoid(n: Any, x: Any) -> Any:
    """Compute 1 / (1 + exp(-x))."""
    return n.exp(-n.logaddexp(0.0, -x))


def outer(x: Any, y: Any) -> Any:
    """Compute the outer product x yᵀ of each head."""
    return x[..., :, None] * y[..., None, :]


def read(q: Any, s: Any) -> Any:
    """Compute q . s, summed over key_dim."""
    return (q[..., :, None] * s).sum(-2)


def heads_state(n: Any, i: Inputs) -> Any:
    """Return the initial state of an operation with queries, keys and values."""
    return i["s0"] if "s0" in i else n.zeros((*i["q"].shape[:1], *i["q"].shape[2:], i["v"].shape[-1]))


def gated(n: Any, i: Inputs, decay: Callable[[int], Any], *, scale: bool = True) -> Result:
    """Compute s = exp(g) s + k v; o = q . s."""
    s, o = heads_state(n, i), []
    for t in range(i["q"].shape[1]):
        s = n.exp(decay(t)) * s + outer(i["k"][:, t], i["v"][:, t])
        o.append(read(i["q"][:, t], s) * (i["q"].shape[-1] ** -0.5 if scale else 1))
    return n.stack(o, 1), s


def linear_attn(n: Any, i: Inputs) -> Result:
    """Compute s = s + k v; o = q . s."""
    return gated(n, i, lambda t: 0.0)


def linear_attn_norm(n: Any, i: Inputs) -> Result:
    """Compute linear attention divided by q . z, with z the sum of keys."""
    o, s = gated(n, i, lambda t: 0.0, scale=False)
    total = n.cumsum(i["k"], 1)
    return o / (i["q"] * total).sum(-1)[..., None], s


def retention(n: Any, i: Inputs) -> Result:
    """Compute s = gamma s + k v, with one gamma per head."""
    gamma = np.log(1 - 2.0 ** (-5 - np.arange(i["q"].shape[2])))[:, None, None]
    return gated(n, i, lambda t: gamma)


def simple_gla(n: Any, i: Inputs) -> Result:
    """Compute s = exp(g) s + k v, with one decay per head."""
    return gated(n, i, lambda t: i["g"][:, t, :, None, None])


def gla(n: Any, i: Inputs) -> Result:
    """Compute s = exp(g) s + k v, with one decay per key channel."""
    return gated(n, i, lambda t: i["g"][:, t, :, :, None])


def delta(n: Any, i: Inputs, decay: Callable[[int], Any], steps: int = 1) -> Result:
    """Compute s = exp(g) s; then `steps` times s = s + k (beta (v - k . s)); o = q . s."""
    s, o = heads_state(n, i), []
    for t in range(i["q"].shape[1]):
        s = n.exp(decay(t)) * s
        for row in range(steps * t, steps * (t + 1)):
            k = i["k"][:, row]
            s = s + outer(k, i["beta"][:, row, :, None] * (i["v"][:, row] - read(k, s)))
        o.append(read(i["q"][:, t], s) * i["q"].shape[-1] ** -0.5)
    return n.stack(o, 1), s


def delta_rule(n: Any, i: Inputs) -> Result:
    """Compute the delta rule, s = s + k (beta (v - k . s))."""
    return delta(n, i, lambda t: 0.0)


def gated_delta_rule(n: Any, i: Inputs) -> Result:
    """Compute the delta rule after one decay per head."""
    return delta(n, i, lambda t: i["g"][:, t, :, None, None])


def kda(n: Any, i: Inputs) -> Result:
    """Compute the delta rule after one decay per key channel."""
    return delta(n, i, lambda t: i["g"][:, t, :, :, None])


def gated_delta_product(n: Any, i: Inputs) -> Result:
    """Compute two delta rules per token after one decay."""
    return delta(n, i, lambda t: i["g"][:, t, :, None, None], steps=2)


def gdn2(n: Any, i: Inputs) -> Result:
    """Compute s = exp(g) s; s = s + k (w v - (b k) . s); o = q . s."""
    s, o = heads_state(n, i), []
    for t in range(i["q"].shape[1]):
        k = i["k"][:, t]
        s = n.exp(i["g"][:, t, :, :, None]) * s
        s = s + outer(k, i["w"][:, t] * i["v"][:, t] - read(i["b"][:, t] * k, s))
        o.append(read(i["q"][:, t], s) * k.shape[-1] ** -0.5)
    return n.stack(o, 1), s


def comba(n: Any, i: Inputs) -> Result:
    """Compute s = exp(g) s; s = s + k (beta (v - p . s)); o = q . s: Comba that reads after the decay."""
    s, o = heads_state(n, i), []
    for t in range(i["q"].shape[1]):
        s = n.exp(i["g"][:, t, :, None, None]) * s
        s = s + outer(i["k"][:, t], i["beta"][:, t, :, None] * (i["v"][:, t] - read(i["p"][:, t], s)))
        o.append(read(i["q"][:, t], s) * i["q"].shape[-1] ** -0.5)
    return n.stack(o, 1), s


def mesa(n: Any, i: Inputs) -> Result:
    """Compute r = exp(g) r + beta k k; s = exp(g) s + beta k v; o = x . s with (r + diag(lam)) x = q."""
    r, s, o = i["r0"], i["s0"], []
    for t in range(i["q"].shape[1]):
        decay, k = n.exp(i["g"][:, t, :, None, None]), i["k"][:, t]
        r = decay * r + outer(i["beta"][:, t, :, None] * k, k)
        s = decay * s + outer(i["beta"][:, t, :, None] * k, i["v"][:, t])
        matrix = r + i["lam"][..., None] * n.eye(k.shape[-1])
        o.append(read(n.linalg.solve(matrix, i["q"][:, t, ..., None])[..., 0], s))
    return n.stack(o, 1), n.concatenate([r, s], -1)


def hgrn(n: Any, i: Inputs) -> Result:
    """Compute s = exp(g) s + x; o = s."""
    s, o = i["s0"], []
    for t in range(i["x"].shape[1]):
        s = n.exp(i["g"][:, t]) * s + i["x"][:, t]
        o.append(s)
    return n.stack(o, 1), s


def rwkv4(n: Any, i: Inputs) -> Result:
    """Compute num, den, decayed sums of exp(k) v and exp(k); o is their quotient including the current token."""
    k, v, w, u = (i[name] for name in "kvwu")
    num, den, o = n.zeros_like(k[:, 0]), n.zeros_like(k[:, 0]), []
    for t in range(k.shape[1]):  # keys are small here: float64 needs no running maximum
        own = n.exp(u + k[:, t])
        o.append((num + own * v[:, t]) / (den + own))
        num = n.exp(-n.exp(w)) * num + n.exp(k[:, t]) * v[:, t]
        den = n.exp(-n.exp(w)) * den + n.exp(k[:, t])
    return n.stack(o, 1), num / den


def rwkv6(n: Any, i: Inputs) -> Result:
    """Compute o = q . (s + u k v); then s = exp(g) s + k v."""
    s, o = heads_state(n, i), []
    for t in range(i["q"].shape[1]):
        new = outer(i["k"][:, t], i["v"][:, t])
        o.append(read(i["q"][:, t], s + i["u"][..., None] * new))
        s = n.exp(i["g"][:, t, :, :, None]) * s + new
    return n.stack(o, 1), s


def rwkv7(n: Any, i: Inputs) -> Result:
    """Compute s = exp(g) s + b (a . s) + k v; o = q . s."""
    s, o = heads_state(n, i), []
    for t in range(i["q"].shape[1]):
        correction = outer(i["b"][:, t], read(i["a"][:, t], s))
        s = n.exp(i["g"][:, t, :, :, None]) * s + correction + outer(i["k"][:, t], i["v"][:, t])
        o.append(read(i["q"][:, t], s))
    return n.stack(o, 1), s


def mamba1(n: Any, i: Inputs) -> Result:
    """Compute h = exp(dt A) h + dt B x; o = C . h + D x."""
    h, o = n.zeros((len(i["x"]), *i["A"].shape)), []
    for t in range(i["x"].shape[1]):
        x, dt = i["x"][:, t], i["dt"][:, t]
        h = n.exp(dt[..., None] * i["A"]) * h + outer(dt * x, i["B"][:, t])
        o.append((h * i["C"][:, t, None]).sum(-1) + i["D"] * x)
    return n.stack(o, 1), h


def mamba2(n: Any, i: Inputs) -> Result:
    """Compute the state-space model with one decay per head, and B and C shared by groups of heads."""
    h, o = i["s0"], []
    share = i["x"].shape[2] // i["B"].shape[2]
    for t in range(i["x"].shape[1]):
        x, dt = i["x"][:, t], i["dt"][:, t]
        b, c = (n.repeat(i[name][:, t], share, 1) for name in "BC")
        h = n.exp(dt * i["A"])[..., None, None] * h + outer(dt[..., None] * x, b)
        o.append((h * c[..., None, :]).sum(-1) + i["D"][:, None] * x)
    return n.stack(o, 1), h


def mamba3(n: Any, i: Inputs) -> Result:
    """Compute s = exp(adt) (s + (1 - lam) dt b x of the last token) + lam dt b x; o = c . s + D x. Angles, the sums of
    pi tanh(angle) dt, turn b and c."""
    s, o = i["s0"], []
    phi, before = 0.0, 0.0
    for t in range(i["x"].shape[1]):
        x, dt, lam, decay = (i[name][:, t] for name in ("x", "dt", "lam", "adt"))
        phi = phi + np.pi * n.tanh(i["angle"][:, t]) * dt[..., None]
        b, c = (turn_pairs(n, i[name][:, t], phi) for name in "BC")
        late, now = (weight[..., None, None] for weight in ((1 - lam) * dt, lam * dt))
        s = n.exp(decay)[..., None, None] * (s + late * before) + now * outer(b, x)
        o.append(read(c, s) + i["D"][:, None] * x)
        before = outer(b, x)
    return n.stack(o, 1), s


def turn_pairs(n: Any, x: Any, phi: Any) -> Any:
    """Turn the pairs (0, 1), (2, 3), ... of x by the angles phi, and leave the rest."""
    size = 2 * phi.shape[-1]
    first, second = x[..., 0:size:2], x[..., 1:size:2]
    turned = [first * n.cos(phi) - second * n.sin(phi), first * n.sin(phi) + second * n.cos(phi)]
    return n.concatenate([n.stack(turned, -1).reshape(*x.shape[:-1], size), x[..., size:]], -1)


def rg_lru(n: Any, i: Inputs) -> Result:
    """Compute h = a h + sqrt(1 - a^2) sigmoid(i) x, with 1 instead of the root at the first token."""
    h, o = n.zeros_like(i["x"][:, 0]), []
    for t in range(i["x"].shape[1]):
        log_a = -8 * sigmoid(n, i["r"][:, t]) * n.logaddexp(0.0, i["param"])
        root = n.sqrt(-n.expm1(2 * log_a)) if t else 1.0
        h = n.exp(log_a) * h + root * sigmoid(n, i["i"][:, t]) * i["x"][:, t]
        o.append(h)
    return n.stack(o, 1), h


def mlstm(n: Any, i: Inputs) -> Result:
    """Compute the mLSTM of xLSTM, with its running maximum."""
    c, o = heads_state(n, i), []
    z, m = n.zeros_like(i["k"][:, 0]), None
    for t in range(i["q"].shape[1]):
        q, k, v = (i[name][:, t] for name in "qkv")
        log_forget, log_input = -n.logaddexp(0.0, -i["f"][:, t]), i["i"][:, t]
        new = log_input if m is None else n.maximum(log_forget + m, log_input)
        forget = n.zeros_like(new) if m is None else n.exp(log_forget + m - new)
        enter, m = n.exp(log_input - new), new
        c = forget[..., None, None] * c + enter[..., None, None] * outer(k, v)
        z = forget[..., None] * z + enter[..., None] * k
        scaled = q * q.shape[-1] ** -0.5
        norm = n.maximum(n.abs((scaled * z).sum(-1)), n.exp(-m)) + 1e-6
        o.append(read(scaled, c) / norm[..., None])
    return n.stack(o, 1), c


OPERATIONS: dict[str, Callable[[Any, Inputs], Result]] = {
    f.__name__: f
    for f in (
        *(linear_attn, linear_attn_norm, retention, simple_gla, gla, delta_rule, gated_delta_rule, hgrn, rwkv4, rwkv6),
        *(mamba1, mamba2, mamba3, kda, gated_delta_product, rwkv7, rg_lru, mlstm, gdn2, comba, mesa),
    )
}
UNDECAYED = ("linear_attn", "linear_attn_norm", "retention", "delta_rule")
"""Operations without a decay among their inputs."""


class Draw:
    """Random inputs in the shapes of the operations."""

    def __init__(self, name: str, variant: str):
        self.random = np.random.default_rng([SEED, zlib.crc32(name.encode())])
        self.tokens, self.strong = TOKENS, variant == "strong"

    def normal(self, *shape: int) -> np.ndarray:
        """Draw standard normal values."""
        return self.random.normal(size=shape)

    def each(self, *dims: int, steps: int = 1) -> np.ndarray:
        """Draw values for each token."""
        return self.normal(BATCH, self.tokens * steps, *dims)

    def unit(self, *dims: int, steps: int = 1) -> np.ndarray:
        """Draw vectors of length one."""
        x = self.each(*dims, steps=steps)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    def decay(self, *dims: int) -> np.ndarray:
        """Draw log decays: mild, or down to -20 per token."""
        if self.strong:
            return -20 * self.random.uniform(size=(BATCH, self.tokens, *dims)) ** 2
        return -np.logaddexp(0, -self.each(*dims) - 2)


def draw(name: str, variant: str) -> dict[str, np.ndarray]:
    """Draw the inputs of an operation in float32."""
    d = Draw(name, variant)
    keys = KEY
    if name in ("hgrn", "rwkv4", "rg_lru", "mamba1"):
        x = d.each(CHANNELS)
    match name:
        case "hgrn":
            i = {"x": x, "g": d.decay(CHANNELS), "s0": d.normal(BATCH, CHANNELS)}
        case "rwkv4":
            w = d.normal(CHANNELS) * 0.5 + (2.5 if d.strong else -1)
            i = {"k": x * (5 if d.strong else 1), "v": d.each(CHANNELS), "w": w, "u": d.normal(CHANNELS)}
        case "rg_lru":
            param = d.normal(CHANNELS) * 0.5 + (4 if d.strong else -2)
            i = {"x": x, "r": d.each(CHANNELS), "i": d.each(CHANNELS), "param": param}
        case "mamba1":
            dt = np.logaddexp(0, d.each(CHANNELS) + (3 if d.strong else -1))
            i = {"x": x, "dt": dt, "A": -np.exp(d.normal(CHANNELS, STATE) * 0.5) * (3 if d.strong else 1)}
            i |= {"B": d.each(STATE), "C": d.each(STATE), "D": d.normal(CHANNELS)}
        case "mamba2":
            dt = np.logaddexp(0, d.each(2 * HEADS) + (3 if d.strong else -1))
            i = {"x": d.each(2 * HEADS, VALUE), "dt": dt, "A": -np.exp(d.normal(2 * HEADS)) * (3 if d.strong else 1)}
            i |= {"B": d.each(HEADS, STATE), "C": d.each(HEADS, STATE), "D": d.normal(2 * HEADS)}
            i |= {"s0": d.normal(BATCH, 2 * HEADS, VALUE, STATE)}
        case "mamba3":
            dt = np.logaddexp(0, d.each(HEADS) - 1)
            i = {"x": d.each(HEADS, VALUE), "dt": dt, "adt": d.decay(HEADS), "lam": sigmoid(np, d.each(HEADS))}
            i |= {"angle": 2 * d.each(HEADS, 1), "B": d.each(HEADS, STATE), "C": d.each(HEADS, STATE)}
            i |= {"D": d.normal(HEADS), "s0": d.normal(BATCH, HEADS, STATE, VALUE)}
        case _:
            steps = 2 if name == "gated_delta_product" else 1
            i = {"q": d.each(HEADS, keys), "v": d.each(HEADS, VALUE, steps=steps)}
            corrects = name in ("delta_rule", "gated_delta_rule", "kda", "gated_delta_product", "comba", "mesa")
            i["k"] = (d.unit if corrects or name == "gdn2" else d.each)(HEADS, keys, steps=steps)
            if corrects:
                i["beta"] = 1 / (1 + np.exp(-d.each(HEADS, steps=steps)))
            if name in ("simple_gla", "gated_delta_rule", "gated_delta_product", "comba", "mesa"):
                i["g"] = d.decay(HEADS)
            if name in ("gla", "kda", "rwkv6", "rwkv7", "gdn2"):
                i["g"] = d.decay(HEADS, keys)
            if name == "gdn2":
                i |= {"b": 2 / (1 + np.exp(-d.each(HEADS, keys))), "w": 1 / (1 + np.exp(-d.each(HEADS, VALUE)))}
            if name == "comba":
                i["p"] = i["k"] / (1 + np.exp(-d.normal(HEADS, 1)))
            if name == "mesa":
                root = d.normal(BATCH, HEADS, keys, keys)
                i |= {"lam": d.random.uniform(0.25, 1.25, (HEADS, keys)), "r0": root @ root.swapaxes(-1, -2) / keys}
            if name == "rwkv6":
                i["u"] = d.normal(HEADS, keys)
            if name == "rwkv7":
                direction = d.unit(HEADS, keys)
                i |= {"a": -direction, "b": direction / (1 + np.exp(-d.each(HEADS, keys)))}
                i["g"] = i["g"] / (20 if d.strong else 1) - (0.05 if d.strong else 0)
            if name == "mlstm":
                i |= {"i": d.each(HEADS) * (6 if d.strong else 2)}
                i |= {"f": -20 * d.random.uniform(size=i["i"].shape) if d.strong else d.each(HEADS) + 2}
            if name == "linear_attn_norm":  # features are positive
                i |= {name: np.exp(0.5 * i[name]) for name in "qk"}
            if name not in ("linear_attn_norm", "mlstm"):
                i["s0"] = d.normal(BATCH, HEADS, keys, VALUE)
    return {name: np.asarray(x, np.float32) for name, x in i.items()}


def case(name: str, variant: str) -> dict[str, np.ndarray]:
    """Compute all arrays of a file."""
    inputs, random = draw(name, variant), np.random.default_rng([SEED, 1])
    operation, wide = OPERATIONS[name], {key: x.astype(np.float64) for key, x in inputs.items()}
    with np.errstate(all="raise", under="ignore"):
        o, state = operation(np, wide)
    weights = {"o": random.normal(size=o.shape), "state": random.normal(size=state.shape)}
    weights = {key: x.astype(np.float32) for key, x in weights.items()}

    def loss(inputs: Inputs) -> Any:
        o, state = operation(jnp, inputs)
        return (o * weights["o"]).sum() + (state * weights["state"]).sum()

    gradients = jax.grad(loss)({key: jnp.asarray(x) for key, x in wide.items()})
    return {
        **{f"in.{key}": x for key, x in inputs.items()},
        **{f"weight.{key}": x for key, x in weights.items()},
        "f64.o": o,
        "f64.state": state,
        **{f"f64.grad.{key}": np.asarray(x) for key, x in gradients.items()},
    }


def main(*, only: tuple[str, ...] = (), out: Path = Path("tests/fixtures/ops")) -> None:
    """Write the cases of the named operations, or of all.

    Args:
        only: names of operations.
        out: the folder for the files.
    """
    unknown = set(only) - set(OPERATIONS)
    if unknown:
        raise SystemExit(
            f"make_op_fixtures: no operation {', '.join(sorted(unknown))}; there are {', '.join(OPERATIONS)}"
        )
    out.mkdir(parents=True, exist_ok=True)
    with jax.enable_x64(True):
        for name in only or OPERATIONS:
            for variant in ("base",) if name in UNDECAYED else ("base", "strong"):
                arrays = case(name, variant)
                save_file(
                    {key: np.ascontiguousarray(x) for key, x in arrays.items()}, out / f"{name}.{variant}.safetensors"
                )
                print(f"{name}.{variant}: {sum(x.nbytes for x in arrays.values()) / 1024:.0f} KB")


if __name__ == "__main__":
    tyro.cli(main)
