"""Read and write VeRA, LoHa and LoKr in PEFT's format: tensors of a module, the adapter they build, and the config."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from zoo.models.targets import LinearSite
from zoo.weights import CheckpointError

from ..base import AbstractAdapter
from ..methods.lycoris import LoHa, LoKr, factorize
from ..methods.vera import VeRA
from ..names import LYCORIS_FIELDS, VERA_SHARED, PeftModule, read_floats
from .config import scale_from_config
from .methods import AdapterSource, format_shapes

_LayerArrays = Mapping[tuple[int, ...], dict[str, Any]]
"""Index into the stacked dims -> the arrays of that layer."""
_LYCORIS_CLASSES = {"LOHA": LoHa, "LOKR": LoKr}


def read_vera(source: AdapterSource, module: PeftModule) -> dict[str, Any] | None:
    """Read the scaling vectors of a module's VeRA, or None if it has none."""
    refuse_fused_vera(module, source.path)
    source.names_read |= VERA_SHARED.keys() & source.source.keys()
    down = source.read_vector(module, "vera_lambda_d", source.config["r"])
    up = source.read_vector(module, "vera_lambda_b", module.site.get_shape()[0], has_rows=True)
    if down is None and up is None:
        return None
    if down is None or up is None:
        raise CheckpointError(f"{source.path}: {module.peft_name} has one of vera_lambda_d and vera_lambda_b, not both")
    return {"down_scale": down, "up_scale": up}


def refuse_fused_vera(module: PeftModule, path: str) -> None:
    """**Raises** `CheckpointError` for a projection that is several matrices here: each would have its own rows of the
    shared B."""
    if len(module.mapping.parts) > 1:
        raise CheckpointError(
            f"{path}: {module.peft_name} holds {', '.join(module.mapping.parts)}, which are separate matrices here, "
            "and VeRA's B is not cut into theirs"
        )


def plan_vera(source: AdapterSource, site: LinearSite, layers: _LayerArrays) -> Any:
    """Plan the VeRA of a linear layer: scaling vectors of all stacked layers, and the shared A and B."""
    if missing := [name for name in VERA_SHARED if name not in source.source]:
        raise CheckpointError(
            f"{source.path} has no {missing[0]}: PEFT drew it from PyTorch's generator, and saves it with "
            "save_projection=True"
        )
    down, up = (read_floats(source.source[name], name, source.path) for name in VERA_SHARED)
    stacked_shape, rank = [len(run) for run in site.ranges], source.config["r"]
    outputs, inputs = site.get_shape()
    is_large_enough = down.ndim == up.ndim == 2 and down.shape[1] >= inputs and len(up) >= outputs
    if not is_large_enough or (len(down), up.shape[1]) != (rank, rank):
        raise CheckpointError(
            f"{source.path}: vera_A and vera_B are {format_shapes([down.shape, up.shape])}, where r = {rank} and the "
            f"largest module are expected, {format_shapes([(rank, inputs), (outputs, rank)])} or more"
        )
    tables = {
        "down_scale": np.zeros((*stacked_shape, rank), np.float32),
        "up_scale": np.zeros((*stacked_shape, outputs), np.float32),
        "applies": np.zeros(stacked_shape, bool),
    }
    for index, arrays in layers.items():
        for field, array in arrays.items():
            tables[field][index] = array
        tables["applies"][index] = True

    def factory(base: Any, *, key: Any, applies: Any, down_scale: Any, up_scale: Any) -> VeRA:
        adapter = VeRA(
            base, shared=(jnp.asarray(down), jnp.asarray(up)), applies=applies, adapter_name=source.adapter_name
        )
        return eqx.tree_at(lambda vera: (vera.down_scale, vera.up_scale), adapter, (down_scale, up_scale))

    return factory, tables


def read_lycoris(source: AdapterSource, module: PeftModule) -> dict[str, Any] | None:
    """Read the factors and the scale of a module's LoHa or LoKr, or None if it has none."""
    config, method = source.config, source.config["peft_type"]
    fields = LYCORIS_FIELDS[method]
    if len(module.mapping.parts) > 1 and method == "LOKR":
        raise CheckpointError(
            f"{source.path}: {module.peft_name} holds {', '.join(module.mapping.parts)}, which are separate matrices "
            "here, and a Kronecker product is not cut into theirs"
        )
    arrays = {
        field: source.read_tensor(module, suffix, has_rows=method == "LOHA" and suffix.endswith("_a"))
        for suffix, field in fields.items()
    }
    if all(array is None for array in arrays.values()):
        return None
    outputs, inputs = module.site.get_shape()
    expected = (
        _list_loha_shapes(config["r"], outputs, inputs)
        if method == "LOHA"
        else _list_lokr_shapes(config["r"], config["decompose_factor"], config["decompose_both"], outputs, inputs)
    )
    for suffix, field in fields.items():
        shapes = [None if (array := arrays[field]) is None else array.shape, expected.get(field)]
        if shapes[0] != shapes[1]:
            found, wanted = map(format_shapes, ([shapes[0]], [shapes[1]]))
            raise CheckpointError(
                f"{source.path}: {module.peft_name}.{suffix} is {found}, where {wanted} was expected: r = {config['r']}"
            )
    arrays = {field: array for field, array in arrays.items() if array is not None}
    return {"scale": scale_from_config(config, module.peft_name, config["r"]), **arrays}


def _list_loha_shapes(rank: int, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    up, down = (outputs, rank), (rank, inputs)
    return {"up": up, "down": down, "other_up": up, "other_down": down}


def _list_lokr_shapes(rank: int, factor: int, both: bool, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the factors that PEFT makes of a matrix."""
    (left_out, right_out), (left_in, right_in) = (
        (factor, size // factor) if factor > 0 and size % factor == 0 else factorize(size, factor)
        for size in (outputs, inputs)
    )
    is_left_low_rank = both and rank < max(left_out, left_in) / 2
    left = {"left_up": (left_out, rank), "left_down": (rank, left_in)}
    right = {"right_up": (right_out, rank), "right_down": (rank, right_in)}
    return {
        **(left if is_left_low_rank else {"left": (left_out, left_in)}),
        **(right if rank < max(right_out, right_in) / 2 else {"right": (right_out, right_in)}),
    }


def plan_lycoris(source: AdapterSource, site: LinearSite, layers: _LayerArrays) -> Any:
    """Plan the LoHa or LoKr of a linear layer: factors of all stacked layers."""
    stacked_shape, first = [len(run) for run in site.ranges], next(iter(layers.values()))
    tables = {field: np.zeros((*stacked_shape, *np.shape(array)), np.float32) for field, array in first.items()}
    tables["applies"] = np.zeros(stacked_shape, bool)
    for index, arrays in layers.items():
        tables["applies"][index] = True
        for field, array in arrays.items():
            tables[field][index] = array
    method = source.config["peft_type"]
    fields = list(LYCORIS_FIELDS[method].values())

    def factory(base: Any, *, key: Any, scale: Any, applies: Any, **arrays: Any) -> AbstractAdapter:
        adapter = _LYCORIS_CLASSES[method](
            base, rank=1, scale=scale, applies=applies, adapter_name=source.adapter_name, key=key
        )
        where = lambda adapter: [getattr(adapter, field) for field in fields]
        return eqx.tree_at(where, adapter, [arrays.get(field) for field in fields], is_leaf=lambda x: x is None)

    return factory, tables


def build_lycoris_config(adapters: Mapping[str, tuple[PeftModule, Any, Any]]) -> dict[str, Any]:
    """Build the config of a LoHa or LoKr. The scale is stored as alpha / rank. **Raises** `CheckpointError` if PEFT's
    one rank, factor and `decompose_both` do not give the factors of all modules."""
    _, adapter, _ = next(iter(adapters.values()))
    options = _find_lokr_options(adapters) if isinstance(adapter, LoKr) else {"r": adapter.down.shape[-2]}
    if options is None or any(type(other) is not type(adapter) for _, other, _ in adapters.values()):
        raise CheckpointError("PEFT's files have one method, one rank and one decompose_factor for all modules")
    rank = options["r"]
    scales = {name: float(np.asarray(adapter.scale)[module.index]) for name, (module, adapter, _) in adapters.items()}
    alphas = {
        name: int(scale * rank) if (scale * rank).is_integer() else scale * rank for name, scale in scales.items()
    }
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    return {
        "peft_type": type(adapter).__name__.upper(),
        "alpha": alpha,
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
        "rank_pattern": {},
        "init_weights": True,
        **options,
    }


def _find_lokr_options(adapters: Mapping[str, tuple[PeftModule, Any, Any]]) -> dict[str, Any] | None:
    """Return the options of a LoKr for which PEFT makes factors of these shapes; None if there are none."""
    fields = LYCORIS_FIELDS["LOKR"].values()

    def list_shapes(module: PeftModule, adapter: LoKr) -> dict[str, tuple[int, ...]]:
        arrays = {field: getattr(adapter, field) for field in fields}
        stacked = len(module.site.ranges)
        return {field: tuple(array.shape[stacked:]) for field, array in arrays.items() if array is not None}

    actual = {(module.site.get_shape(), tuple(list_shapes(module, a).items())) for module, a, _ in adapters.values()}

    def list_candidates() -> Iterator[tuple[int, int, bool]]:
        sizes = [size for _, shapes in actual for _, shape in shapes for size in shape]
        ranks = {shape[0] for _, shapes in actual for field, shape in shapes if field.endswith("_down")}
        for rank in ranks or {max(sizes)}:  # without low-rank factors, any rank that PEFT does not decompose for
            for factor in (-1, *range(1, max(sizes) + 1)):
                yield from ((rank, factor, both) for both in (False, True))

    for rank, factor, both in list_candidates():
        if all(_list_lokr_shapes(rank, factor, both, *shape) == dict(shapes) for shape, shapes in actual):
            return {"r": rank, "decompose_factor": factor, "decompose_both": both}
    return None
