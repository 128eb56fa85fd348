"""Picture of a pipeline's schedule: a row per stage, time to the right, a box for each pass of a micro-batch."""

from typing import Any

from ...parallel.schedule import Timetable
from .._figure import COLORS, INK, draw_svg

_TITLES = {"gpipe": "GPipe", "1f1b": "1F1B"}
_KINDS = {"forward": COLORS[0], "backward": COLORS[1]}
_TOP, _LEFT, _ROW, _DIGIT = 62, 60, 26, 7


def draw_schedule(table: Timetable, *, width: int = 860) -> str:
    """Draw a timetable of a pipeline as a self-contained `<svg>`: one row per stage, time to the right.

        table = zoo.parallel.Schedule("1f1b").table(stages=4, microbatches=16, rounds=2)
        Path("schedule.svg").write_text(zoo.tools.draw.draw_schedule(table))

    A box is one pass of a micro-batch, and has its number unless it is too narrow. Later rounds are paler. **Raises**
    `ImportError` without matplotlib.
    """
    title = f"{_TITLES[table.name]}: {table.bubble:.1%} idle"
    sizes = f"{table.stages} stages, {table.microbatches} micro-batches"
    if table.rounds > 1:
        sizes = f"{sizes}, {table.rounds} rounds, later ones paler"
    height = _TOP + _ROW * table.stages + 8

    def draw(figure: Any) -> None:
        axes = figure.add_axes((_LEFT / width, 8 / height, 1 - (_LEFT + 8) / width, _ROW * table.stages / height))
        axes.set(xlim=(0, table.cost()), ylim=(table.stages - 0.5, -0.5))
        axes.set_yticks(range(table.stages), [f"stage {stage}" for stage in range(table.stages)])
        axes.tick_params(length=0)
        axes.xaxis.set_visible(False)
        axes.spines[:].set_visible(False)
        axes.hlines([stage + 0.46 for stage in range(table.stages)], 0, table.cost(), colors=INK, alpha=0.25, lw=1)
        _draw_work(axes, table, (width - _LEFT - 8) / table.cost())
        figure.text(8 / width, 1 - 4 / height, title, size=14, weight="bold", va="top")
        figure.text(8 / width, 1 - 24 / height, sizes, va="top")
        x = 8
        for kind, color in _KINDS.items():
            figure.text(x / width, 1 - 42 / height, f"\N{BLACK SQUARE} {kind}", color=color, weight="bold", va="top")
            x += 100

    return draw_svg(draw, width=width, height=height, title=f"{title}. {sizes}, in lockstep")


def _draw_work(axes: Any, table: Timetable, per_unit: float) -> None:
    """Draw the passes of each stage, `per_unit` pixels for the time of a forward pass."""
    letters = _DIGIT * len(str(table.microbatches - 1)) + 2
    for work in table.list_work():
        opacity = 1.0 if work.round == 0 else max(0.5 * 0.7 ** (work.round - 1), 0.12)
        gap = min(1.0, 0.2 * per_unit * work.duration) / per_unit
        box = (work.start, work.duration - gap)
        axes.broken_barh([box], (work.stage - 0.42, 0.84), facecolor=_KINDS[work.kind], alpha=opacity, linewidth=0)
        if per_unit * work.duration >= letters:
            color = "white" if work.round == 0 else INK
            place = (work.start + work.duration / 2, work.stage)
            axes.text(*place, str(work.microbatch), color=color, size=9, ha="center", va="center_baseline")
