"""Checks of a GPU: their dry run, stopped and crashed processes, budget, missing packages, tables."""

import collections
import json
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from scripts import on_gpu
from scripts.benchmarks.ours import Kernel
from scripts.gpu_checks.check import Check, Program, read_rows, time_program
from scripts.gpu_checks.checks import CHECKS, judge
from scripts.gpu_checks.page import format_page

ROOT = Path(__file__).parents[2]
WRITE = """
import json, sys, time
for name in {names}:
    with open(sys.argv[1] + "/rows.jsonl", "a") as file:
        print(json.dumps({{"check": "two", "name": name, "median": 1.0}}), file=file)
{end}
"""
"""A process that writes rows, instead of a check's."""


def make_check(name="two", seconds=0.0, **options):
    return Check(name, "Two", lambda toy: [Program(each, lambda device: {}) for each in ("a", "b")], seconds, **options)


def list_rows(folder):
    return [(row["name"], row.get("failed")) for row in read_rows(folder)]


@pytest.mark.ci
def test_dry_run_of_every_check(tmp_path, capfd):
    on_gpu.main(dry_run=True, out=tmp_path, budget=900)
    rows = collections.defaultdict(dict)
    for row in read_rows(tmp_path / "dry-run"):
        rows[row["check"]][row["name"]] = row
    for check in CHECKS:
        if check.missing:
            assert rows[check.name][""]["failed"] == f"missing: {', '.join(check.missing)}"
            continue
        assert rows[check.name].keys() == {program.name for program in check.programs(True)}
        failed = {name: row["failed"] for name, row in rows[check.name].items() if "failed" in row}
        assert failed.keys() == {name for name in rows[check.name] if "cudnn" in name}, failed
    for row in rows["kernels"].values():
        assert "cudnn" in row["name"] or (row["verdict"] == "equal" and 0 < max(row["errors"]) < 1e-2)
    (step,) = rows["step"].values()
    assert {module.partition("/")[0] for _, module, _ in step["scopes"]} >= {"Decoder"}
    assert 0 < sum(seconds for *_, seconds in step["scopes"]) <= step["traced"] * 1.001
    (planned,) = rows["plans"].values()
    assert 0 < planned["at_least"] <= planned["in_turns"] and planned["planned_peak"] > 0
    assert all(row["bytes_needed"] > 0 for row in rows["decoding"].values())
    first, second = rows["first"].values()
    assert 0 < first["later"] < first["first"] and second["first"] > 0
    assert rows["deterministic"].popitem()[1]["verdict"] == "the same bits"
    before = len(read_rows(tmp_path / "dry-run"))
    on_gpu.main(dry_run=True, out=tmp_path, budget=900)
    assert len(read_rows(tmp_path / "dry-run")) == before, "a second run has nothing left to do"


def test_a_stopped_check_keeps_its_rows_and_goes_on_after_them(tmp_path, monkeypatch):
    run = partial(on_gpu.run, [make_check()], tmp_path, "gpu")
    monkeypatch.setattr(on_gpu, "_CHILD", WRITE.format(names=["a"], end="time.sleep(60)"))
    run(on_gpu.RESERVE + 4)
    assert list_rows(tmp_path) == [("a", None)]
    monkeypatch.setattr(on_gpu, "_CHILD", WRITE.format(names=["b"], end=""))
    run(on_gpu.RESERVE + 30)
    assert list_rows(tmp_path) == [("a", None), ("b", None)]
    monkeypatch.setattr(on_gpu, "start_process", lambda *args: pytest.fail("there is nothing left to run"))
    run(on_gpu.RESERVE + 30)


def test_a_program_that_ends_its_process_is_not_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr(on_gpu, "_CHILD", WRITE.format(names=["a"], end="sys.exit(3)"))
    on_gpu.run([make_check()], tmp_path, "gpu", on_gpu.RESERVE + 30)
    assert list_rows(tmp_path) == [("a", None), ("b", "its process ended with status 3")]


def test_a_program_that_hangs_does_not_take_the_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(on_gpu, "SLACK", 1)
    monkeypatch.setattr(on_gpu, "_CHILD", WRITE.format(names=[], end="time.sleep(60)"))
    on_gpu.run([make_check()], tmp_path, "gpu", on_gpu.RESERVE + 60)
    assert list_rows(tmp_path) == [(name, "no result within 1 s") for name in ("a", "b")]


def test_checks_that_do_not_fit_into_the_budget_do_not_start(tmp_path, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(on_gpu, "start_process", lambda group, *rest: started.append(group[0].name) or 0)
    on_gpu.run([make_check("long", 100), make_check("short", 10)], tmp_path, "gpu", 50)
    assert started == ["short"] and "long: 100 s, and 45 s of the budget are left" in capsys.readouterr().out


def test_missing_packages_are_named_before_anything_runs(tmp_path, monkeypatch, capsys):
    check = make_check(packages=("no_such_package", "json"))
    monkeypatch.setattr(on_gpu, "start_process", lambda *args: pytest.fail("it lacks a package"))
    on_gpu.describe([check], tmp_path, "gpu")
    assert capsys.readouterr().out.endswith("0 of  2 rows  missing: no_such_package\n")
    for _ in range(2):
        on_gpu.run([check], tmp_path, "gpu", 100)
    assert list_rows(tmp_path) == [("", "missing: no_such_package")]


def test_names_stand_for_their_rivals():
    assert [check.name for check in on_gpu.choose_checks(("step",))] == ["step", "step/torch"]
    with pytest.raises(SystemExit, match="no check 'stpe'; there are rates, kernels"):
        on_gpu.choose_checks(("stpe",))


def test_the_process_that_lists_checks_uses_no_device():
    names = [program.name for check in CHECKS for program in check.programs()]
    assert len(names) > 80 and all(module in sys.modules for module in ("jax", "zoo"))
    for check in CHECKS:
        full = [program.name for program in check.programs()]
        assert len(set(full)) == len(full) and check.seconds > 0


def test_a_kernel_with_a_wrong_gradient_differs():
    draw = lambda: (jnp.linspace(-1, 1, 8), jnp.arange(8))
    kernel = Kernel(lambda x, _: x * jnp.abs(x), draw, gradient=True)
    assert judge(lambda x, _: x * jnp.abs(x), kernel) == {"errors": [0.0, 0.0], "verdict": "equal"}
    broken = SimpleNamespace(arguments=kernel.arguments, compare=lambda reference: [0.0, float("nan")])
    assert judge(None, broken)["verdict"] == "differs"
    found = judge(lambda x, _: jnp.abs(x) * jnp.sign(x) * jnp.abs(x) + 0.01 * jnp.sin(x), kernel)
    assert found["verdict"] == "differs" and min(found["errors"]) > 1e-3


def test_time_of_a_call_is_a_part_of_its_calls(monkeypatch):
    from scripts.gpu_checks import check

    ticks = iter(float(n) for n in range(0, 100, 10))
    monkeypatch.setattr(check.time, "perf_counter", lambda: next(ticks))
    kernel = type("Run", (), {"calls": 5, "__call__": lambda self: None})()
    row = time_program(Program("kernel", lambda device: kernel, {"tokens": 7}), rounds=2)
    assert row["first"] == 10 and row["median"] == 2 and row["rounds"] == 2 and row["tokens"] == 7


def test_page_of_a_folder(tmp_path, capsys):
    """By hand: 1e12 / 0.001 s and 4e9 / 0.002 s; a step of 989e12 * 0.2 FLOPs in 0.4 s is half of the data sheet's; 2e9
    bytes in 0.002 s are half of the copy's; 0.4 s of 0.5."""
    card = {"card": "NVIDIA H200", "versions": {"jax": "0.11.2", "torch": "2.11.0"}, "date": "2026-12-01"}
    time = lambda seconds: {"median": seconds, "shortest": seconds}
    scopes = {"scopes": [["backward", "Decoder/stack", 0.3], ["", "", 0.1]], "traced": 0.4}
    step, decoding = {"tokens": 1000, "flops": 989e12 * 0.2}, {"tokens": 1, "bytes_needed": 2e9}
    rows = [
        {"check": "rates", "name": "matmul bfloat16", "amount": 1e12, **time(0.001)},
        {"check": "rates", "name": "copy", "amount": 4e9, **time(0.002)},
        {"check": "kernels", "name": "packed attention, cudnn", "failed": "ValueError: no cuDNN"},
        {
            "check": "kernels",
            "name": "attention, blockwise",
            "errors": [0.1, 0.002],
            "verdict": "differs",
            **time(0.01),
        },
        {"check": "step", "name": "zoo", "rival": "torch", "peak": 33.2e9, **step, **scopes, **time(0.4)},
        {"check": "step/torch", "name": "torch", **step, **time(0.5)},
        {"check": "decoding", "name": "zoo, batch 1", **decoding, **time(0.004)},
        {"check": "recurrences/fla", "name": "", "failed": "missing: fla"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(card | row) + "\n" for row in rows))
    on_gpu.main(page=tmp_path)
    text = capsys.readouterr().out
    assert "### NVIDIA H200\n\nMeasured on 2026-12-01; jax 0.11.2, torch 2.11.0.\n" in text
    assert "| matmul bfloat16 | 1.00 ms | 1.00 ms | 1,000.00 T/s |" in text
    assert "| attention, blockwise | 10.0 ms | 10.0 ms | 1e-01 | differs |" in text
    assert "- packed attention, cudnn: ValueError: no cuDNN" in text
    assert "| zoo | 0.400 s | 0.400 s | 2,500 | 50% | 33.2 GB | 0.80 |" in text
    assert "| torch | 0.500 s | 0.500 s | 2,000 | 40% | – | – |" in text
    assert "| backward | Decoder/stack | 0.300 s | 75% |" in text
    assert "| zoo, batch 1 | 4.00 ms | 4.00 ms | 250 | 25% |" in text
    missing = text.partition("Not run yet:")[2]
    assert "- `recurrences/fla`: missing: fla" in missing and "- `first`\n" in missing and "- `kernels`: 1" in missing
    assert format_page([]) == ""


def test_page_names_every_check():
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    table = text.partition("## What has not run yet")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"`([a-z0-9]+(?:/[a-z]+)?)`", table)) == sorted(check.name for check in CHECKS)
