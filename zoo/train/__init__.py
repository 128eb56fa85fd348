"""What surrounds a training loop: text, checkpoints, metrics, progress, signals, reports. Never the loop itself."""

from .optional import require_installed

require_installed("optax", "grain", "orbax.checkpoint", extra="train")  # before anything that needs them is imported

from .average import ema
from .checkpoint import Checkpoints, Restored
from .command import command
from .corpus import Corpus, text
from .data import Batches, Ordered, Source, Split, Stream, Windows, bits_per_byte
from .export import export
from .interrupt import Interrupt
from .masks import decay_mask, matrices
from .metrics import Metrics, read_lines
from .parameters import parameter_rows
from .profile import Profile
from .remat import rematerialise
from .report import ParameterRow, write_report
from .run import Run
from .tokens import Tokenizer, read_tokenizer
from .trackers import TensorBoard, Tracker, WeightsAndBiases

__all__ = [
    "Batches",
    "Checkpoints",
    "Corpus",
    "Interrupt",
    "Metrics",
    "Ordered",
    "ParameterRow",
    "Profile",
    "Restored",
    "Run",
    "Source",
    "Split",
    "Stream",
    "TensorBoard",
    "Tokenizer",
    "Tracker",
    "WeightsAndBiases",
    "Windows",
    "bits_per_byte",
    "command",
    "decay_mask",
    "ema",
    "export",
    "matrices",
    "parameter_rows",
    "read_lines",
    "read_tokenizer",
    "rematerialise",
    "text",
    "write_report",
]
