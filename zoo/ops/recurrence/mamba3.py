"""Mamba-3: a state-space model with the trapezoidal rule, data-dependent rotations, and several inputs and outputs.

    φ_t = φ_{t-1} + π tanh(angle_t) dt_t                                angles that turn pairs of B_t and C_t
    S_t = exp(g_t) (S_{t-1} + (1 - λ_t) dt_t Σ_r B_{t-1,r} x_{t-1,r}ᵀ) + λ_t dt_t Σ_r B_{t,r} x_{t,r}ᵀ
    y_{t,r} = C_{t,r} · S_t + D x_{t,r}                                 S: [state, head_dim] of each head

(Lahoti et al., arXiv:2603.15569; g = dt A. The equations for rank r > 1, MIMO, are taken from the step reference of
the authors' code, state-spaces/mamba.) A head has n angles, which turn the first n of the pairs (0, 1), (2, 3), ... of
B and C.

A token is written in two parts: the first, weighed by its λ dt, when it comes, and the late part, weighed by (1 - λ) dt
of the next token, when that one comes. With both written at once,

    H_t = S_t + (1 - λ_{t+1}) dt_{t+1} Σ_r B_{t,r} x_{t,r}ᵀ,

this is `gated_linear`:

    H_t = exp(g_t) H_{t-1} + Σ_r w_t B_{t,r} x_{t,r}ᵀ,    w_t = λ_t dt_t + (1 - λ_{t+1}) dt_{t+1}
    C_{t,R} · S_t = C_{t,R} · H_t - (1 - λ_{t+1}) dt_{t+1} Σ_r (C_{t,R} · B_{t,r}) x_{t,r}

With rank r, a token is r rows of that recurrence, of which only the first decays. Row R reads the state after the rows
up to R; what the later rows write is added to its output, with the difference above. The state after the last token
holds the B and x of that token, whose late part is written by the token that continues it.

Rounding: angles are summed in turns of 2π radians, and whole turns are dropped, which is exact. Each token then adds an
error of at most 3e-8 turns, about the rounding of its own angle, however long the text is. For costs and other rounding
see `gated_linear`, with r rows per token; the rows of a token itself take 2 r² (state + head_dim) FLOPs more.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from zoo.shapes import MatrixState, PaddingMask, SegmentIds

from .affine import DiagonalAffineMap, IncomingState, mask_rows
from .chunks import find_segment_starts
from .gated_linear import GATED_LINEAR
from .select import RecurrenceRequest

_Heads = Float[Array, "batch seq heads"]
_Rows = Float[Array, "batch seq rank heads _"]


class Mamba3State(NamedTuple):
    """The state of Mamba-3, in float32."""

    ssm_state: Float[Array, "batch heads state head_dim"]
    B: Float[Array, "batch rank heads state"]
    """B of the last token, turned by its angles."""
    x: Float[Array, "batch rank heads head_dim"]
    """Inputs of the last token."""
    turns: Float[Array, "batch heads pairs"]
    """Sum of the angles, in turns of 2π radians, from -1/2 to 1/2."""

    def write_late(self, late: Float[Array, "batch heads"]) -> Float[Array, "batch heads state head_dim"]:
        """Return the state with the late part of the last token, which the token after it weighs by `late`."""
        update = jnp.einsum("brhn,brhp->bhnp", late[:, None, :, None] * self.B, self.x, precision="highest")
        return self.ssm_state + update


class _Mamba3Map(NamedTuple):
    """The map that a range of tokens applies to a `Mamba3State`: decay (S + late B xᵀ) + update, with B, x and angles
    of its last token."""

    decay: Float[Array, "batch heads 1 1"]
    late: Float[Array, "batch heads"]
    """(1 - λ) dt of its first token."""
    offset: Mamba3State

    def apply(self, state: Mamba3State) -> Mamba3State:
        """Return the state after the range."""
        return self.offset._replace(ssm_state=self.decay * state.write_late(self.late) + self.offset.ssm_state)

    def then(self, later: "_Mamba3Map") -> "_Mamba3Map":
        """Return the map of this range followed by a later one."""
        return _Mamba3Map(later.decay * self.decay, self.late, later.apply(self.offset))

    def reset(self, fresh: Bool[Array, "batch"]) -> "_Mamba3Map":
        """Return the map that forgets the state before the range in rows where `fresh`."""
        return self._replace(decay=mask_rows(self.decay, fresh))


class _TurnMap(NamedTuple):
    """The map that a range of tokens applies to a sum of angles in turns: factor * turns + offset, without whole turns,
    which a float32 subtracts exactly."""

    factor: Float[Array, "batch *seq 1 1"]
    """1, and 0 where a segment starts after the first token."""
    offset: Float[Array, "batch *seq heads pairs"]

    def apply(self, turns: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the sum after the range."""
        total = self.factor * turns + self.offset
        return total - jnp.round(total)

    def then(self, later: "_TurnMap") -> "_TurnMap":
        """Return the map of this range followed by a later one."""
        return _TurnMap(later.factor * self.factor, later.apply(self.offset))

    def reset(self, fresh: Bool[Array, "batch"]) -> "_TurnMap":
        """Return the map that forgets the sum before the range in rows where `fresh`."""
        return self._replace(factor=mask_rows(self.factor, fresh))


def mamba3(
    x: Float[Array, "batch seq *rank heads head_dim"],
    dt: _Heads,
    log_decay: _Heads,
    trapezoid: _Heads,
    angle: Float[Array, "batch seq heads pairs"],
    B: Float[Array, "batch seq *rank heads state"],
    C: Float[Array, "batch seq *rank heads state"],
    D: Float[Array, "heads"] | None = None,
    *,
    state: Mamba3State | IncomingState | None = None,
    token_mask: PaddingMask | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: str = "auto",
) -> tuple[Float[Array, "batch seq *rank heads head_dim"], Mamba3State]:
    """Compute Mamba-3: returns the outputs in the dtype of `x`, and the state after the last token.

    - `x`, `B`, `C`: with a dim of rank r, or without it for one input and output.
    - `dt` >= 0, `log_decay` dt A <= 0, `trapezoid` λ from 0 (all of a token is written when the next one comes) to 1
      (Mamba-2). `angle`: before its tanh; any number of angles up to `state // 2`.
    - `state`: the initial state, zeros by default; every segment but the first resets it. For a shard of a sequence an
      `IncomingState`, called first with the map of the angles, then with the map of the state.
    - `token_mask`: False for padding before a row's first token, which leaves the state as it was. With padding
      elsewhere a row gives NaN.
    - `implementation`: a name in `GATED_LINEAR`.

    **Raises** `ValueError` for more angles than pairs of states.
    """
    has_rank = x.ndim == 5
    if not has_rank:
        x, B, C = (y[:, :, None] for y in (x, B, C))
    dtype = x.dtype
    if 2 * angle.shape[-1] > B.shape[-1]:
        raise ValueError(f"mamba3: {angle.shape[-1]} angles turn pairs, and there are {B.shape[-1]} states")
    dt, log_decay, trapezoid, angle = (y.astype(jnp.float32) for y in (dt, log_decay, trapezoid, angle))
    if token_mask is not None:
        dt, log_decay = (jnp.where(token_mask[..., None], y, 0) for y in (dt, log_decay))
        x = jnp.where(token_mask[..., None, None, None], x, 0)
    own_turns = _sum_turns(0.5 * jnp.tanh(angle) * dt[..., None], segment_ids)
    if state is None:
        turns = own_turns.offset
    elif isinstance(state, Mamba3State):
        turns = own_turns.apply(state.turns[:, None])
    else:
        earlier_turns = state(_TurnMap(own_turns.factor[:, -1], own_turns.offset[:, -1]))
        turns = own_turns.apply(earlier_turns[:, None])
    B, C = (_turn_pairs(y.astype(jnp.float32), turns) for y in (B, C))

    now = trapezoid * dt
    late = (1 - trapezoid) * dt  # of the token before
    next_late = _shift_left(late, segment_ids)
    first_late = _find_first_late(late, token_mask)
    last_B, last_x = (y[:, -1].astype(jnp.float32) for y in (B, x))
    if token_mask is not None and isinstance(state, Mamba3State):
        has_tokens = token_mask.any(1)[:, None, None, None]
        last_B = jnp.where(has_tokens, last_B, state.B)
        last_x = jnp.where(has_tokens, last_x, state.x)

    initial = None
    if isinstance(state, Mamba3State):
        initial = state.write_late(first_late)
    elif state is not None:

        def find_initial(tokens: DiagonalAffineMap) -> Array:
            after = Mamba3State(tokens.offset, last_B, last_x, turns[:, -1])
            return state(_Mamba3Map(tokens.factor, first_late, after)).write_late(first_late)

        initial = find_initial
    key = ((now + next_late)[:, :, None, :, None] * B).astype(dtype)
    options = {"state": initial, "segment_ids": segment_ids, "implementation": implementation}
    y, last = _mix_rows(C.astype(dtype), key, x, log_decay, **options)
    y = y.astype(jnp.float32) + _read_own_rows(B, C, x, now, next_late)
    if D is not None:
        y = y + D.astype(jnp.float32)[:, None] * x
    if token_mask is not None:
        is_left = (token_mask == jnp.sort(token_mask, axis=1)).all(1)
        y = jnp.where(is_left[:, None, None, None, None], y, jnp.nan)
    if not has_rank:
        y = y[:, :, 0]
    return y.astype(dtype), Mamba3State(last, last_B, last_x, turns[:, -1])


def _sum_turns(step: Float[Array, "batch seq heads pairs"], segment_ids: SegmentIds | None) -> _TurnMap:
    """Return for each token the map of all tokens up to it, which add `step` turns each."""
    continues = jnp.ones(step.shape[:2], jnp.float32)
    if segment_ids is not None:
        continues = jnp.where(find_segment_starts(segment_ids), 0.0, continues)
    each = _TurnMap(continues[..., None, None], step - jnp.round(step))
    return lax.associative_scan(lambda earlier, later: earlier.then(later), each, axis=1)


def _turn_pairs(x: _Rows, turns: Float[Array, "batch seq heads pairs"]) -> _Rows:
    """Turn the pairs (0, 1), (2, 3), ... of the last dim, as many as there are angles."""
    size = 2 * turns.shape[-1]
    radians = 2 * jnp.pi * turns[:, :, None]
    cos = jnp.cos(radians)
    sin = jnp.sin(radians)
    first = x[..., 0:size:2]
    second = x[..., 1:size:2]
    turned = jnp.stack([first * cos - second * sin, first * sin + second * cos], axis=-1)
    return jnp.concatenate([turned.reshape(*x.shape[:-1], size), x[..., size:]], axis=-1)


def _shift_left(late: _Heads, segment_ids: SegmentIds | None) -> _Heads:
    """Return the value of the token after each; 0 for the last one of a segment and of the row."""
    following = jnp.pad(late[:, 1:], [(0, 0), (0, 1), (0, 0)])
    if segment_ids is None:
        return following
    ends = jnp.pad(find_segment_starts(segment_ids)[:, 1:], [(0, 0), (0, 1)])
    return jnp.where(ends[..., None], 0, following)


def _find_first_late(late: _Heads, token_mask: PaddingMask | None) -> Float[Array, "batch heads"]:
    """Return the value of the first token of each row that is not padding."""
    if token_mask is None:
        return late[:, 0]
    first = token_mask.argmax(1)
    return jnp.take_along_axis(late, first[:, None, None], axis=1)[:, 0]


def _mix_rows(
    query: _Rows,
    key: _Rows,
    value: _Rows,
    log_decay: _Heads,
    *,
    state: MatrixState | IncomingState | None,
    segment_ids: SegmentIds | None,
    implementation: str,
) -> tuple[_Rows, MatrixState]:
    """Compute `gated_linear` of the rows of all tokens. The first row of a token decays the state."""
    batch, seq, rank = value.shape[:3]
    decays = jnp.pad(log_decay[:, :, None], [(0, 0), (0, 0), (0, rank - 1), (0, 0)])
    query, key, rows, decays = (x.reshape(batch, seq * rank, *x.shape[3:]) for x in (query, key, value, decays))
    if segment_ids is not None:
        segment_ids = jnp.repeat(segment_ids, rank, axis=1)
    request = RecurrenceRequest.from_heads(query, rows, decays, state=state)
    request = dataclasses.replace(request, seq=seq)  # the rows of a single token are one step of decoding
    run = GATED_LINEAR.select(implementation, request).function
    y, last = run(query, key, rows, decays, state=state, segment_ids=segment_ids)
    return y.reshape(value.shape), last


def _read_own_rows(B: _Rows, C: _Rows, x: _Rows, now: _Heads, next_late: _Heads) -> _Rows:
    """Compute what the outputs of a token lack of its own rows: rows after the one that reads, which it has not seen,
    and minus the late part of the others, which it has seen too early."""
    index = jnp.arange(x.shape[2])
    unseen = (index > index[:, None])[..., None]
    weight = jnp.where(unseen, now[:, :, None, None], -next_late[:, :, None, None])
    scores = (C[:, :, :, None] * B[:, :, None]).sum(-1)
    return ((weight * scores)[..., None] * x[:, :, None]).sum(3)


def mamba3_reference(
    x: _Rows,
    dt: _Heads,
    log_decay: _Heads,
    trapezoid: _Heads,
    angle: Float[Array, "batch seq heads pairs"],
    B: _Rows,
    C: _Rows,
    D: Float[Array, "heads"],
    *,
    state: Mamba3State,
) -> tuple[_Rows, Mamba3State]:
    """Compute the equations at the top of this file in float32, token by token."""

    def step(state, token):
        x, dt, g, trapezoid, angle, B, C = token
        turns = state.turns + jnp.tanh(angle) * dt[..., None] / 2
        turns = turns - jnp.round(turns)
        B, C = (_turn_pairs(y[:, None], turns[:, None])[:, 0] for y in (B, C))
        late, now = (weight[..., None, None] for weight in ((1 - trapezoid) * dt, trapezoid * dt))
        S = state.ssm_state + late * jnp.einsum("brhn,brhp->bhnp", state.B, state.x)
        S = jnp.exp(g)[..., None, None] * S + now * jnp.einsum("brhn,brhp->bhnp", B, x)
        y = jnp.einsum("brhn,bhnp->brhp", C, S) + D[:, None] * x
        return Mamba3State(S, B, x, turns), y

    tokens = [y.swapaxes(0, 1).astype(jnp.float32) for y in (x, dt, log_decay, trapezoid, angle, B, C)]
    last, y = lax.scan(step, state, tokens)
    return y.swapaxes(0, 1), last
