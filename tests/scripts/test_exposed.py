"""A row of the table of exposed communication."""

from types import SimpleNamespace

import pytest

from scripts.exposed import format_row


def make_row(kind, phase, times, products, exposed):
    return SimpleNamespace(
        kind=kind, phase=phase, times=times, products=products, exposed_seconds=exposed, link_seconds=0.004
    )


def test_row_has_products_and_the_exposed_share():
    schedule = [
        make_row("all-gather", "forward", 8, 0, 0.004),
        make_row("all-gather", "forward", 1, 2, 0.002),
        make_row("reduce-scatter", "backward", 4, 4, 0.001),
        make_row("reduce-scatter", "backward", 4, 72, 0.001),
        make_row("all-reduce", "", 1, 0, 0.004),
    ]
    program = SimpleNamespace(
        schedule=schedule,
        collectives=schedule,
        exposed_seconds=0.012,
        platform="gpu",
        memory=SimpleNamespace(peak=468_000_000),
    )
    expected = "| scan | 0; 75% | none | 1 to 18; 25% | 20 ms | 12 ms | 468 MB |"
    assert format_row("scan", program) == expected
    program.exposed_seconds = None
    with pytest.raises(ValueError, match="scan: no schedule and chip are known for gpu; compile for h100"):
        format_row("scan", program)
