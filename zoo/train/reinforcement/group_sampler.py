"""Sample answers to prompts and reward them, to train a policy and to evaluate it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Key, Shaped

from zoo.models import Decoder
from zoo.parallel import Mesh
from zoo.text.records.records import Records, RecordSplit

from .grouped_samples import Groups, fill_groups, make_sampler, sample_groups
from .rewards import Rewards


@dataclass(frozen=True)
class GroupSampler:
    """Samples groups of answers to prompts, and rewards them.

        sampler = train.GroupSampler(data, rewards, mesh=mesh, max_new_tokens=256)
        groups = sampler.sample(model, next(batches), samples=8, key=key)
        before, texts = sampler.evaluate(model, limit=128, batch_size=64)

    - `data`: records of the kind prompts.
    - `dtype`: of the parameters that sample, the dtype that training computes in.
    - `temperature`: of the samples. The loss divides logits by the same number.

    **Raises** `ValueError` for records of other kinds, and for a mixture.
    """

    data: Records
    rewards: Rewards
    mesh: Mesh
    max_new_tokens: int
    dtype: Any = "float32"
    temperature: float = 1.0

    def __post_init__(self):
        if self.data.kind != "prompts":
            raise ValueError(f"{self.data.kind} records: expected prompts, to sample answers to (--kind prompts)")
        if self.data.parts:
            raise ValueError(
                "a mixture of prompts: its rows do not say from which part they are, so that rewards would read other "
                "records; pass the files without weights"
            )

    def sample(
        self,
        model: Decoder,
        prompts: Mapping[str, Shaped[np.ndarray, "prompts ..."]],
        *,
        samples: int,
        key: Key[Array, ""],
        more: Iterable[Mapping[str, Shaped[np.ndarray, "prompts ..."]]] = (),
    ) -> Groups:
        """Sample a group of answers to each prompt, with the parameters copied once and the copy dropped.

        - `more`: further batches of prompts, drawn while fewer groups than there are `prompts` have unequal rewards.
        """
        copy = make_sampler(model, self.mesh, self.dtype)

        def draw() -> Iterator[Groups]:
            yield self._draw(copy, self.data.train, prompts, samples, jax.random.fold_in(key, 0))[0]
            for number, batch in enumerate(more, start=1):
                yield self._draw(copy, self.data.train, batch, samples, jax.random.fold_in(key, number))[0]

        return fill_groups(draw(), len(prompts["tokens"]))

    def evaluate(
        self, model: Decoder, *, limit: int, batch_size: int
    ) -> tuple[dict[str, float], list[tuple[str, str]]]:
        """Answer `limit` held-out prompts greedily, spread evenly and `batch_size` at a time.

        Returns the mean reward, `validation`, and the share of solved answers, `validation_solved`; then each prompt
        with its answer.
        """
        split = self.data.validation
        split.require_rows()
        copy = make_sampler(model, self.mesh, self.dtype)
        limit = min(limit, len(split.rows))
        rows = [split.rows[number * len(split.rows) // limit] for number in range(limit)]
        rewards = []
        solved = []
        texts = []
        for first in range(0, len(rows), batch_size):
            chosen = rows[first : first + batch_size]
            prompts = {name: np.stack([row[name] for row in chosen]) for name in chosen[0]}
            groups, answers = self._draw(copy, split, prompts, 1, None)
            rewards += groups.rewards[:, 0].tolist()
            solved += [groups.metrics["solved"]] * len(chosen)
            for tokens, mask, answer in zip(prompts["tokens"], prompts["mask"], answers, strict=True):
                texts.append((self.data.decode_prompt(tokens[mask]) + self.data.prompt_end, answer))
        return {"validation": float(np.mean(rewards)), "validation_solved": float(np.mean(solved))}, texts

    def _draw(
        self,
        model: Decoder,
        split: RecordSplit,
        prompts: Mapping[str, Shaped[np.ndarray, "prompts ..."]],
        samples: int,
        key: Key[Array, ""] | None,
    ) -> tuple[Groups, list[str]]:
        """Sample and reward answers, greedy ones without a key; return also each answer."""
        stop_tokens = self.data.stop_tokens
        found = sample_groups(
            model,
            prompts,
            samples=samples,
            max_new_tokens=self.max_new_tokens,
            temperature=0.0 if key is None else self.temperature,
            stop_tokens=stop_tokens,
            mesh=self.mesh,
            key=key,
        )
        records = [record for record in self._read_records(split, prompts) for _ in range(samples)]
        texts = [self.data.decode(tokens[tokens >= 0]) for tokens in found.tokens]
        groups = Groups.of(prompts, found, self.rewards(texts, records), stop_tokens=stop_tokens)
        return groups, texts

    def _read_records(
        self, split: RecordSplit, prompts: Mapping[str, Shaped[np.ndarray, "prompts ..."]]
    ) -> list[dict[str, Any]]:
        """Return the record of each prompt: the text that the model reads as `prompt`, and the further fields."""
        rows = zip(prompts["tokens"], prompts["mask"], prompts["record"], strict=True)
        decode = self.data.tokenizer.decode
        return [split.read_fields(record) | {"prompt": decode(tokens[mask])} for tokens, mask, record in rows]
