"""Options that recipes share, as configurations to inherit from: a recipe adds what is particular to its method.

    @dataclass(frozen=True)
    class Config(train.TextConfig):
        embed: int = 128  # Width of the residual stream.
        steps: int = 600
        run: train.RunOptions = train.RunOptions(Path("runs/mine"))

A field that only has another default keeps its help.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
from jaxtyping import Array, Key

from zoo import adapters
from zoo.parallel import Mesh
from zoo.parallel.batch import place_batch
from zoo.parallel.place import place
from zoo.text.record_options import RecordOptions
from zoo.text.records.records import Records
from zoo.text.tokenizers import read_tokenizer
from zoo.weights.directory import resolve_directory
from zoo.weights.load import load
from zoo.weights.resolve import open_checkpoint

from .options import MeshOptions, RunOptions

_Model = TypeVar("Model")


@dataclass(frozen=True)
class TrainConfig:
    """Options of a recipe that trains on anything."""

    batch_size: int = 16
    """Rows per step, over all devices."""
    steps: int = 300
    """Optimizer steps."""
    learning_rate: float = 3e-3
    """Peak learning rate, after linear warmup; cosine decay to a tenth."""
    warmup_steps: int = 30
    """Steps of linear warmup, at most half of all."""
    weight_decay: float = 0.1
    """AdamW's, of matrices and embeddings."""
    eval_every: int = 100
    """Steps between evaluations, each with a checkpoint."""
    mesh: MeshOptions = MeshOptions()
    run: RunOptions = RunOptions(Path("runs/train"))


@dataclass(frozen=True)
class SweepConfig:
    """Options of a recipe that compares models, each at several learning rates and seeds at once (`sweep_step`)."""

    batch_size: int = 32
    """Rows per step."""
    steps: int = 500
    """Optimizer steps of each run."""
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2)
    """Peak learning rates, after linear warmup; cosine decay to zero."""
    num_seeds: int = 1
    """Initializations per learning rate."""
    warmup_steps: int = 50
    """Steps of linear warmup, at most half of all."""
    weight_decay: float = 0.1
    """Weight decay of matrices and embeddings, times the learning rate."""
    eval_rows: int = 512
    """Held-out rows to evaluate on."""
    eval_every: int = 100
    """Steps between evaluations, each with a checkpoint."""
    run: RunOptions = RunOptions(Path("runs/sweep"))


@dataclass(frozen=True)
class TextConfig(TrainConfig):
    """Options of a recipe that trains on text."""

    data: tuple[Path, ...] = ()
    """Files, directories and URLs of text; by default this Python's standard library."""
    seq_len: int = 128
    """Tokens per row."""

    def make_abstract_batch(self, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
        """Return a batch of text without numbers, to compile a step for."""
        shape = (self.batch_size, self.seq_len)
        dtypes = {"tokens": "int32", "targets": "int32", "weights": "float32"}
        return place_batch({name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}, mesh)


@dataclass(frozen=True)
class ModelConfig(TextConfig):
    """Options of a recipe that trains small models of these sizes on text."""

    vocab: int = 256
    """256 for bytes; more trains a byte-pair encoding on the text."""
    embed: int = 64
    """Width of the residual stream."""
    layers: int = 2
    """Number of blocks."""
    heads: int = 2
    """Heads of attention or of another mixer, embed / heads wide each."""
    mlp_dim: int = 256
    """Width of the gated MLP."""


@dataclass(frozen=True)
class RecordConfig(TrainConfig):
    """Options of a recipe that trains on records: texts, chats, pairs of answers."""

    data: tuple[str, ...] = ()
    """JSON lines, Parquet, datasets on disk or of the hub (org/name:split): files, folders, patterns, URLs; PATH=WEIGHT
    mixes; by default records made of Python's standard library."""
    records: RecordOptions = RecordOptions()
    seq_len: int = 256
    """Tokens per row, of one or several texts."""
    steps: int = 120
    epochs: float | None = None
    """Passes over the training rows, instead of steps."""
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    eval_every: int = 40
    prompts: tuple[str, ...] = ()
    """Prompts to continue, before and after; the first is printed. By default, of `data` held-out ones."""

    def load_records(
        self, directory: Path, source: Sequence[str] | Sequence[Mapping[str, Any]], **options: Any
    ) -> Records:
        """Load a source, `data` or records in memory, with the tokenizer and the chat template of the checkpoint in
        `directory`; plain texts in memory take no template. `options` are further arguments of `load_records`, such as
        the `kinds` that the recipe takes, and `images`, of a model that reads them."""
        vocab = None
        if options.get("images"):
            vocab = open_checkpoint(directory).model.decoder.embedding.table_shape[0]
        tokenizer = read_tokenizer(directory, vocab)
        template = None
        if isinstance(source[0], str) or "text" not in source[0]:
            template = self.records.read_template(directory, tokenizer)
        return self.records.load(source, tokenizer=tokenizer, template=template, seq_len=self.seq_len, **options)


@dataclass(frozen=True)
class FinetuneConfig(RecordConfig):
    """Options of a recipe that fine-tunes a checkpoint on records: all parameters, or LoRA adapters."""

    checkpoint: Path = Path("runs/transformer/export")
    """Model to start from: a Hugging Face directory, or a name on the hub, NAME[@REVISION]."""
    lora: int = 0
    """Rank of LoRA adapters; 0 trains all parameters."""
    targets: tuple[str, ...] = ("all-linear",)
    """Linear layers to adapt: ends of names, patterns, or all-linear for all but the head."""
    quantization: Literal["none", "nf4", "int8"] = "none"
    """With lora, format of the base's linear layers (QLoRA)."""

    def load_model(self, directory: Path, mesh: Mesh) -> Any:
        """Load the model, of texts or with images: in float32, or as the frozen base of adapters in the compute dtype,
        or quantized.

        **Raises** `ValueError` for a quantized base without adapters, which nothing would train.
        """
        if self.quantization != "none" and not self.lora:
            raise ValueError(
                f"--quantization {self.quantization} freezes the base: add --lora 16 to train adapters of it"
            )
        if not self.lora:
            return self.mesh.apply(load(directory, mesh=mesh, dtype="float32"))
        if self.quantization == "none":
            return self.mesh.apply(load(directory, mesh=mesh, dtype=self.mesh.dtype))
        model = self.mesh.apply(load(directory, mesh=mesh, dtype="float32"))  # not rounded twice
        return place(adapters.quantize(model, self.quantization), mesh)

    def add_adapters(self, base: _Model, mesh: Mesh, *, key: Key[Array, ""]) -> _Model:
        """Return the base with LoRA adapters, or the base itself where all parameters are trained."""
        if not self.lora:
            return base
        return place(adapters.lora(base, targets=self.targets, rank=self.lora, alpha=2 * self.lora, key=key), mesh)


def resolve_start(checkpoint: Path, default: Path, made_by: str) -> Path:
    """Return the directory of the checkpoint that a recipe starts from; a name on the hub is downloaded.

    **Raises** `FileNotFoundError` if it is the recipe's `default` and is not there: `made_by` is the command that makes
    it.
    """
    if checkpoint == default and not default.exists():
        raise FileNotFoundError(f"{default}: no model there; `{made_by}` makes one")
    return resolve_directory(checkpoint)
