"""Options of the steps that `zoo plan` plans: training, sampling between training steps, and decoding."""

import dataclasses
from typing import Any

from zoo._terminal import format_count
from zoo.adapters.quantize import PackedFormat
from zoo.models.loop import Loop
from zoo.parallel import Schedule
from zoo.parallel.remat import Remat

ONE_FORWARD_ONE_BACKWARD = Schedule("1f1b")


@dataclasses.dataclass(frozen=True)
class RolloutOptions:
    """Completions that a run samples between its training steps (`recipes/grpo.py`)."""

    rows: int
    """Rows that are sampled at a time, over all devices: prompts times samples of each."""
    length: int
    """Tokens of the longest row, prompt and completion."""

    def __post_init__(self):
        if self.rows < 1 or self.length < 2:
            raise ValueError(f"{self.rows} rows of {self.length} tokens: 1 row of 2 tokens is the least to sample")


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """Options of a training step that its cost depends on, besides the model and the mesh."""

    rows: int
    """Rows of the global batch."""
    seq: int
    """Tokens per row."""
    dtype: str = "bfloat16"
    """Dtype of activations and of the parameters in products. Parameters, gradients and moments stay in float32."""
    remat: Remat = "full"
    microbatches: int = 1
    schedule: Schedule = ONE_FORWARD_ONE_BACKWARD
    """Schedule of the pipeline, on meshes with `pipe`."""
    rollouts: RolloutOptions | None = None
    """Completions that are sampled between steps, in reinforcement learning."""
    loop: Loop = "auto"
    """Loop over layers; "auto" leaves it to the model."""
    lora: int | None = None
    """Rank of LoRA on all linear layers but the head. The base is frozen, in `dtype`; adapters, their gradients and
    moments are float32."""
    quantization: PackedFormat | None = None
    """Format of the frozen base's linear layers (QLoRA)."""

    def __post_init__(self):
        if self.lora is not None and self.lora < 1:
            raise ValueError(f"LoRA of rank {self.lora}: the least is 1")
        if self.quantization is not None and self.lora is None:
            raise ValueError(f"{self.quantization} is for a frozen base: add LoRA of a rank, such as 16")

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.seq

    def describe(self) -> list[str]:
        """Describe the step in a few phrases."""
        parts = [f"{format_count(self.rows, 'row')} of {self.seq:,} tokens"]
        if self.microbatches > 1:
            parts.append(f"{self.microbatches} micro-batches")
        if self.lora is not None:
            base = "" if self.quantization is None else f", {self.quantization} base"
            parts.append(f"LoRA of rank {self.lora}{base}")
        parts.append(f"remat {self.remat}")
        if self.loop != "auto":
            parts.append(f"loop {self.loop}")
        return [*parts, self.dtype]

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain values."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class DecodingOptions:
    """Options of a decoding step that its cost depends on, besides the model and the mesh."""

    rows: int
    """Rows that are decoded at a time, over all devices."""
    length: int
    """Tokens of the longest row, prompt and completion: slots of the KV caches."""
    dtype: str = "bfloat16"
    """Dtype of parameters and caches."""
    quantization: PackedFormat | None = None
    """Format of the linear layers, as `zoo.adapters.quantize` makes it."""

    def __post_init__(self):
        if self.rows < 1 or self.length < 2:
            raise ValueError(f"{self.rows} rows of {self.length} tokens: 1 row of 2 tokens is the least to decode")

    @property
    def tokens(self) -> int:
        """Tokens that a step decodes."""
        return self.rows

    def describe(self) -> list[str]:
        """Describe the step in a few phrases."""
        parts = [f"{format_count(self.rows, 'row')} of up to {self.length:,} tokens", self.dtype]
        return parts if self.quantization is None else [*parts, f"linear layers in {self.quantization}"]

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain values."""
        return dataclasses.asdict(self)
