"""Rows of conversations with pictures. A picture is read and processed together with its row."""

import copy
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, Shaped

from zoo.images import ProcessedImages, join_rows, measure_images, open_image, preprocess_images
from zoo.images.pictures import RGB
from zoo.text.packing import PackedRows
from zoo.text.records.token_store import TokenStore

from .pictures import SIDE, find_sources
from .record_file import RecordFile, Unit, drop_nulls


class PictureRows:
    """`PackedRows` with `images`: a `Dataset` whose rows are a batch of `zoo.cross_entropy` for an `ImageText`.

    The images of a row are in the order of its texts, padded with zeros to the largest number of images, or patches, of
    all rows: a batch has the images of `join_rows`, always of one shape. Nothing of a picture is kept in memory.

    - `sizes`: pictures of a row, and images or patches of these, with padding. `num_pictures`: pictures of all rows.
    - Other attributes are as in `PackedRows`.
    """

    def __init__(self, rows: PackedRows, store: TokenStore, files: Sequence[RecordFile], config: Mapping[str, Any]):
        assert store.pictures is not None
        self._rows = rows
        self._store = store
        self._files = {os.path.abspath(file.path): file for file in files}
        self._config = config
        measured = measure_images([(SIDE, SIDE)], config)
        arrays = {name: x[:0] for name, x in vars(measured).items() if x is not None}
        self._empty = dataclasses.replace(measured, **arrays)
        self._structure = jax.tree.structure(join_rows([self._empty]))
        sums = rows.sum_items(store.pictures)
        # Rows without any image would make another kind of batch, and patches come in whole tokens.
        least = 1 if measured.grids is None else len(measured.pixels) // int(measured.shapes.prod())
        self.sizes = np.maximum(sums.max(axis=0, initial=0), [1, least])
        self.num_pictures = int(sums[:, 0].sum())
        self.num_items = rows.num_items
        self.num_cut = rows.num_cut
        self.num_dropped = rows.num_dropped
        self.num_targets = rows.num_targets
        self.num_trained = rows.num_trained

    def pad_images(self, sizes: Int[np.ndarray, "2"]) -> "PictureRows":
        """Return the same rows with images padded to `sizes`, no smaller than now."""
        padded = copy.copy(self)
        padded.sizes = sizes
        return padded

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = self._rows[index]
        processed = self._empty
        if pictures := self.open_pictures(index):
            processed = preprocess_images(pictures, self._config)
        assert isinstance(processed, ProcessedImages)
        arrays = [_pad(processed.pixels, self.sizes[1])]
        if processed.grids is not None:
            arrays.append(_pad(processed.grids, self.sizes[0]))
        if processed.mask is not None:
            arrays.append(_pad(processed.mask, self.sizes[1]))
        row["images"] = jax.tree.unflatten(self._structure, arrays)
        return row

    def open_pictures(self, index: int) -> list[RGB]:
        """Return the pictures of a row as they are, before any processing, in order. **Raises** as reading the row."""
        return [picture for item in self._rows.list_items(index) for picture in self._open_pictures(item)]

    def _open_pictures(self, item: int) -> list[RGB]:
        """Return the pictures of a text. **Raises** `ValueError` and `FileNotFoundError`, with the place of its record,
        for a picture that is gone, damaged or has another size than before."""
        assert self._store.pictures is not None
        if not self._store.pictures[item, 0]:
            return []
        fields = self._store.read_fields(item)
        file = self._files[fields["file"]]
        unit = Unit(*fields["unit"], num_bytes=0)
        pictures = []
        for source, shape in zip(self._find_images(file, unit, fields), fields["shapes"], strict=True):
            try:
                picture = open_image(source)
                if measure_images([picture.shape[:2]], self._config).shapes.tolist() != [shape]:
                    raise ValueError(f"{_name(source)} has another size than before: load the records with a new cache")
            except FileNotFoundError:
                place = file.locate(unit, fields["number"])
                raise FileNotFoundError(f"{place}: the picture {source} is not there any more") from None
            except (OSError, ValueError) as error:
                raise ValueError(f"{file.locate(unit, fields['number'])}: {error}") from error
            pictures.append(picture)
        return pictures

    def _find_images(self, file: RecordFile, unit: Unit, fields: Mapping[str, Any]) -> list[Path | bytes]:
        """Return the path of each picture, or its bytes, from the record."""
        sources = fields["pictures"]
        if None in sources:
            record = file.read_one(unit, fields["number"])
            if file.adds_nulls:
                record = {name: drop_nulls(value) for name, value in record.items()}
            sources = find_sources(record, self._config)[: len(sources)]
        return [source if isinstance(source, bytes) else file.path.parent / source for source in sources]


def pad_rows(rows: Sequence[Any]) -> list[Any]:
    """Give the rows of several parts as many images, or, if they are labeled, labels: of the most that a row has."""
    if pictured := [part.sizes for part in rows if isinstance(part, PictureRows)]:
        sizes = np.max(pictured, axis=0)
        return [part.pad_images(sizes) for part in rows]
    packed = [part for part in rows if isinstance(part, PackedRows)]
    most = max((part.most_segments for part in packed), default=0)
    return [part.pad_labels(most) if isinstance(part, PackedRows) else part for part in rows]


def _name(source: Path | bytes) -> str:
    return "a picture" if isinstance(source, bytes) else str(source)


def _pad(x: Shaped[np.ndarray, "length ..."], length: int) -> Shaped[np.ndarray, "padded ..."]:
    padded = np.zeros((length, *x.shape[1:]), x.dtype)
    padded[: len(x)] = x
    return padded
