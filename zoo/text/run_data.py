"""The interface of a run's data, of whatever kind."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Int, Integer

from .tokenizers import Tokenizer

LossUnit = Literal["bits per byte", "nats per trained token", "reward"]
"""Units of what a run improves: of a loss, or of a reward."""


@runtime_checkable
class RunData(Protocol):
    """A `Corpus` or `Records`, as samples, reports and exports of a run need them.

    - `unit`: of losses, "bits per byte" or "nats per trained token"; of prompts to sample from, "reward". `metric`: the
      name under which a training step logs its loss, or reward, in it.
    - `baselines`: losses to compare with, by name.
    - `stop_tokens`: tokens that end a sample. `prompt_end`: written between a prompt and its sample.
    """

    @property
    def prompt_end(self) -> str: ...

    @property
    def unit(self) -> LossUnit: ...

    @property
    def metric(self) -> str: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def baselines(self) -> Mapping[str, float]: ...

    @property
    def stop_tokens(self) -> tuple[int, ...]: ...

    def encode_prompt(self, prompt: str) -> Int[np.ndarray, "tokens"]:
        """Tokenize a prompt, from the beginning of a document or a chat."""
        ...

    def decode(self, tokens: Integer[np.ndarray, "tokens"] | Integer[Array, "tokens"]) -> str:
        """Return the text of a sample."""
        ...

    def save(self, directory: Path) -> None:
        """Write what another program needs to make tokens into a checkpoint directory."""
        ...
