"""Records that several processes load are the same global batches, also if another number of processes goes on."""

import json
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.global_batches import are_same, read_all
from zoo import train
from zoo.text import ChatTemplate
from zoo.text.chat.template import PLAIN_TEMPLATE
from zoo.text.records.records import Records
from zoo.text.tokenizers import ByteTokenizer

TEMPLATE = ChatTemplate(PLAIN_TEMPLATE, {"eos_token": "\0"})
BATCH = 6
STEPS = 16
PHASES = ((0, (3.0, 1.0)), (4, (0.0, 1.0)), (7, (1.0, 2.0)))
"""Steps at which the weights of the two files change."""


@dataclass(repr=False)  # hypothesis prints what a test is given
class Loaded:
    """The mixture, as each of three processes has loaded it, and the rows that one process reads."""

    copies: list[Records]
    rows: list[dict]

    def read(self, *, processes, start, steps):
        """Return the rows of global batches, of which each process reads its part."""
        parts = [(index, processes) for index in range(processes)]
        readers = [self.copies[part[0]].train.batches(BATCH, seed=5, process=part) for part in parts]
        return read_all(readers, start, steps)


def make_chat(number, rng):
    """A chat of one or two answers, of 0 to 60 characters more or less."""
    messages = []
    for turn in range(rng.choice([1, 1, 2])):
        question = f"{number}.{turn} {'why ' * rng.randrange(8)}?"
        answer = f"{'since ' * rng.randrange(6)}{number}"
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The mixture, once for each of three processes that share no disk."""
    rng = random.Random(0)
    folder = tmp_path_factory.mktemp("records")
    paths = []
    for name, count in (("sums", 50), ("reasons", 80)):
        paths.append(folder / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(make_chat(number, rng)) + "\n" for number in range(count)))
    phases = [(step, {str(path): weight for path, weight in zip(paths, w, strict=True)}) for step, w in PHASES]
    options = {"tokenizer": ByteTokenizer(), "template": TEMPLATE, "seq_len": 160, "processes": 1}
    copies = [train.load_records(phases, cache=folder / f"cache-{number}", **options) for number in range(3)]
    found = Loaded(copies, [])
    found.rows = found.read(processes=1, start=0, steps=STEPS)
    return found


def test_each_part_of_the_mixture_is_passed_more_than_once(loaded):
    data, *others = loaded.copies
    assert {other.digest for other in others} == {data.digest}
    read = data.train.rows.count_rows(BATCH * STEPS, BATCH)
    assert all(count > len(part.train.rows) for count, part in zip(read.values(), data.parts.values(), strict=True))
    assert max(row["segment_ids"].max() for row in loaded.rows) > 2
    texts = {row["tokens"].tobytes() for row in loaded.rows}
    assert len(texts) == sum(len(part.train.rows) for part in data.parts.values())


@given(st.integers(0, BATCH * (STEPS - 4)), st.sampled_from([1, 2, 3]), st.integers(1, 2), st.sampled_from([1, 2, 3]))
@settings(max_examples=15, deadline=None)
def test_batches_go_on_after_any_stop_on_any_number_of_processes(loaded, start, before, steps, after):
    """From a row, `before` processes read some steps and stop, and `after` processes go on from the state."""
    found = loaded.read(processes=before, start=start, steps=steps)
    found += loaded.read(processes=after, start=start + BATCH * steps, steps=2)
    assert are_same(found, loaded.rows[start : start + BATCH * (steps + 2)])


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_held_out_rows_are_read_once_by_all_processes(loaded, processes):
    copies = loaded.copies
    orders = [copies[i].validation.ordered(BATCH, process=(i, processes)) for i in range(processes)]
    found = [np.concatenate([shard["targets"] for shard in shards]) for shards in zip(*orders, strict=True)]
    held_out = [part.validation.rows for part in copies[0].parts.values()]
    rows = [part[number]["targets"] for part in held_out for number in range(len(part))]
    padding = np.full((-len(rows) % BATCH, 160), -1)
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate([rows, padding]))
