"""Everything around a training loop: text, checkpoints, metrics, progress, signals. Never the loop itself."""

from typing import Any

from zoo._optional import require_installed

require_installed("optax", "grain", "orbax.checkpoint", extra="train")  # before anything that needs them is imported

from zoo.text.batches import (
    BatchIterator,
    CorpusSplit,
    Dataset,
    OrderedBatches,
    ShuffledBatches,
    TokenWindows,
    bits_per_byte,
    stack_rows,
)
from zoo.text.corpus import Corpus, load_text
from zoo.text.synthetic import AssociativeRecall, GroupWords, NeedleRetrieval
from zoo.text.tokenizers import Tokenizer, read_tokenizer

from .checkpoint import Checkpoints, RestoredCheckpoint
from .command import check_names, run_cli
from .digits import LabeledImages, load_digits
from .ema import update_ema
from .evaluation import Evaluation
from .export import export
from .fingerprint import fingerprint
from .health import measure_updates
from .interrupt import Interrupt
from .loss_scale import dynamic_loss_scale, loss_scale
from .metrics import Metrics, read_metrics
from .optimizer import (
    BFloat16Moment,
    BlockwiseMoment,
    FactoredMoment,
    Float32Moment,
    adamw,
    apply_updates,
    decay_mask,
    matrix_mask,
    scale_by_adam,
)
from .options import MeshOptions, RunOptions
from .profile import Profile
from .remat import count_residual_bytes, fit_remat
from .run import Run
from .samples import continue_prompts
from .skip import count_skips, skip_nonfinite, skip_spikes
from .spikes import SpikeDetector
from .summary import summary
from .sweep import sweep_grid, sweep_map, sweep_models, sweep_step
from .trackers import MLflow, TensorBoard, Tracker, Trackio, WeightsAndBiases

__all__ = [
    "AssociativeRecall",
    "BFloat16Moment",
    "BatchIterator",
    "BlockwiseMoment",
    "Checkpoints",
    "Corpus",
    "CorpusSplit",
    "Dataset",
    "Evaluation",
    "FactoredMoment",
    "Float32Moment",
    "GroupWords",
    "Interrupt",
    "LabeledImages",
    "MLflow",
    "MeshOptions",
    "Metrics",
    "NeedleRetrieval",
    "OrderedBatches",
    "Profile",
    "RestoredCheckpoint",
    "Run",
    "RunOptions",
    "ShuffledBatches",
    "SpikeDetector",
    "TensorBoard",
    "TokenWindows",
    "Tokenizer",
    "Tracker",
    "Trackio",
    "WeightsAndBiases",
    "adamw",
    "apply_updates",
    "bits_per_byte",
    "check_names",
    "continue_prompts",
    "count_residual_bytes",
    "count_skips",
    "decay_mask",
    "dynamic_loss_scale",
    "export",
    "fingerprint",
    "fit_remat",
    "load_digits",
    "load_text",
    "loss_scale",
    "matrix_mask",
    "measure_updates",
    "read_metrics",
    "read_tokenizer",
    "run_cli",
    "scale_by_adam",
    "skip_nonfinite",
    "skip_spikes",
    "stack_rows",
    "summary",
    "sweep_grid",
    "sweep_map",
    "sweep_models",
    "sweep_step",
    "update_ema",
]

_MOVED = {
    **{name: f"zoo.tools.report.{name}" for name in ("Curve", "ParameterRow", "tabulate_parameters", "write_report")},
    "ScatterSeries": "zoo.tools.report.Curve",
    "draw_image_grid": "zoo.tools.report.ImageGrid",
    "draw_line_chart": "zoo.tools.report.LineChart",
    "draw_scatter": "zoo.tools.report.ScatterChart",
    "group_series": "zoo.tools.report.ScatterChart.of_rows",
    "rematerialize": "zoo.configure",
    "report_runs": "zoo.tools.report_runs",
}


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        # Not an AttributeError: `from zoo.train import name` would drop its words.
        raise ImportError(f"zoo.train.{name} has moved to {_MOVED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
