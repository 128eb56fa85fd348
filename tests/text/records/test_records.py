"""Records become splits of packed rows, from a cache that depends on all that their tokens depend on."""

import dataclasses
import datetime
import json
import re

import numpy as np
import pytest

from zoo import train
from zoo.text import ChatTemplate
from zoo.text.chat.template import PLAIN_TEMPLATE
from zoo.text.tokenizers import ByteTokenizer

TEMPLATE = ChatTemplate(PLAIN_TEMPLATE, {"eos_token": "\0"})
OPTIONS = {"tokenizer": ByteTokenizer(), "template": TEMPLATE, "seq_len": 96}


def make_chats(count=100, sign="+"):
    return [
        {
            "messages": [
                {"role": "user", "content": f"{number} {sign} 1?"},
                {"role": "assistant", "content": str(number + 1 if sign == "+" else number - 1)},
            ]
        }
        for number in range(count)
    ]


@pytest.fixture
def load(tmp_path):
    """Load with a cache of the test's own."""
    return lambda source, **options: train.load_records(source, cache=str(tmp_path / "cache"), **{**OPTIONS, **options})


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def list_trained(split):
    """Return the trained text of each segment of all rows."""
    found = []
    for row in (split.rows[number] for number in range(len(split.rows))):
        for segment in range(1, row["segment_ids"].max() + 1):
            chosen = (row["segment_ids"] == segment) & (row["weights"] > 0)
            found.append(row["targets"][chosen].astype(np.uint8).tobytes().decode())
    return sorted(found)


def test_chats_are_split_packed_and_counted(load):
    chats = make_chats()
    data = load(chats)
    assert data.kind == "chat" and data.counts["records"] == 100
    assert 0 < data.counts["validation"] < 20 and data.counts["train"] + data.counts["validation"] == 100
    assert list_trained(data.train) + list_trained(data.validation) != []
    answers = sorted(chat["messages"][1]["content"] + "\0" for chat in chats)
    assert sorted(list_trained(data.train) + list_trained(data.validation)) == answers
    assert data.counts["trained"] == sum(map(len, list_trained(data.train)))
    assert f"100 chat records, {data.counts['train']} texts for training" in str(data)
    assert "answers found by marks" in str(data)
    prompts = load([{"prompt": "a"}, {"prompt": "b"}])
    assert str(prompts) == "2 prompt records, 1 text for training, 1 held out\n2 targets in 1 row, 0 trained on"


def test_batches_and_ordered_have_every_row(load):
    data = load(make_chats())
    batches = data.train.batches(batch_size=2, seed=0)
    batch = next(batches)
    assert {name: array.shape for name, array in batch.items()}["tokens"] == (2, 96)
    assert batches.digest == data.digest and batches.counts == data.counts and batches.state == 2
    batches.close()
    ordered = list(data.validation.ordered(batch_size=4))
    trained = sum(int((batch["weights"] > 0).sum()) for batch in ordered)
    assert trained == data.validation.rows.num_trained
    assert len(list(data.train.ordered(batch_size=1, limit=3))) == 3


def test_equal_questions_are_on_one_side(load):
    chats = make_chats(40)
    data = load([chat for chat in chats for _ in range(5)], validation=0.3)
    held_out = set(list_trained(data.validation))
    assert held_out and not held_out & set(list_trained(data.train))


def test_a_file_and_the_records_in_it_are_equal(load, tmp_path):
    chats = make_chats()
    path = write_lines(tmp_path / "chats.jsonl", chats)
    for number in range(3):
        np.testing.assert_array_equal(load(path).train.rows[number]["tokens"], load(chats).train.rows[number]["tokens"])


def test_nulls_that_a_table_adds_are_left_out(load, tmp_path):
    """Tools, calls, completions and fields of prompts are the same from a table as from JSON lines."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    ipc = pytest.importorskip("pyarrow.ipc")
    written = "{% generation %}{{ message | tojson }}{% endgeneration %}"
    template = ChatTemplate("{{ tools | tojson }}{% for message in messages %}" + written + "{% endfor %}")
    for kind in ("chat", "completion", "prompts"):
        records = []
        for number, name in enumerate(["city", "to"] * 6):
            call = {"function": {"name": name, "arguments": {name: [{name: number}]}}}
            asked = [{"role": "user", "content": f"{number}?"}]
            said = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "assistant", "content": "a"}]
            tools = [{"name": name, "parameters": {"properties": {name: {"type": "string"}}}}]
            fields = {
                "chat": {"messages": [*asked, *said]},
                "completion": {"prompt": asked, "completion": said},
                "prompts": {"prompt": asked, "answer": {name: number}},
            }
            records.append({**fields[kind], "tools": tools})
        table = pyarrow.Table.from_pylist(records)
        parquet.write_table(table, tmp_path / f"{kind}.parquet")
        with ipc.new_stream(tmp_path / f"{kind}.arrow", table.schema) as writer:
            writer.write_table(table)
        lines = write_lines(tmp_path / f"{kind}.jsonl", records)
        sources = [lines, tmp_path / f"{kind}.parquet", tmp_path / f"{kind}.arrow", table.to_pylist()]
        options = {"template": template, "seq_len": 512, "validation": 0.0, "pack": False}
        expected, *found = [load(each, **options).train for each in sources]
        assert len(expected.rows) == 12
        for split in found:
            for number in range(12):
                np.testing.assert_array_equal(split.rows[number]["tokens"], expected.rows[number]["tokens"])
                if kind == "prompts":
                    assert split.read_fields(number) == expected.read_fields(number)
    call = {"function": {"name": "f", "arguments": {"city": None}}}
    spelled = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    row = load(write_lines(tmp_path / "null.jsonl", [{"messages": spelled}]), **options).train.rows[0]
    assert b'"city": null' in row["tokens"].astype(np.uint8).tobytes(), "JSON lines keep nulls"


def test_the_cache_depends_on_what_its_tokens_depend_on(load, tmp_path):
    path = write_lines(tmp_path / "chats.jsonl", make_chats())

    def count_stores():
        return len(list((tmp_path / "cache").glob("*/about.json")))

    digest = load(path).digest
    assert load(path).digest == digest and count_stores() == 1
    others = {load(path, seq_len=64).digest, load(path, pack=False).digest, load(path, validation=0.5).digest}
    assert len({digest, *others}) == 4 and count_stores() == 1, "the tokens are the same"
    other_template = ChatTemplate(PLAIN_TEMPLATE + " ", {"eos_token": "\0"})
    other_tokenizer = ByteTokenizer()
    other_tokenizer.cache_key = "another"
    load(path, template=other_template)
    load(path, tokenizer=other_tokenizer)
    load(path, train_on="last")
    load(path, variables={"enable_thinking": True})
    assert count_stores() == 5
    other_end = ByteTokenizer()
    other_end.end = 1
    load(path, tokenizer=other_end)
    assert count_stores() == 6
    content = path.read_bytes()
    path.write_bytes(content.replace(b"7", b"8", 1))
    assert load(path).digest != digest and count_stores() == 7


def test_a_template_with_a_date_keeps_the_day_that_it_is_given(load):
    dated = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}" + PLAIN_TEMPLATE, {"eos_token": "\0"})
    first = load(make_chats(30), template=dated, chat_date="2026-01-31", pack=False)
    again = load(make_chats(30), template=dated, chat_date="2026-01-31", pack=False)
    other = load(make_chats(30), template=dated, chat_date="2026-02-01", pack=False)
    assert first.digest == again.digest != other.digest
    assert first.train.rows[0]["tokens"][:10].astype(np.uint8).tobytes() == b"2026-01-31"
    assert load(make_chats(30), template=first.template, pack=False).digest == first.digest  # which has that day
    for data in (first, train.mix({"a": first, "b": first}, {"a": 0.5, "b": 0.5})):
        batches = data.train.batches(2)
        assert batches.chosen == {"chat_date": "2026-01-31"}
    today = load(make_chats(30), template=dated, pack=False).train.batches(2).chosen["chat_date"]
    assert datetime.date.today() - datetime.date.fromisoformat(today) <= datetime.timedelta(days=1)
    assert load(make_chats(30), pack=False).train.batches(2).chosen == {}
    with pytest.raises(ValueError, match="chat_date is 'today': expected a day, such as 2026-01-31"):
        load(make_chats(30), template=dated, chat_date="today")


def test_long_chats_are_dropped_and_long_texts_cut(load):
    long = make_chats(30)
    long[3]["messages"][1]["content"] = "x" * 200
    data = load(long, validation=0.0)
    assert data.counts["dropped"] == 1 and "1 dropped, longer than a row" in str(data)
    assert not any("xxx" in text for text in list_trained(data.train))
    data = load(long, validation=0.0, too_long="cut")
    assert data.counts["dropped"] == 0 and data.counts["cut"] == 1
    text = load([{"text": "ab" * 150}, {"text": "c"}], validation=0.0)
    assert text.counts["cut"] == 1 and text.counts["targets"] == 301
    pair = {"prompt": "a", "chosen": "b" * 200, "rejected": "c"}
    with pytest.raises(ValueError, match="too_long='cut' would cut a preference record"):
        load([pair] * 3, too_long="cut")


def test_pairs_and_labels_are_in_the_rows(load):
    pairs = [{"prompt": f"{number}?", "chosen": "yes", "rejected": "no"} for number in range(9)]
    data = load(pairs, validation=0.0)
    row = data.train.rows[0]
    for pair in range(row["segment_ids"].max() // 2):
        sides = [row["targets"][(row["segment_ids"] == 2 * pair + side) & (row["weights"] > 0)] for side in (1, 2)]
        assert [side.astype(np.uint8).tobytes() for side in sides] == [b"yes\0", b"no\0"]
    labeled = [{"prompt": f"{n}?", "completion": "yes", "label": n % 3 == 0} for n in range(9)]
    row = load(labeled, validation=0.0, pack=False).train.rows[3]
    assert row["labels"].tolist() == [1.0]


def test_whole_texts_are_scored_at_their_last_token(load):
    """Classes of texts without a prompt are held out by the text."""
    labeled = [{"prompt": "", "completion": f"text {n}", "label": n % 3} for n in range(40)]
    data = load(labeled, whole=True, validation=0.2)
    assert 0 < data.counts["validation"] < 20
    assert f"{data.counts['train']} texts in {len(data.train.rows)} rows, scored at the last token of each" in str(data)
    assert data.digest != load(labeled, validation=0.2).digest
    for row in (data.train.rows[number] for number in range(len(data.train.rows))):
        ends = np.flatnonzero(row["weights"])
        assert row["tokens"][ends].tolist() == [0] * len(ends) and (row["targets"][ends] == -1).all()
        for segment, label in enumerate(row["labels"][: len(ends)], start=1):
            text = row["tokens"][row["segment_ids"] == segment].astype(np.uint8).tobytes()
            assert text.startswith(b"\0text ") and int(text[6:-1]) % 3 == label
    long = [{"messages": [{"role": "user", "content": "a" * 99}, {"role": "assistant", "content": "b"}]}]
    assert load([*make_chats(3), *long], whole=True).counts["dropped"] == 1


def test_prompts_keep_their_fields(load):
    data = load([{"prompt": f"{n} + 1 =", "answer": n + 1} for n in range(9)], validation=0.0)
    assert data.kind == "prompts" and data.counts["trained"] == 0
    row = data.train.rows[3]
    assert row["tokens"][row["mask"]].astype(np.uint8).tobytes() == b"\0003 + 1 =" and row["mask"][-1]
    batches = data.train.batches(batch_size=2, seed=0)
    batch = next(batches)
    batches.close()
    for tokens, mask, record in zip(batch["tokens"], batch["mask"], batch["record"], strict=True):
        asked = tokens[mask].astype(np.uint8).tobytes().decode()
        assert asked == f"\0{data.train.read_fields(record)['answer'] - 1} + 1 ="
    with pytest.raises(NotImplementedError, match="only records of the kind prompts"):
        load(make_chats(9)).train.read_fields(0)
    assert load([{"prompt": "a" * 200}, {"prompt": "b"}], validation=0.0).counts["dropped"] == 1


def test_pairs_of_texts_are_padded_rows(load):
    """A source is read with its end; a target begins with `start`, and is trained on with its end."""
    pairs = [{"source": f"no {n}", "target": f"n{n}"} for n in range(40)]
    data = load(pairs, seq_len=6, source_len=7, start=(0, 9), template=None)
    assert data.kind == "pair" and len(data.train.rows) + len(data.validation.rows) == 40
    row = next(row for row in data.train.rows if bytes(row["source"][1:6].astype(np.uint8)) == b"no 12")
    assert row["source"].tolist() == [0, *b"no 12", 0] and row["source_mask"].all()
    assert row["tokens"].tolist() == [0, 9, *b"n12", 0]
    assert row["targets"].tolist() == [9, *b"n12", 0, -1]
    assert row["weights"].tolist() == [1, 1, 1, 1, 1, 0]
    short = next(row for row in data.train.rows if row["source"][5] == 0)
    assert short["source_mask"].tolist() == [True] * 6 + [False]
    assert data.encode_prompt("no 3").tolist() == [0, *b"no 3", 0]
    prompts = train.find_prompts(data, 1)
    assert prompts[0].text.startswith("no ") and prompts[0].tokens[-1] == 0


def test_pairs_that_do_not_fit_are_dropped(load):
    """By the source, or by the target with what it begins with."""
    pairs = [{"source": "a" * n, "target": "b"} for n in range(1, 9)]
    pairs += [{"source": f"c{n}", "target": "d" * n} for n in range(1, 9)]
    for start, dropped in (((0,), 3 + 3), ((0, 9), 3 + 4)):
        data = load(pairs, seq_len=6, source_len=7, start=start, template=None, validation=0)
        assert data.counts["dropped"] == dropped and len(data.train.rows) == 16 - dropped
    with pytest.raises(ValueError, match=r"pair records need start=model\.start"):
        load(pairs, seq_len=6, template=None)
    with pytest.raises(ValueError, match="text records need no start"):
        load([{"text": "a"}], seq_len=6, start=(0,), template=None)


def test_mixtures_have_rows_of_each_part(load, tmp_path):
    paths = [write_lines(tmp_path / f"{number}.jsonl", make_chats(90, sign)) for number, sign in enumerate("+-")]
    weights = {str(paths[0]): 3.0, str(paths[1]): 1.0}
    data = load(weights)
    batches = data.train.batches(batch_size=4, seed=0)
    rows = [next(batches) for _ in range(25)]
    batches.close()
    down = sum(b" - 1?" in tokens.astype(np.uint8).tobytes() for batch in rows for tokens in batch["tokens"])
    assert data.train.rows.count_rows(100, batch_size=4) == dict(zip(weights, (100 - down, down), strict=True))
    assert abs(down - 25) <= 2, "each part has its share to within the number of parts"
    assert len(list(data.validation.ordered(batch_size=1))) == sum(
        len(part.validation.rows) for part in data.parts.values()
    )
    assert str(paths[1]) in str(data) and load(dict.fromkeys(weights, 1.0)).digest != data.digest
    phases = load([(0, {**weights, str(paths[1]): 1e-3}), (10, weights)])
    assert phases.train.rows.count_rows(40, batch_size=4)[str(paths[1])] <= 1
    with pytest.raises(NotImplementedError, match="a mixture has no end"):
        data.train.ordered(batch_size=1)
    pairs = write_lines(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c", "label": 1}] * 9)
    labeled = write_lines(tmp_path / "labeled.jsonl", [{"prompt": "a", "completion": "b", "label": 1}] * 9)
    with pytest.raises(ValueError, match="has preference records, which do not mix with labeled records"):
        load({str(labeled): 1.0, str(pairs): 1.0})
    with pytest.raises(ValueError, match="has preference records, which do not mix with chat records"):
        load({str(paths[0]): 1.0, str(pairs): 1.0})


def test_a_mixture_has_the_template_of_the_parts_with_messages(load, tmp_path):
    tokenizer = ByteTokenizer()
    tokenizer.special_tokens = {"\0": 0, "\1": 1}
    template = ChatTemplate(PLAIN_TEMPLATE, {"eos_token": "\1"})  # an answer ends with another token than a text
    texts = write_lines(tmp_path / "texts.jsonl", [{"text": f"text {n}"} for n in range(20)])
    chats = write_lines(tmp_path / "chats.jsonl", make_chats(20))
    asked = {"prompt": [{"role": "user", "content": "?"}], "completion": [{"role": "assistant", "content": "!"}]}
    both = write_lines(tmp_path / "both.jsonl", [{"prompt": "a", "completion": "b"}] * 9 + [asked])
    for source in ({str(texts): 0.5, str(chats): 0.5}, {str(chats): 0.5, str(texts): 0.5}, both):
        data = load(source, template=template, tokenizer=tokenizer)
        assert data.template is template and data.stop_tokens == (0, 1)
    parts = {"a": load(chats), "b": load(chats, template=ChatTemplate(PLAIN_TEMPLATE + " ", {"eos_token": "\0"}))}
    with pytest.raises(ValueError, match="b has another chat template than a, and a model is saved with one"):
        train.mix(parts, {"a": 0.5, "b": 0.5})


def test_labeled_parts_mix_with_rows_of_any_number_of_texts(load):
    sizes = {"long": 40, "short": 3}
    parts = {
        name: load([{"prompt": f"{n}", "completion": "b" * size, "label": n} for n in range(30)], validation=0.3)
        for name, size in sizes.items()
    }
    widths = {name: len(part.train.rows[0]["labels"]) for name, part in parts.items()}
    assert widths["short"] > widths["long"]
    data = train.mix(parts, {"short": 0.5, "long": 0.5})
    batches = data.train.batches(batch_size=4, seed=0)
    batch = next(batches)
    batches.close()
    assert batch["labels"].shape == (4, widths["short"])
    for batch in data.validation.ordered(batch_size=8):
        num_segments = batch["segment_ids"].max(axis=1)
        assert batch["labels"].shape[1] >= num_segments.max()
    assert len(parts["long"].train.rows[0]["labels"]) == widths["long"], "the parts stay as they are"


def test_bad_arguments_and_empty_sources_are_named(load, tmp_path):
    for options, said in [
        ({"processes": 0}, "processes is 0: 1 or more"),
        ({"validation": 1.0}, "validation is 1.0: a share"),
        ({"kind": "chats"}, "kind"),
        ({"whole": True, "too_long": "cut"}, "whole texts are not cut"),
    ]:
        with pytest.raises((ValueError, TypeError), match=said):
            load(make_chats(3), **options)
    with pytest.raises(ValueError, match="whole is for texts with a score, and prompt records are to be completed"):
        load([{"prompt": "1?"}], whole=True)
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"blank\.jsonl: no records there"):
        load(tmp_path / "blank.jsonl")
    path = write_lines(tmp_path / "other.jsonl", [{"body": "a"}])
    with pytest.raises(ValueError, match=r"other\.jsonl:1: the record has the fields `body`"):
        load(path)
    with pytest.raises(ValueError, match="the train split has no rows"):
        load(make_chats(3), seq_len=4).train.batches(batch_size=1)


def test_records_of_another_kind_are_refused_untokenized(load, tmp_path):
    files = {
        "texts.jsonl": [{"text": "a"}],
        "pairs.jsonl": [{"prompt": "1?", "chosen": "1", "rejected": "2"}],
        "labels.jsonl": [{"prompt": "1?", "completion": "1", "label": 1}],
        "prompts.jsonl": [{"prompt": "1?"}],
    }
    texts, *others = [write_lines(tmp_path / name, records) for name, records in files.items()]
    learned_by = ["`zoo fork dpo` learns from pairs", "docs/classify.md has a loss of labels", "`zoo fork grpo` learns"]
    for path, kind, said in zip(others, ("preference", "labeled", "prompts"), learned_by, strict=True):
        for source in (path, {str(texts): 0.5, str(path): 0.5}):
            expected = f"{path.name}: the kind of the records is {kind}, expected one of text, completion: "
            with pytest.raises(ValueError, match=re.escape(expected + said)):
                load(source, kinds=("text", "completion"))
    with pytest.raises(ValueError, match="is text, expected one of preference: `zoo fork sft` trains"):
        load(texts, kinds=("preference",))
    assert not (tmp_path / "cache").exists()
    assert load(others[1], kind="completion", kinds=("text", "completion")).kind == "completion"  # without its labels
    chosen = [{"prompt": "1?", "completion": "1", "rejected": "2"}]  # as the message says of pairs
    assert list_trained(load(chosen, kinds=("text", "completion")).train) == ["1\0"]


def test_what_a_template_refuses_is_a_fault_with_its_words(load, tmp_path):
    refusing = "{% if messages[0].role == messages[1].role %}{{ raise_exception('turns alternate') }}{% endif %}"
    template = ChatTemplate(refusing + PLAIN_TEMPLATE, {"eos_token": "\0"}, name="m/chat_template.jinja")
    chats = make_chats(3)
    chats[1]["messages"].insert(0, chats[1]["messages"][0])
    path = write_lines(tmp_path / "chats.jsonl", chats)
    said = r"chats\.jsonl:2: m/chat_template\.jinja does not render these messages: turns alternate"
    with pytest.raises(ValueError, match=said):
        load(path, template=template)


def test_messages_without_a_template_are_one_fault(load):
    message = "^record 0: messages need a chat template, and the model has none: .*$"
    for records in (make_chats(), [{"prompt": [{"role": "user", "content": "a"}]}] * 30):
        with pytest.raises(ValueError, match=message):
            load(records, template=None)
    with pytest.raises(ValueError, match=message):
        train.stream_records(make_chats(), batch_size=1, **{**OPTIONS, "template": None})
    assert load([{"text": "a", "prompt": []}] * 9, template=None, kind="text").template is None


def test_prompts_answers_and_files_of_a_model(load, tmp_path):
    data = load(make_chats())
    prompt = data.encode_prompt("1 + 1?")
    assert prompt.astype(np.uint8).tobytes().decode().count("1 + 1?") == 1
    assert data.stop_tokens == (0,) and data.decode(np.array([50, 0, 51])) == "2"
    both = dataclasses.replace(data, stop_tokens=(0, 51))
    assert both.decode(np.array([50, 51, 52, 0])) == both.decode(np.array([50, 0, 52, 51])) == "2"
    data.save(tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == PLAIN_TEMPLATE
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 0
    for plain in ({"text": "a b"}, {"prompt": "a", "completion": "b"}, {"prompt": "a", "chosen": "b", "rejected": "c"}):
        text = load([plain] * 5)
        assert text.template is None and text.encode_prompt("a").tolist() == [0, 97] and text.stop_tokens == (0,)


def test_a_faulty_first_record_can_be_left_out(load, tmp_path):
    path = write_lines(tmp_path / "chats.jsonl", make_chats(120))
    path.write_text("{\n" + path.read_text())
    assert load(path, bad_records="skip").counts["rejected"] == 1
    with pytest.raises(ValueError, match=r"chats\.jsonl:1: expected JSON"):
        load(path)
    path.write_text("{\n")
    with pytest.raises(ValueError, match=r"chats\.jsonl:1: expected JSON"):
        load(path, bad_records="skip")
