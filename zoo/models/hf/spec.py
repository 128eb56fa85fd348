"""The vocabulary in which a family of checkpoints is written down: how its tensors are named, what its config says.

A table of names has the tensors of a checkpoint on the left, as its listing reads, and our parameters on the right:

    {"q_proj": "attention.query", "c_attn": fused("query", "key", "value", transposed=True)}

Rows name modules; `.weight` and `.bias` follow. A star stands for the number of a layer or an expert. There is one
transform, `Row`, and it is a view of their tensor for each of our parts: loading reads through it and saving writes
through it, so that there is no inverse that could be wrong.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TensorMapping:
    """Their tensor: in each of `groups`, the rows of our `parts` one after another; (in, out) if `transposed`; with so
    many dims of size 1 in front (`ones`); filters (features, 1, width) as PyTorch's `Conv1d` has them (`filters`).

    A rename has one part. Splits (one group), fusions per head (as many groups as heads) and interleaving (as many as
    rows in a part) are all this one. Parts may be of unlike sizes.
    """

    parts: tuple[str, ...]
    groups: int = 1
    transposed: bool = False
    leading_ones: int = 0
    conv1d_filters: bool = False

    def shape(self, parts: Sequence[Shape], num_stacked_dims: int) -> Shape:
        """The shape of their tensor, from those of our parts. `lead` dims in front are stacked: all experts in one."""
        rows = sum(part[num_stacked_dims] for part in parts) if len(parts[0]) > num_stacked_dims else None
        shape = parts[0] if rows is None else (*parts[0][:num_stacked_dims], rows, *parts[0][num_stacked_dims + 1 :])
        own = shape[num_stacked_dims:][::-1] if self.transposed else shape[num_stacked_dims:]
        own = (own[0], 1, own[1]) if self.conv1d_filters and len(own) == 2 else own
        return (*shape[:num_stacked_dims], *(1,) * self.leading_ones, *own)

    def views(self, theirs: np.ndarray, parts: Sequence[Shape], num_stacked_dims: int) -> list[np.ndarray]:
        """A writable view of their tensor for each of our parts, shaped [..., groups, rows of a group, ...] where there
        are several parts: it holds the part's numbers in the part's order."""
        theirs = theirs[(slice(None),) * num_stacked_dims + (0,) * self.leading_ones]
        if self.conv1d_filters and theirs.ndim == num_stacked_dims + 3:
            theirs = theirs[(slice(None),) * (num_stacked_dims + 1) + (0,)]
        if self.transposed and theirs.ndim == num_stacked_dims + 2:
            theirs = theirs.swapaxes(-1, -2)
        if len(self.parts) == 1:
            return [theirs]
        size = theirs.shape[num_stacked_dims] // self.groups
        grouped = np.lib.stride_tricks.as_strided(
            theirs,
            (*theirs.shape[:num_stacked_dims], self.groups, size, *theirs.shape[num_stacked_dims + 1 :]),
            (
                *theirs.strides[:num_stacked_dims],
                size * theirs.strides[num_stacked_dims],
                *theirs.strides[num_stacked_dims:],
            ),
        )
        cuts = np.cumsum([part[num_stacked_dims] // self.groups for part in parts])[:-1]
        return np.split(grouped, cuts, num_stacked_dims + 1)


NameMap = Mapping[str, str | TensorMapping]


def fused(*parts: str, groups: int = 1, transposed: bool = False, conv1d_filters: bool = False) -> TensorMapping:
    """Several of our modules in one of their tensors. See `Row`."""
    return TensorMapping(parts, groups, transposed, conv1d_filters=conv1d_filters)


def prefixed(theirs: str, ours: str, name_map: NameMap) -> dict[str, TensorMapping]:
    """The same rows, further down on both sides."""

    def join(above: str, below: str) -> str:
        return f"{above}.{below}".strip(".")

    def move(row: str | TensorMapping) -> TensorMapping:
        row = TensorMapping((row,)) if isinstance(row, str) else row
        return dataclasses.replace(row, parts=tuple(join(ours, part) for part in row.parts))

    return {join(theirs, name): move(row) for name, row in name_map.items()}


class Config(dict):
    """What `build` and `names` of a family see: the usual word for every key, defaults filled in."""


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """All that is to be known of the checkpoints of one `model_type`.

    - `build(config, *, key)` makes the model that a config describes.
    - `names(config)` is its table of names.
    - `defaults`: every config key that changes what the model computes, with the value it has where a file omits it:
      that of the class in transformers. Files in the older spelling leave out what is equal to it.
    - `aliases`: the family's own word for a key -> the usual one. `build` and `names` see the usual words only.
    - `only`: keys that would change the result, with the values that we compute; any other value is refused by name.
    - `inert`: keys that change nothing at inference, beyond those that never do (`config.INERT`).
    - `ignored`: regular expressions for tensors in files that no model reads: buffers that follow from the config.
    - `unread(config, tensors)`: of all names in a file, further ones that no model reads, where that depends on the
      config or on what else is there.
    - `live`: modules that transformers calls by another word in memory than in its files: in memory -> in the file.
    - `live_names(config)`: its table of names in memory, where transformers arranges tensors otherwise than in its
      files: all experts in one.
    - `head`, `embedding`: the modules whose weights are one where the config ties them.
    - `describe(model)`: the config of a model that was made from scratch, None where the family has no such form. What
      it gives is not trusted: the model that `build` makes of it is compared with the one that it describes.
    """

    name: str
    architecture: str
    build: Callable[..., Any]
    names: Callable[[Config], NameMap]
    defaults: Mapping[str, Any]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    required_values: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    ignored_keys: frozenset[str] = frozenset()
    ignored_tensors: tuple[str, ...] = ()
    find_ignored_tensors: Callable[[Config, Collection[str]], Collection[str]] | None = None
    memory_modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    memory_names: Callable[[Config], NameMap] | None = None
    head: str = "lm_head"
    embedding: str = "model.embed_tokens"
    describe: Callable[[Any], Mapping[str, Any]] | None = None

    def __repr__(self) -> str:
        return f"Family({self.name!r})"


@dataclasses.dataclass(frozen=True)
class Origin:
    """The checkpoint that a model was read from: what is needed to write it again."""

    family: Family
    config: str
    """Its config.json, as text."""
    lacks_base_prefix: bool = False
    """Whether its names lack the first word, as in files of a model without its head."""
