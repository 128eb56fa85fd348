"""What surrounds a training loop: text, checkpoints, metrics, progress, signals, reports. Never the loop itself."""

from .optional import require_installed

require_installed("optax", "grain", "orbax.checkpoint", extra="train")  # before anything that needs them is imported

from .average import ema
from .chart import Curve, chart
from .checkpoint import Checkpoints, Restored
from .command import command
from .corpus import Corpus, text
from .data import Batches, Ordered, Source, Split, Stream, Windows, bits_per_byte
from .export import export
from .fingerprint import fingerprint
from .interrupt import Interrupt
from .masks import decay_mask, matrices
from .metrics import Metrics, read_lines
from .parameters import parameter_rows
from .profile import Profile
from .remat import rematerialise
from .report import ParameterRow, write_report
from .run import Run
from .scatter import Points, scatter
from .sweep import sweep_grid, sweep_map, sweep_models, sweep_step
from .tokens import Tokenizer, read_tokenizer
from .trackers import TensorBoard, Tracker, WeightsAndBiases

__all__ = [
    "Batches",
    "Checkpoints",
    "Corpus",
    "Curve",
    "Interrupt",
    "Metrics",
    "Ordered",
    "ParameterRow",
    "Points",
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
    "chart",
    "command",
    "decay_mask",
    "ema",
    "export",
    "fingerprint",
    "matrices",
    "parameter_rows",
    "read_lines",
    "read_tokenizer",
    "rematerialise",
    "scatter",
    "sweep_grid",
    "sweep_map",
    "sweep_models",
    "sweep_step",
    "text",
    "write_report",
]
