"""A model family is a small file of facts: its config keys with defaults, and the mapping of its tensor names.

A name map has the tensor names of a checkpoint on the left, as its listing reads, and our parameter paths on the right:

    {"q_proj": "attention.query", "c_attn": fused("query", "key", "value", transposed=True)}

Entries name modules; `.weight` and `.bias` follow. A star is the number of a layer or an expert. The one transform,
`TensorMapping`, returns a view of the checkpoint's tensor for each of our parameters: loading reads through it and
saving writes through it, so that no inverse has to be written.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from .kinds import Default, get_kind
from .values import ValueKind

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TensorMapping:
    """A checkpoint tensor that concatenates the rows of our parameters `parts`, within each of `groups`.

    A rename has one part. One group concatenates the parts, as many groups as heads fuse them per head, and as many
    groups as rows interleave them. Parts may have different sizes.
    """

    parts: tuple[str, ...]
    groups: int = 1
    transposed: bool = False
    """Stored as (in, out), as GPT-2's `Conv1D` does."""
    leading_ones: int = 0
    """Number of leading dims of size 1."""
    conv1d_filters: bool = False
    """Stored as (features, 1, width), as depthwise `torch.nn.Conv1d` does."""
    trailing_ones: int = 0
    """Number of trailing dims of size 1."""
    runs: int = 1
    """Rows of one part are stored as (runs, groups, rows), where the part has them as (groups, runs, rows)."""
    per_head: bool = False
    """Stored with a leading dim of groups: a matrix for each, transposed or not, and a row of the bias."""
    flat: bool = False
    """A matrix that is stored as a vector, row by row."""
    stacked: bool = False
    """Parts are the rows of a matrix."""
    columns: bool = False
    """Columns of the parts are concatenated, instead of rows."""
    merged: bool = False
    """Rows of all stacked parts are stored as the rows of one matrix."""
    in_dims: tuple[int, ...] = ()
    """Dims in which the columns of a matrix are stored, if it is a convolution with a stride equal to its kernel:
    channels, rows and columns of a patch."""
    otherwise: "TensorMapping | None" = None
    """The mapping of this name in layers of another class: see `either`."""

    def shape(self, parts: Sequence[Shape], num_stacked_dims: int) -> Shape:
        """Return the shape of the checkpoint tensor, from the shapes of our parts. The first `num_stacked_dims` dims
        are stacked layers or experts."""
        if self.merged:
            return (math.prod(parts[0][: num_stacked_dims + 1]), *parts[0][num_stacked_dims + 1 :])
        if self.flat:
            return (*parts[0][:num_stacked_dims], math.prod(parts[0][num_stacked_dims:]))
        if self.stacked:
            return (*parts[0][:num_stacked_dims], len(parts), *parts[0][num_stacked_dims:])
        if self.columns:
            return (*parts[0][:-1], sum(part[-1] for part in parts))
        if self._divides_columns(parts, num_stacked_dims):
            return (*parts[0][:-1], *self.in_dims)
        if len(parts[0]) > num_stacked_dims:
            rows = sum(part[num_stacked_dims] for part in parts)
        else:
            rows = None
        if rows is None:
            shape = parts[0]
        else:
            shape = (*parts[0][:num_stacked_dims], rows, *parts[0][num_stacked_dims + 1 :])
        unstacked = shape[num_stacked_dims:]
        if self.per_head:
            unstacked = (self.groups, unstacked[0] // self.groups, *unstacked[1:])
        if self._is_transposed(parts, num_stacked_dims):
            unstacked = (*unstacked[:-2], unstacked[-1], unstacked[-2])
        if self.conv1d_filters and len(unstacked) == 2:
            unstacked = (unstacked[0], 1, unstacked[1])
        return (*shape[:num_stacked_dims], *(1,) * self.leading_ones, *unstacked, *(1,) * self.trailing_ones)

    def views(self, tensor: np.ndarray, parts: Sequence[Shape], num_stacked_dims: int) -> list[np.ndarray]:
        """Return a writable view of the checkpoint tensor for each of our parts, with the part's values in its order.
        With several parts, and with `per_head`, views have the shape [..., groups, rows of a group, ...]; with `runs`
        [..., groups, runs, rows, ...]."""
        if self.merged:
            return [tensor.reshape(parts[0])]
        # the ellipsis: a scalar is a view, too
        leading = (0,) * self.leading_ones
        trailing = (0,) * self.trailing_ones
        tensor = tensor[(slice(None),) * num_stacked_dims + (*leading, ..., *trailing)]
        if self.conv1d_filters and tensor.ndim == num_stacked_dims + 3:
            tensor = tensor[(slice(None),) * (num_stacked_dims + 1) + (0,)]
        if self._is_transposed(parts, num_stacked_dims):
            tensor = tensor.swapaxes(-1, -2)
        if self._divides_columns(parts, num_stacked_dims):
            return [tensor.reshape(*tensor.shape[: num_stacked_dims + 1], -1)]  # a view: merged dims are contiguous
        if self.keeps_rows:
            return [tensor]
        if self.stacked:
            return list(np.moveaxis(tensor, num_stacked_dims, 0))
        if self.columns:
            return np.split(tensor, np.cumsum([part[-1] for part in parts])[:-1], axis=-1)
        if self.runs > 1:
            lead = tensor.shape[:num_stacked_dims]
            by_run = tensor.reshape(*lead, self.runs, self.groups, -1, *tensor.shape[num_stacked_dims + 1 :])
            return [by_run.swapaxes(num_stacked_dims, num_stacked_dims + 1)]  # views: one dim was divided
        size = tensor.shape[num_stacked_dims] // self.groups
        grouped = np.lib.stride_tricks.as_strided(
            tensor,
            (*tensor.shape[:num_stacked_dims], self.groups, size, *tensor.shape[num_stacked_dims + 1 :]),
            (
                *tensor.strides[:num_stacked_dims],
                size * tensor.strides[num_stacked_dims],
                *tensor.strides[num_stacked_dims:],
            ),
        )
        cuts = np.cumsum([part[num_stacked_dims] // self.groups for part in parts])[:-1]
        return np.split(grouped, cuts, num_stacked_dims + 1)

    @property
    def keeps_rows(self) -> bool:
        """True if the tensor has the rows of one part, in its order."""
        return len(self.parts) == 1 and self.runs == 1

    def _divides_columns(self, parts: Sequence[Shape], num_stacked_dims: int) -> bool:
        """Return True for a matrix with columns in several dims; its bias has none."""
        return bool(self.in_dims) and len(parts[0]) == num_stacked_dims + 2

    def _is_transposed(self, parts: Sequence[Shape], num_stacked_dims: int) -> bool:
        """Return True for matrices that are stored as (in, out)."""
        return self.transposed and len(parts[0]) == num_stacked_dims + 2


def replace_ending(name: str, endings: Mapping[str, str]) -> str:
    """Replace the ending of a name by the one that `endings` has for it, if any."""
    old = next((old for old in endings if name.endswith(old)), None)
    if old is None:
        return name
    return name.removesuffix(old) + endings[old]


NameMap = Mapping[str, str | TensorMapping]
"""Checkpoint tensor names -> our parameter paths; a plain string is a rename."""


def fused(*parts: str, groups: int = 1, transposed: bool = False, conv1d_filters: bool = False) -> TensorMapping:
    """Map one checkpoint tensor to several of our modules. See `TensorMapping`."""
    return TensorMapping(parts, groups, transposed, conv1d_filters=conv1d_filters)


def prefixed(theirs: str, ours: str, name_map: NameMap) -> dict[str, TensorMapping]:
    """Prepend a prefix to the names of a map: `theirs` to checkpoint names, `ours` to parameter paths."""

    def join(prefix: str, name: str) -> str:
        return f"{prefix}.{name}".strip(".")

    def add_prefix(mapping: str | TensorMapping) -> TensorMapping:
        if isinstance(mapping, str):
            mapping = TensorMapping((mapping,))
        otherwise = None if mapping.otherwise is None else add_prefix(mapping.otherwise)
        parts = tuple(join(ours, part) for part in mapping.parts)
        return dataclasses.replace(mapping, parts=parts, otherwise=otherwise)

    return {join(theirs, name): add_prefix(mapping) for name, mapping in name_map.items()}


def either(*maps: NameMap) -> dict[str, TensorMapping]:
    """Join name maps of layers of several classes that have tensors of one name: `self_attn.q_proj` is the query of
    attention in some layers, and the query of a recurrence in others."""
    joined: dict[str, TensorMapping] = {}
    for name_map in maps:
        for name, mapping in prefixed("", "", name_map).items():
            joined[name] = dataclasses.replace(mapping, otherwise=joined.get(name))
    return joined


def omit(table: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Return a table of another family, its defaults or names, without these keys."""
    return {key: value for key, value in table.items() if key not in keys}


class Config(dict):
    """A parsed config.json: canonical keys, with defaults filled in."""


@dataclasses.dataclass(frozen=True)
class PredictorFacts:
    """Facts about modules of multi-token prediction, `zoo.models.predictors.Predictor`, in a family's files.

    - `names(config, number)`: names of the modules of predictor `number` in files -> in the `Predictor`: `projection`,
      its norms, and `layers.0` for all that a layer has. `embedding` and `head` are copies that files may have.
    - `layers(config)`: changes to the config of a model that has only the layers of one predictor.
    - `state_first`: the projection reads the hidden states before the embedding.
    - `count_key`: the config key that says how many there are.
    """

    names: Callable[[Config, int], Mapping[str, str]]
    layers: Callable[[Config], Mapping[str, Any]]
    state_first: bool = False
    count_key: str | None = "num_nextn_predict_layers"


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """Facts about the checkpoints of one `model_type`.

    - `build(config, *, key)` builds the model of a config.
    - `names(config)` returns its name map.
    - `defaults`: every config key that changes the result, with the default of the class in transformers, since files
      omit keys equal to it. A key accepts what its default is: a bool, a whole number above 0, a number, a word. Where
      it accepts something else, or the default is None, the table says so: `optional_count(8)` and its neighbors in
      `zoo.models.hf.kinds`. The family has the plain defaults, and the kinds of values as `kinds`.
    - `aliases`: config keys of this family -> canonical keys. `build` and `names` see canonical keys only.
    - `required_values`: keys that would change the result, with the values that are implemented; others raise.
    - `scaled_rope_theta`: rope_theta of files that scale RoPE and leave it out, if that is not the default's.
    - `may_lack_rope`: a null `rope_theta` is a model without RoPE, and `build` sees the null.
    - `rope_keys`: keys of `rope_parameters` that its files have in addition to the keys of each `rope_type`.
    - `ignored_keys`: keys that change nothing at inference, in addition to `config.IGNORED_KEYS`; keys of RoPE, too.
    - `ignored_tensors`: regular expressions of tensors that follow from the config, such as masks. Nothing is lost
      without them.
    - `optional_tensors`: regular expressions of tensors that a file may lack, all of them or none. Their parameters are
      then as `build` makes them, and are not written: constants of a layer that follow from its number.
    - `int64_tensors`: regular expressions of tensors of whole numbers that files have in int64, and the model in int32.
    - `other_modules`: regular expressions of tensors of modules that this model does not use, such as multi-token
      prediction. They are left aside on loading, and `zoo.save(source=)` writes them back.
    - `find_ignored_tensors(config, tensors)` returns further tensors of such modules, if they depend on the config or
      on the other tensors.
    - `memory_modules`: modules that transformers names differently in memory than in files: in memory -> in files.
    - `memory_names(config)` returns the name map in memory, if transformers lays out tensors differently than in files,
      such as all experts in one tensor.
    - `older_endings`: endings of tensor names in older files -> endings in `names`.
    - `callers(config)` returns the names of modules that layers share: in a later layer that calls it -> in the first,
      where files have it. Files may repeat it under the later ones.
    - `predictors`: modules of multi-token prediction, if they are read.
    - `variants`: families of other files with this `model_type`, and `fits(config, names)`, which returns True for the
      config.json and the tensor names of such files.
    - `head`, `embedding`: the modules that `tie_word_embeddings` ties.
    - `package`: what to import before the auto classes of transformers read its files, if that is not transformers.
    - `describe(model)` returns the config of a model built from scratch; None if unsupported. Its result is verified:
      the model that `build` makes of it is compared with the given one.
    """

    name: str
    architecture: str
    build: Callable[..., Any]
    names: Callable[[Config], NameMap]
    defaults: Mapping[str, Any]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    required_values: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    scaled_rope_theta: float | None = None
    may_lack_rope: bool = False
    rope_keys: tuple[str, ...] = ()
    ignored_keys: frozenset[str] = frozenset()
    ignored_tensors: tuple[str, ...] = ()
    optional_tensors: tuple[str, ...] = ()
    int64_tensors: tuple[str, ...] = ()
    other_modules: tuple[str, ...] = ()
    find_ignored_tensors: Callable[[Config, Collection[str]], Collection[str]] | None = None
    memory_modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    memory_names: Callable[[Config], NameMap] | None = None
    older_endings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    callers: Callable[[Config], Mapping[str, str]] | None = None
    predictors: PredictorFacts | None = None
    variants: "tuple[Family, ...]" = ()
    fits: Callable[[Mapping[str, Any], Collection[str]], bool] | None = None
    head: str = "lm_head"
    embedding: str = "model.embed_tokens"
    package: str = ""
    describe: Callable[[Any], Mapping[str, Any]] | None = None
    kinds: Mapping[str, ValueKind] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        kinds = {}
        plain = {}
        for key, default in self.defaults.items():
            is_declared = isinstance(default, Default)
            plain[key] = default.value if is_declared else default
            if key in self.kinds and not is_declared:  # a copy of a family
                kinds[key] = self.kinds[key]
            elif key != "rope_parameters":
                kinds[key] = get_kind(key, default)
        object.__setattr__(self, "kinds", kinds)
        object.__setattr__(self, "defaults", plain)

    @property
    def declared(self) -> dict[str, Any]:
        """The defaults with the kinds of their values, for the table of a family that has the same keys and more."""
        return {**self.defaults, **{key: Default(self.defaults[key], kind) for key, kind in self.kinds.items()}}

    def choose(self, config: Mapping[str, Any], names: Collection[str]) -> "Family":
        """Return the family of the files with this config.json and these tensors: a variant, or this one."""
        return next((variant for variant in self.variants if variant.fits and variant.fits(config, names)), self)

    def __repr__(self) -> str:
        return f"Family({self.name!r})"


@dataclasses.dataclass(frozen=True)
class Wrapping:
    """The multimodal checkpoint around a language model: `zoo.models.hf.wrappers` reads and writes it."""

    config: str
    """Text of the whole config.json."""
    text: str
    """Text of the language model's config, as it was read from there."""
    base: str
    """The beginning of the language model's tensor names that stands for `model.`."""
    rest: str
    """The beginning of its other tensor names, in the head."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """The checkpoint that a model was loaded from, as needed to save it."""

    family: Family
    config: str
    """Text of its config.json; of a multimodal checkpoint, only the language model's."""
    lacks_base_prefix: bool = False
    """True if tensor names lack `base_model_prefix`, as in files of a model without its head."""
    packed: tuple[str, ...] = ()
    """Paths of the layers that were loaded packed, from a quantized file."""
    side_tensors: str = ""
    """Text of the file's small tensors that belong to packed layers and that these do not hold."""
    older_names: tuple[str, ...] = ()
    """Names of the checkpoint's tensors that have one of the family's `older_endings`."""
    wrapping: Wrapping | None = None
    """The multimodal checkpoint around the language model; None without one."""
    int64_names: tuple[str, ...] = ()
    """The family's `int64_tensors` that the checkpoint has in int64."""
    lacking: tuple[str, ...] = ()
    """The family's `optional_tensors`, if the checkpoint lacks them."""
    predictors: int = 0
    """Number of modules of multi-token prediction."""
    head_copies: tuple[str, ...] = ()
    """Names of the checkpoint's tensors in these modules that repeat the embedding or the head."""
    left_aside: str = ""
    """The tensors of the checkpoint that the model does not have, in words; "" without any."""
    sentence_files: tuple[tuple[str, str], ...] = ()
    """Paths and texts of sentence-transformers' files, which say how `zoo.embed` pools."""
    has_tokenizer: bool = dataclasses.field(default=False, compare=False)
    """True if the checkpoint has a tokenizer, which `save` misses then."""

    def __repr__(self) -> str:
        return f"Origin({self.family.name})"
