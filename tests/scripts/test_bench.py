import dataclasses
import json
from functools import partial

import equinox as eqx
import jax
import pytest

import zoo
from scripts import bench
from scripts.benchmarks import adapted, data, entrants, large, long_context, measure, ours, recurrences, starts, table
from scripts.benchmarks.measure import Timing
from zoo.layers import LinearAttention
from zoo.text.tasks.docstrings import read_docstrings

TINY = ours.Sizes(vocab=32, embed=16, layers=2, heads=2, mlp=16, batch=2, seq=8)


def test_contest_runs_entrants_in_turn():
    order = []
    timings = measure.contest({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3)
    assert "".join(order) == "aabb" + "bbaa" + "aabb"
    assert timings["a"].rounds == 3 and timings["a"].shortest <= timings["a"].low <= timings["a"].median


def test_timing_of_seconds():
    found = Timing.of([4.0, 1.0, 2.0, 3.0, 5.0])
    assert (found.low, found.median, found.high, found.shortest, found.rounds) == (2.0, 3.0, 4.0, 1.0, 5)


def test_ratio_is_the_median_of_paired_rounds():
    ours, rival = Timing.of([1.0, 4.0, 3.0]), Timing.of([2.0, 4.0, 30.0])
    assert ours.relative_to(rival) == 0.5


def test_contest_calls_long_entrants_once_a_round(monkeypatch):
    order, now = [], iter(range(0, 100, 5))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: float(next(now)))
    measure.contest({"a": lambda: order.append("a")}, rounds=3)
    assert len(order) == 1 + 3


def test_model_flops_of_a_step():
    """By hand, for one token: 6 FLOPs a parameter of the matrices, and attention's two products of a causal half."""
    parameters = 2 * (4 * 16 * 16 + 3 * 16 * 16) + 32 * 16
    attended = 2 * 2 * (8 / 2) * 16 * 2 * 3  # layers, products, keys on average, width, multiply-add, thrice
    assert pytest.approx(16 * (6 * parameters + attended)) == TINY.model_flops


def test_model_flops_of_a_mixture_count_active_experts():
    dense, mixture = ours.Sizes(), ours.MIXTURE
    routers = 8 * 256 * 8
    assert mixture.model_flops == dense.model_flops + 6 * 8 * 256 * routers
    shapes = eqx.filter_eval_shape(mixture.make, jax.random.key(0))
    assert zoo.models.count_active_parameters(shapes) == ours.count(dense) + routers


@pytest.mark.slow
def test_grouped_products_have_equal_rows(monkeypatch):
    monkeypatch.setattr(ours.GroupedMatmul, "ROWS", 64)
    runs, facts = entrants.grouped_products()
    assert {row["tokens"] for row in facts.values()} == {64}
    for name, run in runs.items():
        sizes = run.arguments[2]
        assert sizes.sum() == 64 and (len(sizes) == 8) == ("64 experts" not in name)
        if "gradient" not in name:
            run()


@pytest.mark.slow
def test_bench_runs_and_writes_its_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ours, "Sizes", lambda: TINY)
    monkeypatch.setattr(entrants, "NEW_TOKENS", 4)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.START}\nold\n{table.END}\nafter\n")
    monkeypatch.setattr(ours, "MIXTURE", dataclasses.replace(TINY, experts=4))
    options = {"dtypes": ("float32",), "remat": ("attention+mlp_hidden",), "rounds": 2}
    bench.main(parts=("step", "decode", "mixture"), **options, out=tmp_path / "b.json", page=page)
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    policy = "float32, remat=attention+mlp_hidden"
    both = [f"zoo mixture, {policy}", f"zoo dense, {policy}"]
    assert [row["name"] for row in rows] == [f"zoo, {policy}", "zoo, batch 1", "zoo, batch 8", *both]
    step, decode, *_ = rows
    assert step["flops"] == TINY.model_flops and step["executed_flops"] > 0 and step["tokens"] == 16
    assert 0 < step["share"] < 1 and decode["tokens_per_second"] == pytest.approx(4 / decode["median"])
    text = page.read_text()
    assert text.startswith(f"before\n{table.START}") and text.endswith(f"{table.END}\nafter\n") and "old" not in text
    assert "| zoo, batch 8 |" in text and "GFLOP/s in float32" in capsys.readouterr().out + text


def test_bench_policies_are_read_before_anything_runs(tmp_path):
    with pytest.raises(ValueError, match="--remat attenton: .*attention.* joined by a plus; or none, elementwise"):
        bench.main(parts=("step",), remat=("none", "attenton"), out=tmp_path / "b.json")


@pytest.mark.slow
def test_bench_adapters_hold_no_gradient_of_the_base(tmp_path, monkeypatch):
    monkeypatch.setattr(ours, "Sizes", lambda: TINY)
    kinds = {kind: adapted.KINDS[kind] for kind in ("full", "LoRA", "QLoRA, int8")}  # NF4 takes blocks of 64
    monkeypatch.setattr(adapted, "KINDS", kinds)
    bench.main(parts=("adapters",), rounds=1, dtypes=("float32",), remat=("elementwise",), out=tmp_path / "b.json")
    full, lora, qlora = json.loads((tmp_path / "b.json").read_text())["rows"]
    ranks, matrices = adapted.RANK * 2 * (4 * (16 + 16) + 3 * (16 + 16)), 2 * 7 * 16 * 16
    assert full["bytes_learning"] == 3 * full["bytes_parameters"] + 4  # gradients, two moments, a count
    assert lora["bytes_learning"] == qlora["bytes_learning"] == 3 * 4 * ranks + 4
    assert lora["bytes_parameters"] - qlora["bytes_parameters"] == 3 * matrices - 4 * (matrices // 16)  # a scale a row


def test_write_keeps_the_tables_of_other_processors(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.START}\n\nof old\n{table.END}\nafter\n")

    def measured(processor, median, **row):
        machine = {"processor": processor, "cores": "2", "python": "3", "jax": "0", "commit": "c"}
        times = {"median": median, "low": 1.0, "high": 2.0, "shortest": 1.0}
        rows = [{"part": "step", "name": "zoo", **times, "tokens_per_second": 7.0, **row}]
        return {"machine": machine, "versions": {}, "date": "today", "rows": rows}

    for processor, median in (("Xeon", 3.0), ("EPYC", 1.5), ("Xeon", 4.0)):
        table.write(page, measured(processor, median, ratio=0.25), ["--parts", "step"])
    text = page.read_text()
    assert (
        text.index("### EPYC, 2 cores\n")
        < text.index("1.50 s")
        < text.index("### Xeon, 2 cores\n")
        < text.index("4.00")
    )
    assert text.count("###") == 2 and "3.00 s" not in text and "of old" not in text and text.endswith("\nafter\n")
    assert f"| tokens/s | {table.RATIO} |" in text and text.count("| 7 | 0.25 |") == 2


@pytest.mark.slow
def test_bench_long_contexts(monkeypatch):
    """By hand: of 64 tokens a head's products of queries and keys, and of weights and values, the causal half."""
    monkeypatch.setattr(ours, "Sizes", lambda: TINY)
    monkeypatch.setattr(long_context, "Sizes", lambda: TINY)
    runs, facts = long_context.attentions("none", 64)
    assert [row["flops"] for row in facts.values()] == [2 * 2 * 64 * 64 / 2 * 4 * 64, 7 * 2 * 64 * 64 / 2 * 4 * 64]
    for run in runs.values():
        run()
    (prefill,), (row,) = (list(part.values()) for part in long_context.prefills("none", 12))
    prefill()
    assert row["flops"] == 2 * 12 * 2 * 16 * (4 * 16 + 3 * 16) + 2 * 12 * 12 * 2 * 16
    (step,), (row,) = (list(part.values()) for part in long_context.steps("none", 16, "full"))
    step()
    assert row["tokens"] == 16 and row["executed_flops"] > 0


@pytest.mark.slow
def test_starts_of_commands():
    timings = starts.measure_starts(1)
    assert len(timings) == 4 and all(timing.median > 0 for timing in timings.values())


def test_bench_refuses_a_page_without_markers_early(tmp_path):
    (tmp_path / "page.md").write_text("nothing")
    with pytest.raises(SystemExit, match="has no place for the table"):
        bench.main(parts=("step",), page=tmp_path / "page.md")


@pytest.mark.slow
def test_bench_large_model():
    assert 1.0e9 < ours.count(ours.ONE_BILLION) < 1.2e9
    found = {"rows": []}
    large.run(found, bench.report, TINY)
    names = [row["name"] for row in found["rows"]]
    assert names == [f"zoo, 8 x 8, remat={policy}" for policy in large.POLICIES] + ["zoo, batch 1", "zoo, batch 8"]
    assert all(0 < row["utilization"] < 1 for row in found["rows"][:4]) and not found["large_peak"]["listed"]


def test_peak_of_devices():
    assert measure.peak_of("NVIDIA H200") == 989e12 and measure.peak_of("cpu") is None


def test_draw_fits_every_recurrence():
    for form, inputs in recurrences.OPERATIONS.values():
        for dtype in ("float32", "bfloat16"):
            draw = partial(recurrences.Draw, 8, batch=3, dtype=dtype)
            run = lambda form=form, inputs=inputs, draw=draw: jax.vjp(lambda *x: form(*x)[0], *inputs(draw()))[0]
            output = jax.eval_shape(run)
            assert output.shape in ((3, 8, *recurrences.HEADS), (3, 8, recurrences.CHANNELS))
            assert output.dtype == dtype or output.shape[-1] == recurrences.CHANNELS


def test_bench_single_recurrence(tmp_path, monkeypatch):
    """By hand: queries, keys, values and outputs, and a state; the four products of one chunk, and the two that sum log
    decays from its start and to its end."""
    monkeypatch.setattr(recurrences, "HEADS", (2, 8))
    monkeypatch.setattr(recurrences, "CHANNELS", 16)
    page = tmp_path / "page.md"
    page.write_text(f"{table.START}\nkept\n{table.END}\n{table.start('alone')}\nold\n{table.END}\nafter\n")
    chosen = {"operations": ("linear_attention", "hgrn"), "lengths": (64,)}
    bench.main(parts=("recurrences",), **chosen, rounds=2, out=tmp_path / "b.json", page=page, place="alone")
    rows = {row["name"]: row for row in json.loads((tmp_path / "b.json").read_text())["rows"]}
    row = rows["linear_attention, 64 tokens"]
    assert row["bytes_passed"] == 4 * (4 * 64 * 2 * 8 + 2 * 8 * 8) and row["tokens"] == 64
    assert row["flops"] == 2 * 2 * (2 * 64 * 64 * 8 + 2 * 64 * 8 * 8 + 2 * 64 * 64)
    assert 0 < row["share"] < 1 and 0 < row["copy_share"] < 1
    assert "flops" not in rows["hgrn, 64 tokens"] and "hgrn, 64 tokens, with gradient" in rows
    text = page.read_text()
    assert "kept" in text and "old" not in text and text.endswith(f"{table.END}\nafter\n")
    assert text.index("kept") < text.index("| hgrn, 64 tokens |")


def test_bench_refuses_an_unknown_recurrence():
    with pytest.raises(SystemExit, match="no operation 'attention'"):
        recurrences.single_operations(("attention",), (8,))


@pytest.mark.slow
def test_bench_recurrent_models(monkeypatch):
    monkeypatch.setattr(recurrences, "KINDS", {"small": lambda width: partial(LinearAttention, heads=2)})
    sizes = recurrences.Recurrent(vocab=32, embed=16, layers=1, batch=2, seq=8, kind="small")
    monkeypatch.setattr(recurrences, "Recurrent", lambda kind: dataclasses.replace(sizes, kind=kind))
    runs, facts = recurrences.steps("none", ("none",), ("plain",))
    name = "zoo small, remat=none, loop=plain"
    runs[name]()
    assert facts[name]["tokens"] == 16 and facts[name]["executed_flops"] > 0
    run = recurrences.Continuing(sizes, 3)
    run()
    assert run.bytes_remembered() == 4 * 2 * 8 * (8 + 1)  # a column more, of the sums of weights


@pytest.mark.slow
def test_bench_data(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "FILE_BYTES", 20_000)
    monkeypatch.setattr(data, "WORKERS", (1,))
    monkeypatch.setattr(data, "STEPS", 2)
    monkeypatch.setattr(data, "PLANNED", 10_000)
    chats = read_docstrings()[:100]
    monkeypatch.setattr(data, "read_docstrings", lambda: chats)
    page = tmp_path / "page.md"
    page.write_text(f"{table.start('data')}\nold\n{table.END}\n")
    bench.main(parts=("data",), rounds=1, out=tmp_path / "b.json", page=page, place="data")
    rows = {row["name"]: row for row in json.loads((tmp_path / "b.json").read_text())["rows"]}
    ours, alone = rows["load_records, chats, 1 worker"], rows["encode_batch_fast, chats, 1 core"]
    assert ours["rival"] == "encode_batch_fast, chats, 1 core" and ours["ratio"] > 1
    assert ours["tokens"] == alone["tokens"] > 4000 and 20_000 <= ours["bytes_read"] < 21_000
    assert rows["PackedRows"]["tokens"] == 8 * 2048 * 2
    text = page.read_text()
    assert "old" not in text and f"| MB/s | {table.RATIO} |" in text and "| 10,000 texts into rows of 2,048 |" in text
