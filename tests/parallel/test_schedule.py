"""Pipeline schedules: tables against their dependencies, and numbers against the formulas."""

import itertools

import numpy as np
import pytest

from zoo.parallel.schedule import Phase, Schedule, Timetable

SIZES = [(p, m, v) for p in (1, 2, 3, 4, 8) for m in (1, 5, 8, 24) for v in (1, 2, 3, 4)]
TABLES = [
    *(("1f1b", p, m, v) for p, m, v in SIZES if v == 1 or m % p == 0),
    *((name, p, m, 1) for name in ("gpipe", "zero-bubble") for p, m, v in SIZES if v == 1),
    *(("dualpipe", p, m, 1) for p in (2, 4, 6, 8) for m in (2 * p, 2 * p + 2, 4 * p)),
]
each_table = pytest.mark.parametrize(("name", "p", "m", "rounds"), TABLES)


def make(name: str, p: int, m: int, rounds: int = 1) -> Timetable:
    return Schedule(name).table(stages=p, microbatches=m, rounds=rounds)


def find_ticks(array: np.ndarray) -> dict[tuple[int, int, int], tuple[int, int]]:
    """Tick and slot of each (stage, round, micro-batch), each of which is there once."""
    found = {}
    for t, s in np.argwhere(array[..., 0] >= 0).tolist():
        i, v, slot = array[t, s].tolist()
        assert v >= 0 and slot >= 0 and (s, v, i) not in found
        found[s, v, i] = t, slot
    assert (array[array[..., 0] < 0] == -1).all()
    return found


def list_keys(table: Timetable) -> set[tuple[int, int, int]]:
    p, m = table.stages, table.microbatches
    if table.name == "dualpipe":
        return {(s, int(i >= m // 2), i) for s in range(p) for i in range(m)}
    return set(itertools.product(range(p), range(table.rounds), range(m)))


@each_table
def test_tables_do_each_micro_batch_once_in_order(name, p, m, rounds):
    table = make(name, p, m, rounds)
    forward, backward, weights = (find_ticks(x) for x in (table.forward, table.backward, table.weights))
    keys = list_keys(table)
    assert set(forward) == set(backward) == keys
    assert set(weights) == (keys if name in ("zero-bubble", "dualpipe") else set())
    at = {(table.find_chunk(s, v), i): (s, v, i) for s, v, i in keys}
    last = max(chunk for chunk, _ in at)
    for (chunk, i), key in at.items():
        if chunk > 0:  # messages are taken in the tick after the one in which they were sent: exactly, not at least
            assert forward[key][0] == forward[at[chunk - 1, i]][0] + 1
        if chunk < last:
            assert backward[key][0] == backward[at[chunk + 1, i]][0] + 1
        else:
            assert backward[key][0] == forward[key][0] or (name == "gpipe" and backward[key][0] > forward[key][0])
        assert weights.get(key, backward[key])[0] >= backward[key][0] >= forward[key][0]


@each_table
def test_tables_send_only_to_neighbors(name, p, m, rounds):
    """The chunk after that of stage s is on stage s + 1, or after the last stage on the first one."""
    table = make(name, p, m, rounds)
    chunks = {table.find_chunk(s, v): s for s, v, _ in list_keys(table) if name != "dualpipe" or v == 0}
    assert [chunks[c] for c in range(p * rounds)] == [c % p for c in range(p * rounds)]


@each_table
def test_slots_are_not_overwritten_while_in_use(name, p, m, rounds):
    table = make(name, p, m, rounds)
    slots: dict[tuple[int, int], tuple[int, int]] = {}
    used = 0
    for tick in range(len(table.forward)):
        for s in range(p):
            i, v, slot = table.forward[tick, s].tolist()
            if i >= 0:
                assert (s, slot) not in slots
                slots[s, slot] = i, v
                used = max(used, slot + 1)
        for array, frees in ((table.backward, table.weights[..., 0].max() < 0), (table.weights, True)):
            for s in range(p):
                i, v, slot = array[tick, s].tolist()
                if i >= 0:
                    assert slots[s, slot] == (i, v)
                    if frees:
                        del slots[s, slot]
    assert not slots and used == table.num_slots


@pytest.mark.parametrize(("p", "m", "rounds", "slots"), [(4, 16, 1, 7), (4, 16, 2, 11), (8, 32, 1, 15), (8, 32, 4, 39)])
def test_slots_do_not_grow_with_micro_batches(p, m, rounds, slots):
    assert make("1f1b", p, m, rounds).num_slots == make("1f1b", p, 4 * m, rounds).num_slots == slots
    assert slots == (rounds + 1) * p - 1
    assert make("1f1b", p, p, rounds).num_slots <= p * rounds  # few micro-batches
    assert make("gpipe", p, m).num_slots == m


@pytest.mark.parametrize(("name", "p", "m", "rounds"), [table for table in TABLES if table[0] != "dualpipe"])
def test_enters_ends_and_returns(name, p, m, rounds):
    table = make(name, p, m, rounds)
    forward, backward = find_ticks(table.forward), find_ticks(table.backward)
    for ticks, times, key in (
        (table.enters, forward, (0, 0)),
        (table.ends, forward, (p - 1, rounds - 1)),
        (table.returns, backward, (0, 0)),
    ):
        assert ticks.shape == (len(table.forward),)
        found = {int(i): t for t, i in enumerate(ticks) if i >= 0}
        assert found == {i: times[(*key, i)][0] for i in range(m)}


@pytest.mark.parametrize(("p", "m", "rounds"), [(p, m, v) for p, m, v in SIZES if v == 1 or m % p == 0])
def test_phases_and_bubble_match_the_formulas(p, m, rounds):
    table = make("1f1b", p, m, rounds)
    one = p * rounds - 1
    wanted = [
        Phase(0, one, True, False),
        Phase(one, m * rounds + p - 1, True, True),
        Phase(m * rounds + p - 1, m * rounds + p - 1 + one, False, True),
    ]
    assert table.phases == [phase for phase in wanted if phase.begin < phase.end]
    # Idle slots, counted in the table, among those of ticks in which some stage works.
    for array in (table.forward, table.backward):
        busy = array[..., 0] >= 0
        assert (~busy[busy.any(1)]).mean() == pytest.approx((p - 1) / (m * rounds + p - 1))
    assert table.bubble == pytest.approx((p - 1) / (m * rounds + p - 1))
    ticks = m + p - 1
    assert make("gpipe", p, m).phases == [Phase(0, ticks, True, False), Phase(ticks, 2 * ticks, False, True)]
    assert make("gpipe", p, m).bubble == pytest.approx((p - 1) / (m + p - 1))


def test_costs_in_lockstep():
    """8 stages, 32 micro-batches; forward 1, gradients of inputs 1, of parameters 1."""
    assert make("gpipe", 8, 32).cost() == make("1f1b", 8, 32).cost() == 117
    assert make("1f1b", 8, 32, 2).cost() == 106.5
    assert make("1f1b", 8, 32, 4).cost() == 101.25
    assert make("zero-bubble", 8, 32).cost() == 110
    assert make("dualpipe", 8, 32).cost() == 108
    for f, b, w in ((1, 2, 1), (1, 3, 1.5), (2, 5, 2)):
        for p, m in ((2, 8), (4, 8), (8, 32)):
            cost = {"forward": f, "backward": b, "weights": w}
            assert make("zero-bubble", p, m).cost(**cost) == (m + p - 1) * (f + b - w) + m * w
            assert make("dualpipe", p, m).cost(**cost) == (m + p - 2) * (f + b - w) + m * w
            assert make("1f1b", p, m, 2).cost(**cost) == pytest.approx((m + (p - 1) / 2) * (f + b))


@each_table
def test_stages_at_their_own_pace_wait_for_inputs(name, p, m, rounds):
    table = make(name, p, m, rounds)
    work = table.list_work(lockstep=False)
    assert sorted(x[:4] for x in work if x.kind != "weights") == sorted(
        (kind, s, i, v) for kind in ("forward", "backward") for s, v, i in list_keys(table)
    )
    ends, starts = {}, {}
    for x in work:
        key = x.kind, table.find_chunk(x.stage, x.round), x.microbatch
        ends[key], starts[key] = x.start + x.duration, x.start
    last = max(chunk for _, chunk, _ in ends)
    for (kind, chunk, i), start in starts.items():
        if kind == "forward" and chunk:
            assert start >= ends[kind, chunk - 1, i] - 1e-9
        if kind == "backward":
            assert start >= ends[(kind, chunk + 1, i) if chunk < last else ("forward", chunk, i)] - 1e-9
        if kind == "weights":
            assert start >= ends["backward", chunk, i] - 1e-9
    for stage in range(p):
        spans = sorted((x.start, x.start + x.duration) for x in work if x.stage == stage)
        assert all(end <= begin + 1e-9 for (_, end), (begin, _) in itertools.pairwise(spans))
        assert sum(x.duration for x in work if x.stage == stage) == pytest.approx(3 * m)


def test_published_bubbles_at_their_own_pace():
    """(p - 1)(F + B - W) of ZB-H1, (p / 2 - 1)(F&B + B - 3 W) of DualPipe; 1F1B loses nothing in lockstep."""

    def find_span(name, p, m, rounds=1):
        return max(x.start + x.duration for x in make(name, p, m, rounds).list_work(lockstep=False))

    for p, m in ((2, 4), (4, 8), (6, 20), (8, 32)):
        assert find_span("zero-bubble", p, m) == 3 * m + (p - 1) * 1
        assert find_span("dualpipe", p, m) == 3 * m + (p // 2 - 1) * 2
        assert find_span("gpipe", p, m) == find_span("1f1b", p, m) == make("1f1b", p, m).cost()
    assert find_span("1f1b", 8, 32, 4) == make("1f1b", 8, 32, 4).cost()


def test_one_stage_is_gradient_accumulation():
    table = make("1f1b", 1, 4)
    assert table.phases == [Phase(0, 4, True, True)] and table.num_slots == 1 and table.bubble == 0
    assert table.forward[:, 0].tolist() == table.backward[:, 0].tolist() == [[i, 0, 0] for i in range(4)]


def test_tables_are_constants():
    with pytest.raises(ValueError, match="read-only"):
        make("1f1b", 2, 4).forward[0] = 0
    assert hash(Schedule()) == hash(Schedule("1f1b", keep="inputs")) and Schedule() != Schedule(keep="residuals")


def test_schedules_refuse_what_they_cannot_do():
    with pytest.raises(ValueError, match="name='zb': a schedule's name is one of 'gpipe', '1f1b', 'zero-bubble', 'd"):
        Schedule("zb")
    with pytest.raises(ValueError, match="keep='outputs': a schedule's keep is one of 'inputs', 'residuals'"):
        Schedule(keep="outputs")
    for sizes, message in {
        (4, 6, 2): "microbatches=6: .* let microbatches be a multiple of 4, or rounds 1",
        (0, 4, 1): "stages=0: a pipeline has at least 1",
        (2, -1, 0): "microbatches=-1, rounds=0: a pipeline",
    }.items():
        with pytest.raises(ValueError, match=message):
            make("1f1b", *sizes)
    for name in ("gpipe", "zero-bubble", "dualpipe"):
        with pytest.raises(ValueError, match=f"rounds=2: '{name}' has 1 round, take '1f1b'"):
            make(name, 4, 8, 2)
    for p, m in ((3, 8), (4, 9), (4, 6)):
        with pytest.raises(ValueError, match=f"stages={p}, microbatches={m}: 'dualpipe' takes an even number"):
            make("dualpipe", p, m)
    with pytest.raises(NotImplementedError, match="'dualpipe': two micro-batches enter in one tick"):
        _ = make("dualpipe", 4, 8).enters


def test_drawn_schedules_do_not_run():
    for name in ("gpipe", "1f1b"):
        assert Schedule(name).check_runs() is None
    with pytest.raises(NotImplementedError, match="'zero-bubble' is drawn .* 110 units of time, and .* takes 117"):
        Schedule("zero-bubble").check_runs()
    with pytest.raises(NotImplementedError, match=r"108 units of time, twice the parameters.*Take Schedule\('1f1b'\)"):
        Schedule("dualpipe").check_runs()
