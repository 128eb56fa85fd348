"""Flags of sampling that `zoo generate` and `zoo chat` share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingFlags:
    """Options of sampling that are numbers, with the names and values of `zoo.generate`."""

    temperature: float | None = None
    """0 is greedy decoding; otherwise tokens are sampled from softmax(logits / temperature)."""
    top_k: int | None = None
    """Sample from the k most likely tokens."""
    top_p: float | None = None
    """Nucleus sampling: sample from the most likely tokens whose total probability reaches p, 0 < p <= 1."""
    min_p: float | None = None
    """Sample from tokens at least min_p times as likely as the most likely one, 0 to 1."""
    repetition_penalty: float | None = None
    """Above 1, makes tokens that have occurred less likely."""
    presence_penalty: float | None = None
    """Above 0, makes new tokens less likely that are among the new tokens already."""
    frequency_penalty: float | None = None
    """Above 0, makes new tokens less likely, once for each time that they are among the new tokens."""
