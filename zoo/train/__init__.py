"""Everything around a training loop: text, checkpoints, metrics, progress, signals. Never the loop itself."""

from zoo._optional import require_installed

require_installed("optax", "grain", "orbax.checkpoint", extra="train")  # before anything that needs them is imported

from zoo.parallel.fingerprint import fingerprint
from zoo.text.batches import ShuffledBatches, TokenWindows, bits_per_byte, stack_rows
from zoo.text.corpus import load_text
from zoo.text.mixture import Mixture
from zoo.text.packing import PackedRows
from zoo.text.record_options import RecordOptions
from zoo.text.records.records import load_records, mix
from zoo.text.records.stream import stream_records
from zoo.text.tokenizers import read_tokenizer

from . import objectives
from .checkpoint import Checkpoints
from .command import check_names, run_cli
from .configs import FinetuneConfig, ModelConfig, RecordConfig, SweepConfig, TextConfig, TrainConfig, resolve_start
from .ema import update_ema
from .evaluation import Evaluation
from .export import export
from .interrupt import Interrupt
from .loss_scale import dynamic_loss_scale, loss_scale
from .metrics import Metrics, read_metrics
from .objectives.pairs import average_pairs, sum_pairs
from .on_policy import sample_batch
from .optimizer.adam import adamw
from .optimizer.apply_updates import apply_updates
from .optimizer.by_name import OptimizerName, make_optimizer
from .optimizer.eval_params import eval_params
from .optimizer.masks import decay_mask, linear_mask, matrix_mask
from .optimizer.moments import BFloat16Moment, BlockwiseMoment, Float32Moment
from .optimizer.muon import muon
from .optimizer.parameter_groups import by_dim, format_groups
from .optimizer.schedules import warmup_cosine, warmup_stable_decay
from .optimizer.width_transfer import scale_by_width, transfer_width, width_factors
from .options import MeshOptions, RunOptions
from .profile import Profile
from .reference import precompute_reference
from .reinforcement.group_sampler import GroupSampler
from .reinforcement.grouped_samples import make_sampler, sample_groups
from .reinforcement.rewards import Rewards, match_answer
from .reinforcement.rollouts import pack_rollouts
from .run import Run
from .samples import continue_prompts, find_prompts
from .skip import count_skips, skip_nonfinite
from .stored_teacher import split_top_k, store_top_k
from .summary import summary
from .sweep import sweep_grid, sweep_init, sweep_map, sweep_step
from .trackers import TensorBoard, WeightsAndBiases

__all__ = [
    "BFloat16Moment",
    "BlockwiseMoment",
    "Checkpoints",
    "Evaluation",
    "FinetuneConfig",
    "Float32Moment",
    "GroupSampler",
    "Interrupt",
    "MeshOptions",
    "Metrics",
    "Mixture",
    "ModelConfig",
    "OptimizerName",
    "PackedRows",
    "Profile",
    "RecordConfig",
    "RecordOptions",
    "Rewards",
    "Run",
    "RunOptions",
    "ShuffledBatches",
    "SweepConfig",
    "TensorBoard",
    "TextConfig",
    "TokenWindows",
    "TrainConfig",
    "WeightsAndBiases",
    "adamw",
    "apply_updates",
    "average_pairs",
    "bits_per_byte",
    "by_dim",
    "check_names",
    "continue_prompts",
    "count_skips",
    "decay_mask",
    "dynamic_loss_scale",
    "eval_params",
    "export",
    "find_prompts",
    "fingerprint",
    "format_groups",
    "linear_mask",
    "load_records",
    "load_text",
    "loss_scale",
    "make_optimizer",
    "make_sampler",
    "match_answer",
    "matrix_mask",
    "mix",
    "muon",
    "objectives",
    "pack_rollouts",
    "precompute_reference",
    "read_metrics",
    "read_tokenizer",
    "resolve_start",
    "run_cli",
    "sample_batch",
    "sample_groups",
    "scale_by_width",
    "skip_nonfinite",
    "split_top_k",
    "stack_rows",
    "store_top_k",
    "stream_records",
    "sum_pairs",
    "summary",
    "sweep_grid",
    "sweep_init",
    "sweep_map",
    "sweep_step",
    "transfer_width",
    "update_ema",
    "warmup_cosine",
    "warmup_stable_decay",
    "width_factors",
]
