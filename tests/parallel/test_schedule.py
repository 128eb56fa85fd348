"""Pipeline schedules: tables against their dependencies, and numbers against the formulas."""

import itertools

import numpy as np
import pytest

from zoo.parallel.schedule import Phase, Schedule, Timetable

SIZES = [(p, m, v) for p in (1, 2, 3, 4, 8) for m in (1, 5, 8, 24) for v in (1, 2, 3, 4)]
TABLES = [
    *(("1f1b", p, m, v) for p, m, v in SIZES if v == 1 or m % p == 0),
    *(("gpipe", p, m, 1) for p, m, v in SIZES if v == 1),
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
    return set(itertools.product(range(table.stages), range(table.rounds), range(table.microbatches)))


@each_table
def test_tables_do_each_micro_batch_once_in_order(name, p, m, rounds):
    table = make(name, p, m, rounds)
    forward, backward = find_ticks(table.forward), find_ticks(table.backward)
    keys = list_keys(table)
    assert set(forward) == set(backward) == keys
    at = {(v * p + s, i): (s, v, i) for s, v, i in keys}
    last = p * rounds - 1
    for (chunk, i), key in at.items():
        if chunk > 0:  # messages are taken in the tick after the one in which they were sent: exactly, not at least
            assert forward[key][0] == forward[at[chunk - 1, i]][0] + 1
        if chunk < last:
            assert backward[key][0] == backward[at[chunk + 1, i]][0] + 1
        else:
            assert backward[key][0] == forward[key][0] or (name == "gpipe" and backward[key][0] > forward[key][0])


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
        for s in range(p):
            i, v, slot = table.backward[tick, s].tolist()
            if i >= 0:
                assert slots.pop((s, slot)) == (i, v)
    assert not slots and used == table.num_slots


@pytest.mark.parametrize(("p", "m", "rounds", "slots"), [(4, 16, 1, 7), (4, 16, 2, 11), (8, 32, 1, 15), (8, 32, 4, 39)])
def test_slots_do_not_grow_with_micro_batches(p, m, rounds, slots):
    assert make("1f1b", p, m, rounds).num_slots == make("1f1b", p, 4 * m, rounds).num_slots == slots
    assert slots == (rounds + 1) * p - 1
    assert make("1f1b", p, p, rounds).num_slots <= p * rounds  # few micro-batches
    assert make("gpipe", p, m).num_slots == m


@each_table
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
    """8 stages, 32 micro-batches; forward 1, backward 2."""
    assert make("gpipe", 8, 32).cost() == make("1f1b", 8, 32).cost() == 117
    assert make("1f1b", 8, 32, 2).cost() == 106.5
    assert make("1f1b", 8, 32, 4).cost() == 101.25
    for f, b in ((1, 2), (1, 3), (2, 5)):
        for p, m in ((2, 8), (4, 8), (8, 32)):
            cost = {"forward": f, "backward": b}
            assert make("gpipe", p, m).cost(**cost) == (m + p - 1) * (f + b)
            assert make("1f1b", p, m, 2).cost(**cost) == pytest.approx((m + (p - 1) / 2) * (f + b))


@each_table
def test_work_is_done_in_the_order_of_the_ticks(name, p, m, rounds):
    """A stage waits for its inputs, and does one thing at a time; the last work ends with the last tick."""
    table = make(name, p, m, rounds)
    work = table.list_work()
    assert sorted(x[:4] for x in work) == sorted(
        (kind, s, i, v) for kind in ("forward", "backward") for s, v, i in list_keys(table)
    )
    starts = {(x.kind, x.round * p + x.stage, x.microbatch): x.start for x in work}
    ends = {(x.kind, x.round * p + x.stage, x.microbatch): x.start + x.duration for x in work}
    last = p * rounds - 1
    for (kind, chunk, i), start in starts.items():
        if kind == "backward":
            assert start >= ends[(kind, chunk + 1, i) if chunk < last else ("forward", chunk, i)] - 1e-9
        elif chunk:
            assert start >= ends[kind, chunk - 1, i] - 1e-9
    for stage in range(p):
        spans = sorted((x.start, x.start + x.duration) for x in work if x.stage == stage)
        assert all(end <= begin + 1e-9 for (_, end), (begin, _) in itertools.pairwise(spans))
        assert sum(x.duration for x in work if x.stage == stage) == pytest.approx(3 * m)
    assert max(ends.values()) == pytest.approx(table.cost())


def test_one_stage_is_gradient_accumulation():
    table = make("1f1b", 1, 4)
    assert table.phases == [Phase(0, 4, True, True)] and table.num_slots == 1 and table.bubble == 0
    assert table.forward[:, 0].tolist() == table.backward[:, 0].tolist() == [[i, 0, 0] for i in range(4)]


def test_tables_are_constants():
    with pytest.raises(ValueError, match="read-only"):
        make("1f1b", 2, 4).forward[0] = 0
    assert hash(Schedule()) == hash(Schedule("1f1b", keep="inputs")) and Schedule() != Schedule(keep="residuals")


def test_schedules_refuse_what_they_cannot_do():
    with pytest.raises(ValueError, match="name='zero-bubble': a schedule's name is one of '1f1b', 'gpipe'$"):
        Schedule("zero-bubble")
    with pytest.raises(ValueError, match="keep='outputs': a schedule's keep is one of 'inputs', 'residuals'"):
        Schedule(keep="outputs")
    for sizes, message in {
        (4, 6, 2): "microbatches=6: .* let microbatches be a multiple of 4, or rounds 1",
        (0, 4, 1): "stages=0: a pipeline has at least 1",
        (2, -1, 0): "microbatches=-1, rounds=0: a pipeline",
    }.items():
        with pytest.raises(ValueError, match=message):
            make("1f1b", *sizes)
    with pytest.raises(ValueError, match="rounds=2: 'gpipe' has 1 round, take '1f1b'"):
        make("gpipe", 4, 8, 2)
