"""Tables of the pages about plans: there is one for every group of cases, and they are what the planner says today."""

import pytest

from scripts import plan_tables
from scripts.plan_table_cases import BATCHES, COMPARISONS, LONG, SCREEN, SIZES


def read(name):
    page, build = plan_tables.TABLES[name]
    return plan_tables.read_table((plan_tables.DOCS / page).read_text(encoding="utf-8"), name), build


@pytest.mark.parametrize("name", plan_tables.UNTRACED)
def test_tables_of_data_sheets_are_current(name):
    table, build = read(name)
    assert table == build(), plan_tables.COMMAND


def test_planned_tables_are_those_of_the_cases():
    for name, cases in {"sizes": SIZES, "batches": BATCHES, "long": LONG, **COMPARISONS}.items():
        rows = read(name)[0].splitlines()[2:]
        assert len(rows) == len(cases), (name, plan_tables.COMMAND)
        for row, case in zip(rows, cases, strict=True):
            assert f"`{case.topology}`" in row and f" {plan_tables.format_mesh(case)} |" in row, plan_tables.COMMAND


def test_a_planned_screen_and_row_are_current():
    """One trace for both pages: what the planner says has not changed since."""
    table, build = read("screen")
    assert table == build(), plan_tables.COMMAND
    row = " | ".join(plan_tables.build_comparison_row(SCREEN))
    assert f"| {row} |" in read("8b")[0].splitlines(), plan_tables.COMMAND


def test_replace_table_keeps_the_rest_of_a_page():
    page = f"a\n\n{plan_tables.find_start('x')}\nold\n{plan_tables.END}\n\nb\n"
    replaced = plan_tables.replace_table(page, "x", plan_tables.date_table("| new |"))
    assert replaced.startswith("a\n") and replaced.endswith(f"{plan_tables.END}\n\nb\n") and "old" not in replaced
    assert plan_tables.read_table(replaced, "x") == "| new |" and "Planned on 20" in replaced
    with pytest.raises(ValueError, match="has no line"):
        plan_tables.replace_table(page, "y", "")
