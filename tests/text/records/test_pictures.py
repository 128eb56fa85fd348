"""Conversations with images become rows of tokens and pixels: sizes are read first, and pixels with their rows."""

import base64
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import PIL.Image
import pytest
import tokenizers

import zoo
from zoo import train
from zoo.images import expand_placeholders, join_rows, preprocess_images
from zoo.images.placeholders import find_placeholder
from zoo.text import ChatTemplate
from zoo.text.records.token_store import RecordsError
from zoo.text.tokenizers import ByteTokenizer, FileTokenizer

FIXTURES = Path(__file__).parents[2] / "fixtures"
GEMMA = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 16, "width": 16},
    "model_type": "gemma3",
    "image_seq_length": 4,
}
CROPS = {**GEMMA, "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8}
QWEN = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "size": {"shortest_edge": 64, "longest_edge": 512},
    "model_type": "qwen2_vl",
    "image_token": "<image_soft_token>",
}
IDEFICS = {
    "image_processor_type": "Idefics3ImageProcessor",
    "size": {"longest_edge": 32},
    "max_image_size": {"longest_edge": 16},
    "model_type": "idefics3",
    "image_seq_len": 4,
    "image_token": "<image_soft_token>",
    "fake_image_token": "<start_of_image>",
    "global_image_token": "<end_of_image>",
}
SPECIAL = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
BODY = """
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content -%}
            {{- "PLACEHOLDER" if part.type == "image" else part.text -}}
        {%- endfor -%}
    {%- endif -%}
    {{- "<end_of_turn>" -}}
"""
SOURCE = """
{%- for message in messages -%}
    {{- "<start_of_turn>" ~ message.role ~ "\n" -}}
    BODY
    {{- "\n" -}}
{%- endfor -%}
{{- "<start_of_turn>assistant\n" if add_generation_prompt -}}
"""
TEXT = {"type": "text", "text": "what\n"}


MARKED = (
    f"{{%- if message.role == 'assistant' -%}}{{%- generation -%}}{BODY}{{%- endgeneration -%}}{{%- else -%}}{BODY}"
)


def make_template(config, body=BODY):
    return ChatTemplate(SOURCE.replace("BODY", body).replace("PLACEHOLDER", find_placeholder(config)))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Of letters, with the special tokens of the fixture of Gemma 3, which has a token of two line ends, too."""
    letters = "\nabcdefghijklmnopqrstuvwxyz0123456789 ?.<>_-HI"
    vocab = {
        name: number for number, name in enumerate(("<pad>", "<bos>", "<eos>", "<unk>", *letters, "\n\n", "\n\n\n"))
    }
    vocab |= {"<image_soft_token>": 73, "<start_of_image>": 74, "<end_of_image>": 75}
    vocab |= {"<start_of_turn>": 76, "<end_of_turn>": 77}
    merges = [("\n", "\n"), ("\n\n", "\n")]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    made.add_special_tokens([name for name in vocab if name.startswith("<") and len(name) > 1])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return FileTokenizer(path, 80)


@pytest.fixture
def load(tmp_path, tokenizer):
    """Load with a cache of the test's own, each conversation in a row."""

    def load(source, config=GEMMA, **options):
        options = {"seq_len": 64, "pack": False, "validation": 0.0, "template": make_template(config), **options}
        return train.load_records(
            source, tokenizer=tokenizer, images=config, cache=tmp_path / "cache", processes=1, **options
        )

    return load


def draw(folder, *sizes):
    """Write pictures, and return their names."""
    rng = np.random.default_rng(0)
    names = [f"{number}.png" for number in range(len(sizes))]
    for name, size in zip(names, sizes, strict=True):
        PIL.Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(folder / name)
    return names


def ask(*parts, answer="a cat"):
    return {"messages": [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": answer}]}


def part(name):
    return {"type": "image", "path": name}


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def expand(text, names, folder, config):
    """Return a text with the tokens of pictures, as `preprocess_images` counts them."""
    return expand_placeholders(text, preprocess_images([folder / name for name in names], config), config)


@pytest.mark.parametrize("config", [GEMMA, CROPS, QWEN, IDEFICS], ids=["whole", "crops", "packed", "masked"])
def test_rows_have_the_tokens_and_pixels_of_the_processor(load, tokenizer, tmp_path, config):
    """Only the answers are trained on; a row without pictures has images of zeros."""
    names = draw(tmp_path, (20, 40), (16, 16), (33, 9))
    first = ask(part(names[0]), TEXT, part(names[1]), answer="two cats")
    third = [*ask(TEXT)["messages"], *ask(part(names[2]), answer=[{"type": "text", "text": "one"}])["messages"]]
    path = write_lines(tmp_path / "a.jsonl", [first, ask(TEXT, answer="none"), {"messages": third}])
    data = load(path, config, seq_len=256)
    word = find_placeholder(config)
    written = [
        (f"user {word}what\n{word}|assistant two cats", names[:2], ["two cats"]),
        ("user what\n|assistant none", [], ["none"]),
        (f"user what\n|assistant a cat|user {word}|assistant one", names[2:], ["a cat", "one"]),
    ]
    rows = [data.train.rows[number] for number in range(len(data.train.rows))]
    for row, (text, used, answers) in zip(rows, written, strict=True):
        turns = "".join("<start_of_turn>" + turn.replace(" ", "\n", 1) + "<end_of_turn>\n" for turn in text.split("|"))
        tokens = tokenizer.encode(expand(turns, used, tmp_path, config) if used else turns)
        inside = row["segment_ids"] == 1
        np.testing.assert_array_equal(row["tokens"][inside], tokens[:-1])
        np.testing.assert_array_equal(row["targets"][inside], tokens[1:])
        trained = np.concatenate([tokenizer.encode(f"{answer}<end_of_turn>") for answer in answers])
        np.testing.assert_array_equal(row["targets"][row["weights"] > 0], trained)
    wanted = [preprocess_images([tmp_path / x for x in used], config) if used else None for _, used, _ in written]
    images = jax.tree.map(lambda *x: np.stack(x), *[row["images"] for row in rows])
    assert jax.tree.structure(images) == jax.tree.structure(join_rows(wanted))
    jax.tree.map(np.testing.assert_array_equal, images, join_rows(wanted))
    assert data.counts["pictures"] == 3 and "3 pictures" in str(data)
    marked = load(path, config, seq_len=256, template=make_template(config, MARKED + "{%- endif -%}")).train.rows
    for number, row in enumerate(rows):
        jax.tree.map(np.testing.assert_array_equal, marked[number], row)


def test_special_tokens_that_a_message_spells_are_text(load, tokenizer, tmp_path):
    names = draw(tmp_path, (16, 16))
    spelled = {"type": "text", "text": "<end_of_turn><start_of_turn>"}
    path = write_lines(tmp_path / "a.jsonl", [ask(part(names[0]), spelled, answer="<end_of_turn>")])
    row = load(path, seq_len=128).train.rows[0]
    texts = np.append(row["tokens"][:1], row["targets"])
    assert [int((texts == tokenizer.special_tokens[f"<{name}_of_turn>"]).sum()) for name in ("start", "end")] == [2, 2]
    assert (texts == 73).sum() == 4 and row["weights"].sum() == len("<end_of_turn>") + 1


def test_pictures_within_records_are_those_of_files(load, tmp_path):
    """Base64 in JSON, bytes and structs of `datasets` in tables and in memory, and columns with placeholders."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    ipc = pytest.importorskip("pyarrow.ipc")
    names = draw(tmp_path, (20, 40), (16, 16), (9, 33), (8, 8))
    content = [(tmp_path / name).read_bytes() for name in names]
    struct = [{"bytes": x, "path": name} for x, name in zip(content, names, strict=True)]
    coded = [{"type": "image", "bytes": base64.b64encode(x).decode()} for x in content]

    def make(images, *, columns=False, text=False):
        records = [ask(images[0], TEXT, images[1]), ask(TEXT), ask(images[2], images[3], TEXT)]
        if text:
            contents = ["<image>what\n<image>", "what\n", "<image><image>what\n"]
            records = [ask(answer="a cat") for _ in contents]
            for record, said in zip(records, contents, strict=True):
                record["messages"][0]["content"] = said
        if columns:
            for record, given in zip(records, (struct[:2], [], struct[2:]), strict=True):
                record["images"] = given
        return records

    wanted = load(write_lines(tmp_path / "paths.jsonl", make([part(name) for name in names])))
    blank = [{"type": "image"}] * 4
    structs = [{"type": "image", "image": each} for each in struct]
    sources = {
        "coded": write_lines(tmp_path / "coded.jsonl", make(coded)),
        "memory": make([{"type": "image", "bytes": x} for x in content]),
        "names": [
            {**record, "images": [str(tmp_path / name) for name in chosen]}
            for record, chosen in zip(make(blank), (names[:2], [], names[2:]), strict=True)
        ],
        "columns": make(blank, columns=True),
        "text": make(blank, columns=True, text=True),
    }
    for name, records in {"structs": make(structs), "flat": make(blank, columns=True)}.items():
        for record in records:  # a column of messages has one type
            said = record["messages"][1]
            said["content"] = [{"type": "text", "text": said["content"]}]
        table = pyarrow.Table.from_pylist(records)
        parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=2)
        with ipc.new_stream(tmp_path / f"{name}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
        sources |= {f"{name} {suffix}": tmp_path / f"{name}.{suffix}" for suffix in ("parquet", "arrow")}
    text = pyarrow.Table.from_pylist(make(blank, columns=True, text=True))
    parquet.write_table(text, tmp_path / "text.parquet", row_group_size=2)
    sources["text parquet"] = tmp_path / "text.parquet"
    try:
        from array_record.python.array_record_module import ArrayRecordWriter

        writer = ArrayRecordWriter(str(tmp_path / "coded.array_record"), "group_size:1")
        for record in make(coded):
            writer.write(json.dumps(record).encode())
        writer.close()
        sources["array_record"] = tmp_path / "coded.array_record"
    except ImportError:
        pass
    for name, source in sources.items():
        data = load(source)
        for number in range(3):
            jax.tree.map(
                lambda x, y, name=name: np.testing.assert_array_equal(x, y, err_msg=name),
                data.train.rows[number],
                wanted.train.rows[number],
            )
    single = ask({"type": "image"}, TEXT) | {"image": struct[0]}
    plain = ask(part(str(tmp_path / names[0])), TEXT)
    for record in (single, plain):
        np.testing.assert_array_equal(
            load([record]).train.rows[0]["images"][0], wanted.train.rows[0]["images"][0], strict=True
        )


def test_completions_and_last_answers_have_pictures_before_them(load, tmp_path):
    names = draw(tmp_path, (20, 40), (16, 16))
    first, second = (ask(part(name), TEXT)["messages"] for name in names)
    path = write_lines(tmp_path / "a.jsonl", [{"messages": [*first, *second]}])
    last = load(path, train_on="last", seq_len=96)
    assert len(last.train.rows) == 2 and last.counts["pictures"] == 3
    whole = load(path, seq_len=96).train.rows[0]
    assert [int(last.train.rows[number]["images"].any((1, 2, 3)).sum()) for number in range(2)] == [1, 2]
    np.testing.assert_array_equal(last.train.rows[1]["images"], whole["images"])
    record = {"prompt": [*first, second[0]], "completion": second[1:]}
    completion = load(write_lines(tmp_path / "b.jsonl", [record]), seq_len=96)
    for key in ("tokens", "weights", "images"):
        np.testing.assert_array_equal(completion.train.rows[0][key], last.train.rows[1][key])
    assert completion.kind == "completion"


def test_batches_resume_and_are_shared_by_processes(load, tmp_path):
    names = draw(tmp_path, *[(8 + number, 30 - number) for number in range(20)])
    records = [ask(*map(part, names[number : number + 1 + number % 3]), TEXT) for number in range(17)]
    path = write_lines(tmp_path / "a.jsonl", records)
    data = load(path, pack=True, seq_len=160, validation=0.2)
    compare = lambda x, y: jax.tree.map(np.testing.assert_array_equal, x, y)
    batches = data.train.batches(2, seed=3)
    seen = [next(batches) for _ in range(12)]
    assert len({jax.tree.map(np.shape, batch)["images"] for batch in seen}) == 1
    assert max(batch["segment_ids"].max() for batch in seen) > 1
    again = load(path, pack=True, seq_len=160, validation=0.2).train.batches(2, seed=3, threads=5)
    again.restore(2 * 8)
    for batch in seen[8:]:
        compare(next(again), batch)
    halves = [data.train.batches(2, seed=3, process=(number, 2)) for number in range(2)]
    compare(jax.tree.map(lambda *x: np.concatenate(x), *map(next, halves)), seen[0])
    for each in (batches, again, *halves):
        each.close()
    ordered = list(data.validation.ordered(3))
    assert sum(int((batch["weights"] > 0).sum()) for batch in ordered) == data.validation.rows.num_trained
    assert not ordered[-1]["images"][-1].any()
    with pytest.raises(NotImplementedError, match="only records of the kind prompts keep further fields"):
        data.train.read_fields(0)
    with pytest.raises(NotImplementedError, match="prompts with images are not sampled from records"):
        train.find_prompts(data)


def test_packed_rows_train_as_separate_ones(load, tmp_path):
    """A step on the fixture of Gemma 3, through a placed batch."""
    names = draw(tmp_path, (20, 40), (16, 16), (33, 9))
    records = [ask(part(names[0]), TEXT), ask(TEXT), ask(part(names[1]), part(names[2]), answer="two")]
    path = write_lines(tmp_path / "a.jsonl", records)
    model = zoo.load(FIXTURES / "image_text" / "gemma3_image", dtype=jnp.float32)
    mesh = zoo.make_mesh(devices=jax.devices()[:1])

    def loss_fn(model, batch):
        return zoo.cross_entropy(model, batch)

    found = {}
    for seq_len, pack in ((160, True), (64, False)):
        data = load(path, seq_len=seq_len, pack=pack)
        (batch,) = data.train.ordered(len(data.train.rows))
        found[pack] = zoo.value_and_grad(loss_fn, mesh)(model, zoo.place_batch(batch, mesh))
        assert len(batch["tokens"]) == (1 if pack else 3)
    np.testing.assert_allclose(found[True][0], found[False][0], rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found[True][1], found[False][1])
    loss, grads = found[True]
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(grads.tower.stack)[:1])
    optimizer = optax.sgd(0.1)
    updates, _ = optimizer.update(grads, optimizer.init(zoo.trainable(model)))
    trained = optax.apply_updates(zoo.trainable(model), updates)
    assert np.isfinite(loss) and jax.tree.structure(trained) == jax.tree.structure(zoo.trainable(model))


def test_pixels_are_read_with_their_row(load, tmp_path):
    """Only headers are read before; what is gone, cut off or of another size stops its own row."""
    names = draw(tmp_path, (20, 40), (16, 16), (33, 9), (64, 64))
    content = (tmp_path / names[3]).read_bytes()
    (tmp_path / names[3]).write_bytes(content[: len(content) // 2])
    path = write_lines(tmp_path / "a.jsonl", [ask(part(name), TEXT) for name in names])
    rows = load(path, QWEN).train.rows
    (tmp_path / names[0]).unlink()
    PIL.Image.new("RGB", (50, 9)).save(tmp_path / names[1])
    rows[2]
    with pytest.raises(FileNotFoundError, match=r"a.jsonl:1: the picture .*0.png is not there any more$"):
        rows[0]
    with pytest.raises(ValueError, match=r"a.jsonl:2: .*1.png has another size than before: load the records with"):
        rows[1]
    with pytest.raises(ValueError, match=r"a.jsonl:4: .*3.png is cut off or damaged \(.*\): expected a whole image$"):
        rows[3]
    batches = load(path, QWEN).train.batches(4)  # of the cache
    with pytest.raises((ValueError, FileNotFoundError), match="a.jsonl:"):
        next(batches)


def test_the_cache_has_no_pixels_and_knows_folder_and_settings(load, tmp_path):
    for folder, size in (("a", (160, 160)), ("b", (8, 8))):
        (tmp_path / folder).mkdir()
        draw(tmp_path / folder, size)
        write_lines(tmp_path / folder / "a.jsonl", [ask(part("0.png"), TEXT)])
    one, two = (load(tmp_path / folder / "a.jsonl", QWEN, seq_len=160) for folder in "ab")
    assert one.digest != two.digest
    assert one.counts["targets"] > two.counts["targets"]
    finer = load(tmp_path / "a" / "a.jsonl", {**QWEN, "size": {"shortest_edge": 64, "longest_edge": 1024}}, seq_len=160)
    assert finer.counts["targets"] > one.counts["targets"]
    size = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert size < 20_000


def test_long_conversations_are_dropped_whole(load, tmp_path):
    names = draw(tmp_path, (16, 16))
    records = [ask(*[part(names[0])] * count, TEXT) for count in (1, 9, 2)]
    data = load(write_lines(tmp_path / "a.jsonl", records), pack=True)
    assert data.counts["dropped"] == 1 and data.counts["pictures"] == 3
    with pytest.raises(NotImplementedError, match="a.jsonl: records that are cut are not read with images, only whole"):
        load(tmp_path / "a.jsonl", too_long="cut")


def test_sources_with_more_and_fewer_pictures_mix(load, tmp_path):
    names = draw(tmp_path, (16, 16))
    many = load(
        write_lines(tmp_path / "a.jsonl", [ask({**TEXT, "text": x}, part(names[0]), part(names[0])) for x in "abcd"]),
        validation=0.3,
    )
    none = load([ask({**TEXT, "text": x}) for x in "abcd"], validation=0.3)
    mixture = train.mix({"many": many, "none": none}, {"many": 0.5, "none": 0.5})
    batch = next(mixture.train.batches(8))
    assert batch["images"].shape == (8, 2, 3, 16, 16)
    assert batch["images"].any((2, 3, 4)).sum(1).tolist().count(2) == 4
    assert {each["images"].shape for each in mixture.validation.ordered(2)} == {(2, 2, 3, 16, 16)}
    larger = load(tmp_path / "a.jsonl", {**GEMMA, "size": {"height": 32, "width": 32}})
    with pytest.raises(
        ValueError, match=r"'images' of a row is float32\[2, 3, 16, 16\] in part 'many' and float32\[2,"
    ):
        train.mix({"many": many, "larger": larger}, {"many": 0.5, "larger": 0.5})


ANSWER = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (ask(part("none.png")), "there is no picture .*none.png"),
        (ask(part("notes.png")), ".*notes.png is not an image: expected a file that Pillow opens"),
        (ask(part("begin.png")), ".*begin.png is cut off or damaged"),
        (ask(part("deep.png")), "images: expected gray levels from 0 to 255, got a picture of mode I;16"),
        (ask(part("long.png")), "long.png: a picture of 1 x 400 pixels is longer than 200 times its width"),
        (ask({"type": "video", "path": "a"}), r"`messages`\[0\] has a part of the type video: expected text"),
        (ask({"type": "text"}), r"`messages`\[0\] has a part of the type text: expected text with `text`, or image"),
        (ask("a"), r"`messages`\[0\] has a part of the type None"),
        (ask({"type": "image", "url": "a"}), r"`messages`\[0\] has an image without a picture: expected `path`"),
        (ask({"type": "image"}), r"`messages`\[0\] has an image without a picture: .* `images`, which has 0"),
        (ask({"type": "image", "bytes": "-"}), r"`messages`\[0\] has `bytes` that are not base64"),
        (
            ask({"type": "image", "image": 3}),
            r"`messages`\[0\] has a picture of type int: expected its path, or `bytes`",
        ),
        (
            ask(TEXT) | {"images": ["0.png"]},
            "`images` has 1 pictures, and messages have 0 places for them: write <image>",
        ),
        (ask({"type": "image"}) | {"image": [None]}, "`image` has a picture of type NoneType"),
        ({"prompt": "<image>", "completion": "a", "image": "0.png"}, "`image` has 1 pictures, and messages have 0"),
        (
            ask({"type": "text", "text": "<image_soft_token>"}),
            r"`messages`\[0\] spells <image_soft_token>, which stands for an image",
        ),
        (ask({"type": "text", "text": "<image>"}), r"`messages`\[0\] spells <image>, which stands for an image"),
        (
            {"messages": [{"role": "user", "content": "<image_soft_token>"}, ANSWER]},
            r"`messages`\[0\] spells <image_soft_token>, which stands",
        ),
        (
            ask(TEXT, answer=[part("0.png")]),
            r"`messages`\[1\] has an image in an answer: the assistant writes text only",
        ),
        ({"messages": [{"role": "user", "content": 3}, ANSWER]}, r"`messages`\[0\] has a number as `content`"),
        ({"messages": 3}, "`messages` is a number, expected a list"),
        ({"messages": ["a", ANSWER]}, r"`messages`\[0\] is text: expected a message"),
    ],
)
def test_faults_are_named_before_the_first_batch(load, tmp_path, record, message):
    (name,) = draw(tmp_path, (16, 16))
    (tmp_path / "notes.png").write_text("not a picture")
    (tmp_path / "begin.png").write_bytes((tmp_path / name).read_bytes()[:20])
    PIL.Image.new("I;16", (8, 8)).save(tmp_path / "deep.png")
    PIL.Image.new("RGB", (400, 1)).save(tmp_path / "long.png")
    path = write_lines(tmp_path / "a.jsonl", [ask(part(name)), record])
    kind = "completion" if "prompt" in record else "chat"
    if kind == "completion":
        path = write_lines(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}, record])
    with pytest.raises(RecordsError) as raised:
        load(path, QWEN, kind=kind)
    first, last = str(raised.value).split("\n")
    assert re.match(f"{re.escape(str(path))}:2: {message}", first), first
    assert "Nothing was written" in last


def test_what_does_not_read_images_says_so(load, tokenizer, tmp_path):
    (name,) = draw(tmp_path, (16, 16))
    path = write_lines(tmp_path / "a.jsonl", [ask(part(name), TEXT)])
    options = {"tokenizer": tokenizer, "template": make_template(GEMMA), "seq_len": 64, "cache": tmp_path / "cache"}
    with pytest.raises(RecordsError, match=r"a.jsonl:1: .* list of parts .* images=zoo.images.read_image_config"):
        train.load_records(path, **options)
    with pytest.raises(
        NotImplementedError, match="images are not streamed: write the tokens once instead: train.load_r"
    ):
        train.stream_records(
            path, tokenizer=tokenizer, template=make_template(GEMMA), seq_len=64, batch_size=1, images=GEMMA
        )
    with pytest.raises(ValueError, match="the tokenizer has no special token <start_of_image>, which images need"):
        train.load_records(path, **{**options, "tokenizer": ByteTokenizer()}, images=GEMMA)
    with pytest.raises(ValueError, match="the chat template writes no <start_of_image> for an image: it is for texts"):
        load(path, template=ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}"))
    with pytest.raises(
        ValueError, match="an image needs a chat template that writes <start_of_image> for it: .* refuse"
    ):
        load(path, template=ChatTemplate("{{ raise_exception('refuse') }}"))
    with pytest.raises(RecordsError, match="messages need a chat template"):
        load(path, template=None)
    with pytest.raises(ValueError, match="pictures become 16 x 32 pixels and 16 x 16: a batch has one size"):
        load(path, {**GEMMA, "size": 16})
    with pytest.raises(ValueError, match="has no image_seq_length"):
        load(path, {**GEMMA, "model_type": "llava", "image_token": "<image_soft_token>", "image_seq_length": None})
    with pytest.raises(NotImplementedError, match="paligemma needs `spans`"):
        load(path, {"model_type": "paligemma"}, template=make_template(GEMMA))
    with pytest.raises(NotImplementedError, match="whole texts, for scores, are not read with images"):
        load(path, whole=True)
    answers = {"prompt": ask(part(name))["messages"][:1], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "b"}]}
    with pytest.raises(
        NotImplementedError, match="of the kind preference are not read with images, only whole ones of"
    ):
        load([answers])
    coded = {"type": "image", "bytes": base64.b64encode((tmp_path / name).read_bytes()).decode()}
    (tmp_path / "b.json").write_text(json.dumps([ask(coded)]))
    with pytest.raises(RecordsError, match="element 0: a picture within a compressed file, or an array, is not found"):
        load(tmp_path / "b.json")
    twice = ChatTemplate(
        make_template(GEMMA).source.replace("{{- message.content", "{{- '<start_of_image>' ~ message.content")
    )
    with pytest.raises(RecordsError, match="writes 2 times <start_of_image> for 1 pictures: expected it once for each"):
        load([ask(part(str(tmp_path / name)))], template=twice)
