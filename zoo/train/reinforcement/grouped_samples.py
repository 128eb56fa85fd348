"""Groups of sampled completions of each prompt, with their rewards: drawn by `zoo.generate`, kept on the host.

    sampler = train.make_sampler(model, mesh, "bfloat16")
    samples = train.sample_groups(sampler, prompts, samples=8, max_new_tokens=256, mesh=mesh, key=key)
    groups = train.Groups.of(prompts, samples, rewards(texts, records))
    advantages = train.objectives.group_advantages(groups.rewards)

`zoo.train.GroupSampler` does the first three for records of prompts.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from zoo.generate.decode import unstack_layers
from zoo.generate.request import SharedOptions
from zoo.generate.run import generate
from zoo.models import Decoder
from zoo.parallel import Mesh
from zoo.parallel.batch import fetch_arrays
from zoo.parallel.gather import cast
from zoo.parallel.place import place

from .rewards import RewardValues

_REFUSED = SharedOptions.__annotations__.keys() | {"draft"}
"""Options of `zoo.generate` with which a text is not a sample of softmax(logits / temperature) up to a stop token."""


class Samples(NamedTuple):
    """Sampled completions on the host, all of one prompt after the other."""

    tokens: Int[np.ndarray, "rows new"]
    """New tokens; -1 after a row's end."""
    sampling_log_probs: Float[np.ndarray, "rows new"]
    """Log-probability with which each token was drawn; 0 for -1."""


@eqx.filter_jit
def make_sampler(model: Decoder, mesh: Mesh, dtype: Any) -> Decoder:
    """Copy the parameters for decoding, in `dtype` and with layers unstacked: once for any number of calls of
    `zoo.generate`, each of which would copy them. Drop the copy before the next training step."""
    return place(unstack_layers(cast(model, dtype), mesh), mesh)


def sample_groups(
    model: Decoder,
    prompts: Mapping[str, Shaped[np.ndarray, "prompts ..."]],
    *,
    samples: int,
    max_new_tokens: int,
    mesh: Mesh,
    temperature: float = 1.0,
    stop_tokens: Sequence[int] = (),
    key: Key[Array, ""] | None = None,
    **options: Any,
) -> Samples:
    """Sample completions of each prompt; return them on the host of every process, with the caches freed.

    - `prompts`: `tokens` and `mask`, left-padded, as records of the kind prompts have them. With several processes,
      each passes all prompts.
    - `temperature`: 0 is greedy.

    **Raises** `ValueError` as `zoo.generate` does, and for truncation, penalties and other options with which tokens
    are not drawn from softmax(logits / temperature).
    """
    for name, value in options.items():
        if name not in _REFUSED:
            raise TypeError(f"sample_groups has no option {name}")
        if value is not None:
            raise ValueError(
                f"{name}={value!r}: tokens would not be drawn from softmax(logits / temperature), of which the loss "
                "computes log-probabilities: train without it"
            )
    made = generate(
        model,
        jnp.asarray(prompts["tokens"]),
        mask=jnp.asarray(prompts["mask"]),
        max_new_tokens=max_new_tokens,
        samples=samples,
        temperature=temperature,
        stop_tokens=stop_tokens,
        details=True,
        mesh=mesh,
        key=key,
    )
    return Samples(*fetch_arrays((made.tokens, made.sampling_log_probs)))


class Groups(NamedTuple):
    """Completions of prompts, `samples` of each, and their rewards."""

    prompts: Mapping[str, Shaped[np.ndarray, "prompts ..."]]
    samples: Samples
    rewards: Float[np.ndarray, "prompts samples"]
    metrics: Mapping[str, float]
    """Means over all completions that were drawn: `reward`, `rewards/NAME` of each function if there are several,
    `solved` (see `RewardValues`), `length` in tokens; `unfinished`, the share without an end; and
    `no_signal`, the share of groups with equal rewards, which teach nothing."""

    @classmethod
    def of(
        cls,
        prompts: Mapping[str, Shaped[np.ndarray, "prompts ..."]],
        samples: Samples,
        rewards: RewardValues,
        *,
        stop_tokens: Sequence[int] = (),
    ) -> "Groups":
        """Put samples and the rewards of their texts together."""
        total = rewards.total.reshape(len(prompts["tokens"]), -1)
        lengths = (samples.tokens >= 0).sum(axis=1)
        last = np.take_along_axis(samples.tokens, lengths[:, None] - 1, axis=1)
        parts = {}
        if len(rewards.parts) > 1:
            parts = {f"rewards/{name}": float(part.mean()) for name, part in rewards.parts.items()}
        metrics = {
            "reward": float(total.mean()),
            **parts,
            "solved": rewards.solved,
            "length": float(lengths.mean()),
            "unfinished": 1 - float(np.isin(last, stop_tokens).mean()),
            "no_signal": 1 - float(_has_signal(total).mean()),
        }
        return cls({name: prompts[name] for name in ("tokens", "mask")}, samples, total, metrics)


def _has_signal(rewards: Float[np.ndarray, "prompts samples"]) -> Bool[np.ndarray, "prompts"]:
    return rewards.max(axis=1) > rewards.min(axis=1)


def fill_groups(draws: Iterable[Groups], count: int) -> Groups:
    """Take draws until `count` groups have unequal rewards, or the draws end; return `count` groups, those with unequal
    rewards first (dynamic sampling; DAPO, Yu et al., arXiv:2503.14476, section 3.2).

    Draws are made as they are taken: pass a generator. Metrics are means over all draws, and `draws` is their number.

    **Raises** `ValueError` for draws with fewer groups in all.
    """
    taken: list[Groups] = []
    for groups in draws:
        taken.append(groups)
        if sum(_has_signal(groups.rewards).sum() for groups in taken) >= count:
            break
    rewards = np.concatenate([groups.rewards for groups in taken])
    if len(rewards) < count:
        raise ValueError(f"{len(taken)} draws have {len(rewards)} groups: expected {count}")
    chosen = np.argsort(~_has_signal(rewards), kind="stable")[:count]

    def choose(*arrays: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
        joined = np.concatenate(arrays)
        split = joined.reshape(len(rewards), -1, *joined.shape[1:])  # one row per prompt, or one per sample
        return split[chosen].reshape(-1, *joined.shape[1:])

    prompts, samples = jax.tree.map(choose, *[(groups.prompts, groups.samples) for groups in taken])
    means = {name: float(np.mean([groups.metrics[name] for groups in taken])) for name in taken[0].metrics}
    return Groups(prompts, samples, rewards[chosen], {**means, "draws": float(len(taken))})
