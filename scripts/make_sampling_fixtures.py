"""Write the reference case of token sampling to tests/fixtures/sampling: what transformers' logits processors return.

    python scripts/make_sampling_fixtures.py                            # needs torch and transformers

processors.safetensors has random logits, the tokens before them, of which the last `NEW` are new, and for each setting
of `SETTINGS` the probabilities after transformers' processors in the order of its `generate`. transformers has no
presence and frequency penalties: they are OpenAI's formula, mu[j] - c[j] * frequency - (c[j] > 0) * presence, over the
new tokens. It takes seconds; the same versions give the same bytes.
"""

from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import tyro
from safetensors.numpy import save_file
from transformers.generation import logits_process as processors  # pyright: ignore[reportMissingImports]

ROWS, VOCAB, TOKENS, NEW = 6, 23, 9, 5
TEMPERATURE, TOP_K, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = 0.7, 9, 0.8, 0.1, 1.3, 0.6, -0.4
ALL = ("repetition", "presence", "frequency", "temperature", "top_k", "top_p", "min_p")
SETTINGS = {
    **{name: (name,) for name in ALL},
    "truncated": ("temperature", "top_k", "top_p", "min_p"),
    "penalized": ("repetition", "presence", "frequency"),
    "all": ALL,
}


def count(tokens: torch.Tensor) -> torch.Tensor:
    """Count how often each token id is among the new tokens of a row."""
    return torch.nn.functional.one_hot(tokens[:, -NEW:], VOCAB).sum(1)


PROCESSORS = {
    "repetition": processors.RepetitionPenaltyLogitsProcessor(REPETITION),
    "presence": lambda tokens, logits: logits - PRESENCE * (count(tokens) > 0),
    "frequency": lambda tokens, logits: logits - FREQUENCY * count(tokens),
    "temperature": processors.TemperatureLogitsWarper(TEMPERATURE),
    "top_k": processors.TopKLogitsWarper(TOP_K),
    "top_p": processors.TopPLogitsWarper(TOP_P),
    "min_p": processors.MinPLogitsWarper(MIN_P),
}


def main(out: Path = Path("tests/fixtures/sampling")) -> None:
    """Write the case.

    Args:
        out: Folder of the file.
    """
    rng = np.random.default_rng(0)
    arrays = {
        "logits": (3 * rng.normal(size=(ROWS, VOCAB))).astype(np.float32),
        "tokens": rng.integers(0, VOCAB, (ROWS, TOKENS)).astype(np.int32),
        "new": np.array(NEW, np.int32),
    }
    tokens = torch.from_numpy(arrays["tokens"]).long()
    for name, steps in SETTINGS.items():
        logits = torch.from_numpy(arrays["logits"]).clone()
        for step in steps:
            logits = PROCESSORS[step](tokens, logits)
        arrays[name] = torch.softmax(logits, -1).numpy()
    out.mkdir(parents=True, exist_ok=True)
    save_file(arrays, out / "processors.safetensors")


if __name__ == "__main__":
    tyro.cli(main)
