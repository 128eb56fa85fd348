"""SVG picture of a layer for `draw_layer.py`: arrays cut into shards, and the data flow between them.

Arrays are drawn to scale. `embed` runs down every array, and the dim that `tensor` shards runs across, whatever their
order in the array. So a device's shard is in the same corner everywhere, and a product reads like a path: in along
`embed` from the left, out at the bottom; in at the top, out to the left.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

UPRIGHT = "embed"


@dataclass(frozen=True)
class Half:
    """One residual branch of a block: matrices that read the residual stream, an op, a matrix that writes to it."""

    formula: str
    norm: str
    reads: tuple[str, ...]
    between: tuple[str, ...]
    writes: str


MIXER = Half(
    "x + mixer(mixer_norm(x))",
    "mixer_norm.weight",
    ("mixer.query.weight", "mixer.key.weight", "mixer.value.weight"),
    ("attention",),
    "mixer.out.weight",
)
FFN = Half(
    "x + ffn(ffn_norm(x))",
    "ffn_norm.weight",
    ("ffn.gate.weight", "ffn.up.weight"),
    ("silu(gate)", "* up"),
    "ffn.down.weight",
)

PANEL, HEIGHT, GAP = 356, 300, 32
STREAM, NORM, FIRST, LAST, SPACE = 12, 62, 98, 340, 22
"""Across a panel: the residual stream, the norm, the first matrix and the last one's end, and between matrices."""
READS, BETWEEN, WRITES = 62, 160, 222
"""Down a panel: the matrices that read the residual stream, the op between, the one that writes to it."""
TALL, BAR, BOX = 64, 9, 24

STYLE = """
.layer { --ink: var(--zoo-ink, #1b1f24); --soft: var(--zoo-soft, #57606b); --line: var(--zoo-line, #b9c0c8);
  --cell: var(--zoo-cell, #f6f7f9); --own: var(--zoo-own, #2563c9); --light: var(--zoo-light, #d3e1fa);
  --on: var(--zoo-on, #ffffff); --moves: var(--zoo-moves, #c2500c);
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
@media (prefers-color-scheme: dark) {
  .layer { --ink: var(--zoo-ink, #e6e8eb); --soft: var(--zoo-soft, #a3acb7); --line: var(--zoo-line, #4a525c);
    --cell: var(--zoo-cell, #1f242b); --own: var(--zoo-own, #6ea8ff); --light: var(--zoo-light, #27436e);
    --on: var(--zoo-on, #10151c); --moves: var(--zoo-moves, #ff9a57); }
}
.layer text { fill: var(--soft); font-size: 11px; }
.layer .head { fill: var(--ink); font-weight: 600; font-size: 14px; }
.layer .name { fill: var(--ink); font-weight: 600; font-size: 12px; }
.layer .code { fill: var(--ink); font: 11.5px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.layer .moving { fill: var(--moves); font-weight: 600; }
.layer .middle { text-anchor: middle; }
.layer .end { text-anchor: end; }
.layer .number { font-size: 9.5px; text-anchor: middle; font-variant-numeric: tabular-nums; }
.layer .number.light { fill: var(--ink); }
.layer .number.own { fill: var(--on); font-weight: 600; }
.layer rect { fill: var(--cell); stroke: var(--line); }
.layer rect.light { fill: var(--light); stroke: var(--own); }
.layer rect.own { fill: var(--own); stroke: var(--own); }
.layer rect.sum { fill: var(--moves); stroke: none; }
.layer circle { fill: var(--cell); stroke: var(--ink); stroke-width: 1.5; }
.layer path { fill: none; stroke: var(--line); stroke-width: 1.25; }
.layer path.flow { stroke: var(--soft); }
.layer path.own { stroke: var(--own); stroke-width: 1.75; }
.layer path.stream { stroke: var(--ink); stroke-width: 2; }
.layer path.moving { stroke: var(--moves); stroke-width: 1.75; }
.layer path.tip { fill: var(--soft); stroke: none; }
.layer path.tip.stream { fill: var(--ink); }
.layer path.tip.moving { fill: var(--moves); }
"""


@dataclass(frozen=True)
class Picture:
    """A layer on a mesh, seen from one device. `arrays` come from `draw_layer.list_layer_arrays`."""

    mesh: str
    arrays: Mapping[str, Any]
    device: int
    narrow: bool

    def svg(self) -> str:
        top = 224 if self.narrow else 148
        width, height = (PANEL, top + 2 * HEIGHT + GAP) if self.narrow else (2 * PANEL + GAP, top + HEIGHT)
        own = "layer-narrow" if self.narrow else "layer-wide"
        title = f"One layer on {self.mesh}"
        second = (0, top + HEIGHT + GAP) if self.narrow else (PANEL + GAP, top)
        parts = [
            f'<svg class="layer" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'aria-labelledby="{own}-title {own}-text">',
            f'<title id="{own}-title">{escape(title)}</title>',
            f'<desc id="{own}-text">{escape(" ".join(self.describe()))}</desc>',
            f"<style>{STYLE}</style>",
            text(0, 14, title, "head"),
            *self.header(),
        ]
        for half, (x, y) in ((MIXER, (0, top)), (FFN, second)):
            parts += [f'<g transform="translate({x} {y})">', *self.half(half), "</g>"]
        return "\n".join([*parts, "</svg>", ""])

    def describe(self) -> Iterator[str]:
        """Describe the picture in words, for screen readers."""
        arrays = self.arrays.values()
        total, stored = sum(math.prod(a.shape) for a in arrays), sum(a.num_stored for a in arrays)
        yield f"A layer of a Transformer. Device {self.device} stores {stored:,} of its {total:,} parameters."
        if gathered := sum(a.num_gathered for a in arrays):
            yield f"It all-gathers {gathered:,} more over fsdp just before use, and frees them after."
        for half in (MIXER, FFN):
            if axes := self.summed_axes(half):
                yield f"The output of {word(half.writes)} is all-reduced over {axes}."

    def summed_axes(self, half: Half) -> str:
        """Return the axes that shard the dim that the last matrix contracts: each device has a partial sum."""
        writes = self.arrays[half.writes]
        return " and ".join(writes.sharded_axes[find_column_dim(writes)])

    def header(self) -> Iterator[str]:
        """Yield the mesh and the legend."""
        sizes = self.arrays[MIXER.norm].axis_sizes
        groups, rows, columns = sizes["data"], sizes["fsdp"], sizes["tensor"]
        side = min(24, 60 / rows, (300 - 8 * groups) / (columns * groups))
        left, top = 22, 50
        across = ["tensor"] * (columns > 1) + ["data side by side"] * (groups > 1)
        yield text(left, top - 7, ", ".join(across))
        yield vertical_text(left - 8, top + rows * side / 2, "fsdp" * (rows > 1))
        for device, (group, row, column) in enumerate(itertools.product(range(groups), range(rows), range(columns))):
            x, y = left + group * (columns * side + 8) + column * side, top + row * side
            kind = "own" if device == self.device else ""
            yield rect(x, y, side, side, kind)
            if side >= 13:
                yield text(x + side / 2, y + side / 2 + 3.5, str(device), f"number {kind}")
        arrays = self.arrays.values()
        total, stored = sum(math.prod(a.shape) for a in arrays), sum(a.num_stored for a in arrays)
        entries = [("own", f"stored on device {self.device}: {stored:,} of {total:,} parameters")]
        if gathered := sum(a.num_gathered for a in arrays):
            entries.append(("light", f"all-gathered over fsdp before use, then freed: {gathered:,}"))
        if stored < total:
            entries.append(("", "on other devices"))
        if any(map(self.summed_axes, (MIXER, FFN))):
            entries.append(("sum", "partial sums, all-reduced over tensor"))
        x, y = (0, 126) if self.narrow else (PANEL + GAP, 42)
        for number, (kind, words) in enumerate(entries):
            inset = 3.5 if kind == "sum" else 0
            yield rect(x + inset, y + 19 * number, 12 - 2 * inset, 12, kind)
            yield text(x + 20, y + 19 * number + 10, words, "moving" if kind == "sum" else "")

    def half(self, half: Half) -> Iterator[str]:
        reads, writes = [self.arrays[name] for name in half.reads], self.arrays[half.writes]
        lanes, own = (
            writes.num_shards(find_column_dim(writes)),
            writes.shard_index(self.device)[find_column_dim(writes)],
        )
        lane = (LAST - FIRST) / lanes
        slots = [max(self.wide(a), 6.2 * len(a.dims[find_column_dim(a)].name)) + SPACE for a in reads]
        starts = list(itertools.accumulate(slots, initial=FIRST))[:-1]
        yield text(STREAM + 14, 12, half.formula, "code")
        yield path(f"M{STREAM} 0V{HEIGHT - 8}", "stream")
        yield arrow_head(STREAM, HEIGHT, 0, "stream")
        middle = READS + TALL / 2
        yield path(f"M{STREAM} {middle}H{num(starts[-1] - 8)}", "flow")
        yield from (arrow_head(x - 2, middle, -90) for x in (NORM, *starts))
        yield vertical_text(starts[-1] + self.wide(reads[-1]) + 13, middle, UPRIGHT)
        yield text(NORM + BAR / 2, READS - 7, "norm", "name middle")
        yield from self.array(self.arrays[half.norm], NORM, READS)
        for array, x in zip(reads, starts, strict=True):
            columns = array.num_shards(find_column_dim(array))
            for column, segment in itertools.product(range(columns), range(lanes)):
                if columns == 1 or column == segment:
                    start, end = x + (column + 0.5) * self.wide(array) / columns, FIRST + (segment + 0.5) * lane
                    yield path(connector_path(start, READS + TALL, end, BETWEEN), "own" if segment == own else "")
            yield text(x, READS - 21, word(array.name), "name")
            yield text(x, READS - 7, array.dims[find_column_dim(array)].name)
            yield from self.array(array, x, READS)
        x = FIRST + (LAST - FIRST - self.wide(writes)) / 2
        computing = [
            [d for d in self.devices(writes) if writes.shard_index(d)[find_column_dim(writes)] == segment]
            for segment in range(lanes)
        ]
        for segment in range(lanes):
            start, end = FIRST + (segment + 0.5) * lane, x + (segment + 0.5) * self.wide(writes) / lanes
            yield path(connector_path(start, BETWEEN + BOX, end, WRITES), "own" if segment == own else "")
            kind = "light" if segment == own else ""
            yield rect(FIRST + segment * lane, BETWEEN, lane, BOX, kind)
            if fits(label := format_devices(computing[segment]), lane):
                yield text(FIRST + (segment + 0.5) * lane, BETWEEN + BOX / 2 + 3.5, label, f"number {kind}")
        for line, words in enumerate(half.between):
            yield text(FIRST - 8, BETWEEN + BOX / 2 + 4 + 14 * (line - (len(half.between) - 1) / 2), words, "code end")
        yield from self.draw_return(half, x)
        yield from self.array(writes, x, WRITES)
        right = x + self.wide(writes)
        yield vertical_text(right + 13, WRITES + TALL / 2, UPRIGHT)
        yield text(right + 22, WRITES + TALL / 2 - 3, word(writes.name), "name")
        yield text(right + 22, WRITES + TALL / 2 + 11, writes.dims[find_column_dim(writes)].name)

    def draw_return(self, half: Half, x: float) -> Iterator[str]:
        """Yield the path from the last matrix, which begins at `x`, to the residual stream."""
        writes, middle, bar = self.arrays[half.writes], WRITES + TALL / 2, FIRST + 18
        if axes := self.summed_axes(half):
            lanes, own = (
                writes.num_shards(find_column_dim(writes)),
                writes.shard_index(self.device)[find_column_dim(writes)],
            )
            for line in range(lanes):
                y = WRITES + (line + 0.5) * TALL / lanes
                yield path(f"M{num(x)} {num(y)}H{bar}", "own" if line == own else "")
            yield rect(bar - 5, WRITES, 5, TALL, "sum")
            yield text(bar - 12, WRITES + 10, "all-reduce", "moving end")
            yield text(bar - 12, WRITES + 23, f"over {axes}", "moving end")
            x = bar - 5
        yield path(f"M{num(x)} {middle}H{STREAM + 16}", "flow")
        yield arrow_head(STREAM + 10, middle, 90)
        yield f'<circle cx="{STREAM}" cy="{num(middle)}" r="8"/>'
        yield path(f"M{STREAM - 4} {middle}h8M{STREAM} {num(middle - 4)}v8", "flow")

    def array(self, array: Any, x: float, y: float) -> Iterator[str]:
        """Yield an array cut into shards, with arrows for the shards that the device all-gathers."""
        over, down = find_column_dim(array), find_row_dim(array)
        rows, columns = array.num_shards(down), 1 if over is None else array.num_shards(over)
        wide, tall = self.wide(array) / columns, TALL / rows
        holders: dict[tuple[int, int], list[int]] = {}
        for device in self.devices(array):
            index = array.shard_index(device)
            holders.setdefault((index[down], 0 if over is None else index[over]), []).append(device)
        mine = next(cell for cell, devices in holders.items() if self.device in devices)
        kinds = {cell: "own" if cell == mine else "light" if cell[1] == mine[1] else "" for cell in holders}
        readable = tall >= 12 and all(fits(format_devices(devices), wide) for devices in holders.values())
        yield f"<g><title>{escape(describe_array(array))}</title>"
        for cell in sorted(holders, key=lambda cell: ("", "light", "own").index(kinds[cell])):
            left, top = x + cell[1] * wide, y + cell[0] * tall
            yield rect(left, top, wide, tall, kinds[cell])
            if readable:
                yield text(
                    left + wide / 2, top + tall / 2 + 3.5, format_devices(holders[cell]), f"number {kinds[cell]}"
                )
        for row in range(1, rows if tall >= 24 else 1):
            cut, center = y + row * tall, x + (mine[1] + 0.5) * wide
            sign = 1 if row <= mine[0] else -1
            yield path(f"M{num(center)} {num(cut - 8 * sign)}v{8 * sign}", "moving")
            yield arrow_head(center, cut + 6 * sign, 0 if sign == 1 else 180, "moving")
        yield "</g>"

    def devices(self, array: Any) -> range:
        return range(math.prod(array.axis_sizes.values()))

    def wide(self, array: Any) -> float:
        """Return the width of an array: to the scale of its height, unless the widest row would overflow its panel."""
        embed = self.arrays[MIXER.norm].shape[0]

        def elements(array: Any) -> int:
            return array.shape[find_column_dim(array)]

        rows = [[elements(self.arrays[name]) for name in half.reads] for half in (MIXER, FFN)]
        scale = min(TALL / embed, *((LAST - FIRST - SPACE * (len(row) - 1)) / sum(row) for row in rows))
        return BAR if find_column_dim(array) is None else elements(array) * scale


def find_row_dim(array: Any) -> int:
    return [dim.name for dim in array.dims].index(UPRIGHT)


def find_column_dim(array: Any) -> Any:
    """Return the index of the dim that runs across; None for a vector."""
    return next((index for index, dim in enumerate(array.dims) if dim.name != UPRIGHT), None)


def describe_array(array: Any) -> str:
    rows = zip(array.dims, array.shape, array.sharded_axes, strict=True)
    words = [f"{dim.name} {size}{' over ' + ' and '.join(axes) if axes else ''}" for dim, size, axes in rows]
    return f"{array.name}: {', '.join(words)}"


def word(name: str) -> str:
    """Return `query` for `mixer.query.weight`."""
    return name.split(".")[-2]


def format_devices(devices: list[int]) -> str:
    """Format consecutive devices as 0-3, others as 0,4."""
    ends = f"{devices[0]}-{devices[-1]}"
    return ends if len(devices) > 2 and devices[-1] - devices[0] == len(devices) - 1 else ",".join(map(str, devices))


def fits(label: str, width: float) -> bool:
    return 5.6 * len(label) + 4 <= width


def num(x: float) -> str:
    return f"{x:.2f}".rstrip("0").rstrip(".")


def format_class(kind: str) -> str:
    return f' class="{kind.strip()}"' if kind.strip() else ""


def rect(x: float, y: float, width: float, height: float, kind: str = "") -> str:
    return f'<rect x="{num(x)}" y="{num(y)}" width="{num(width)}" height="{num(height)}"{format_class(kind)}/>'


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{num(x)}" y="{num(y)}"{format_class(kind)}>{escape(words)}</text>'


def vertical_text(x: float, y: float, words: str) -> str:
    return f'<text transform="translate({num(x)} {num(y)}) rotate(-90)" class="middle">{escape(words)}</text>'


def path(d: str, kind: str = "") -> str:
    return f'<path d="{d}"{format_class(kind)}/>'


def connector_path(x: float, y: float, to_x: float, to_y: float) -> str:
    """Return a curve that leaves downward and arrives downward."""
    middle = num((y + to_y) / 2)
    return f"M{num(x)} {num(y)}C{num(x)} {middle} {num(to_x)} {middle} {num(to_x)} {num(to_y)}"


def arrow_head(x: float, y: float, turn: int, kind: str = "") -> str:
    """Return an arrow head with its tip here, pointing down, rotated clockwise by `turn` degrees."""
    move = f"translate({num(x)} {num(y)}) rotate({turn})"
    return f'<path transform="{move}" d="M0 0L-3.5 -7H3.5Z"{format_class("tip " + kind)}/>'
