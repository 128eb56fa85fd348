"""Fine-tune a model that reads images: it learns to answer questions about pictures, with all parameters or with LoRA.

    python recipes/image_sft.py                           # 600 steps on pictures of four digits, from a random start
    python recipes/image_sft.py --checkpoint DIR --data chats.jsonl --seq-len 2048 --learning-rate 1e-4 --lora 16

By default a LLaVA of 195,000 parameters learns to answer "Which digit is top left?" and "Which digit is the largest?".
Of 256 questions about scans that no picture of training has, it answers none before, and 90% after a minute on two
cores.

Records are chats or completions with pictures in their messages (docs/your-data.md). The files of the checkpoint say
which tokens and pixels they become, and only answers are trained on. The tower of a given checkpoint is frozen, as in
LLaVA's second stage (arXiv:2304.08485, section 4.2): LoRA adapts the layers of the decoder, and without LoRA projector
and decoder are trained. The random start is trained as a whole. Needs `pip install 'equizoo[train,text,images]'`.
"""

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers

import zoo
from zoo import tools, train
from zoo.text.batches import pad_left
from zoo.text.tokenizers import ByteTokenizer
from zoo.train.digits import list_digit_questions, load_digits

PIXELS = {"image_processor_type": "CLIPImageProcessor", "processor_class": "LlavaProcessor", "do_center_crop": False}
PIXELS |= {"size": {"height": 16, "width": 16}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
PLACES = {"processor_class": "LlavaProcessor", "image_token": "<image>", "patch_size": 4}
PLACES |= {"num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}  # a class token, left out
TEMPLATE = """
{%- for message in messages -%}
    {%- if message.role == "assistant" -%}
        {%- generation -%}{{- message.content ~ eos_token -}}{%- endgeneration -%}
    {%- else -%}
        {%- set parts = [{"text": message.content}] if message.content is string else message.content -%}
        {%- for part in parts -%}{{- "<image>" if part.type == "image" else part.text -}}{%- endfor -%}
    {%- endif -%}
{%- endfor -%}
"""


@dataclass(frozen=True)
class Config(train.FinetuneConfig):  # batch_size, ..., data, records, seq_len, ..., lora, quantization
    """Load a model and records with pictures, train on the answers, answer held-out questions, export."""

    checkpoint: Path = Path("runs/image_sft_start")  # Model to start from; by default a random one, which is made.
    targets: tuple[str, ...] = (r"decoder\.layers\..*",)
    train_tower: bool = False  # Train the tower of a checkpoint, too; with LoRA, targets say so.
    held_out: int = 256  # Questions to answer, in one batch.
    seq_len: int = 48
    batch_size: int = 64
    steps: int = 600
    learning_rate: float = 3e-3
    warmup_steps: int = 60
    eval_every: int = 100
    run: train.RunOptions = train.RunOptions(Path("runs/image_sft"))


def make_start(directory):
    """Write a random LLaVA that reads bytes, with the files that say how texts become tokens, and pictures pixels."""
    sizes = {"embed": 64, "layers": 2, "heads": 4, "mlp": 128}
    texts = {"vocab": 257, "length": 128, "image_token": 256}
    model = zoo.models.LLaVA(image_size=16, patch_size=4, **texts, **sizes, key=jax.random.key(0))
    zoo.save(model, directory, config={"bos_token_id": 0, "eos_token_id": 0})
    if jax.process_index() > 0:
        return
    ByteTokenizer().save(directory)
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    (directory / "processor_config.json").write_text(json.dumps(PLACES))
    (directory / "chat_template.jinja").write_text(TEMPLATE)


def find_start(checkpoint):
    """Return the directory to start from. The default one is made if it is not there."""
    if checkpoint == Config.checkpoint and not checkpoint.exists():
        make_start(checkpoint)
    return zoo.weights.resolve_directory(checkpoint)


def load_data(config, checkpoint):
    """Return records to train on, and held-out ones, a row each; by default about digits that are held out."""
    options = {"kinds": ("chat", "completion"), "images": zoo.images.read_image_config(checkpoint)}
    if config.data:
        data = config.load_records(checkpoint, config.data, **options)
        return data, config.load_records(checkpoint, config.data, pack=False, **options).validation
    digits, others = load_digits(seed=config.run.seed)
    options |= {"pack": False, "validation": 0}
    data = config.load_records(checkpoint, list_digit_questions(digits, 10_000), **options)
    return data, config.load_records(checkpoint, list_digit_questions(others, config.held_out), **options).train


class Questions:
    """Questions of held-out rows, spread evenly, with pictures and right answers: of a chat the last question."""

    def __init__(self, data, rows, count):
        self.data = data
        numbers = range(0, len(rows), max(1, len(rows) // count))[:count]
        self.pictures = [rows.open_pictures(number)[0] for number in numbers]
        chosen = [rows[number] for number in numbers]
        self.images = jax.tree.map(lambda *x: jnp.stack(x), *[row["images"] for row in chosen])
        prompts = []
        answers = []
        for row in chosen:
            trained = np.flatnonzero(row["weights"])
            start = trained[np.flatnonzero(np.diff(trained, prepend=-2) > 1)[-1]]
            prompts.append(row["tokens"][: start + 1])
            answers.append(row["targets"][start : trained[-1] + 1])
        self.tokens, self.mask = map(jnp.asarray, pad_left(prompts))
        self.texts = [data.decode_prompt(tokens) for tokens in prompts]
        self.answers = [data.decode(tokens) for tokens in answers]
        self.longest = max(map(len, answers))

    def answer(self, model, mesh):
        """Return the most probable answers, token by token."""
        options = {"mask": self.mask, "max_new_tokens": self.longest, "stop_tokens": self.data.stop_tokens}
        new = zoo.generate(model, self.tokens, images=self.images, mesh=mesh, **options)
        return [self.data.decode(row) for row in np.asarray(new)]

    def compare(self, answers):
        """Return the share of answers that are right to the letter: of all, and of each question asked repeatedly."""
        right = np.array(answers) == np.array(self.answers)
        repeated = [text for text, count in Counter(self.texts).most_common(8) if count > 1]
        shares = {f"exact_match/{text}": right[np.array(self.texts) == text].mean() for text in repeated}
        return {"exact_match": right.mean(), **shares}

    def draw(self, before, after, count=16):
        """Draw pictures with their questions and the answers before and after; in a frame where the last is wrong."""
        rows = list(zip(self.texts, before, after, strict=True))[:count]
        thinned = [x[:: max(1, len(x) // 128), :: max(1, len(x) // 128)] for x in self.pictures[:count]]
        captions = [f"{text.strip()[:34]}\n{old[:15]} → {new[:15]}" for text, old, new in rows]
        missed = [new != right for (*_, new), right in zip(rows, self.answers, strict=False)]
        return tools.report.ImageGrid(thinned, captions, missed, description="Pictures with answers", cell=200)


def report(run, model, questions, *, answers, **options):
    """Write the report: the share of right answers before and after, by question, and pictures with their answers."""
    before, after = map(questions.compare, answers)
    shares = {name: f"{share:.1%} ({before[name]:.1%} before)" for name, share in after.items()}
    table = [{"question": name.partition("/")[2], "right": share} for name, share in shares.items() if "/" in name]
    asked = [text + run.data.prompt_end for text in questions.texts[:3]]
    tools.report_run(
        run,
        "Questions about pictures",
        model,
        samples=[pair for given in answers for pair in zip(asked, given, strict=False)],
        headline={"answered to the letter": shares["exact_match"]},
        tables={"Answered to the letter": table},
        plots={"Held-out pictures": questions.draw(*answers)},
        **options,
    )


def main(config: Config) -> None:
    checkpoint = find_start(config.checkpoint)
    mesh = config.mesh.make_mesh()

    data, test = load_data(config, checkpoint)
    batches = data.train.batches(config.batch_size, seed=config.run.seed, mesh=mesh)
    steps = config.steps if config.epochs is None else batches.count_steps(config.epochs)
    questions = Questions(data, test.rows, config.held_out)

    base = config.load_model(checkpoint, mesh)
    model = config.add_adapters(base, mesh, key=jax.random.key(config.run.seed))
    is_frozen = not (config.lora or config.train_tower or config.checkpoint == Config.checkpoint)

    def select(tree):
        """Return the trained parameters of a model, or their gradients."""
        tree = zoo.trainable(tree)
        return replace(tree, tower=jax.tree.map(lambda _: None, tree.tower)) if is_frozen else tree

    schedule = train.warmup_cosine(config.learning_rate, config.warmup_steps, steps)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    opt_state = zoo.place(optimizer.init(select(model)), mesh.optimizer)

    def loss_fn(model, batch):  # has images; weights are 1 on the tokens of answers
        return zoo.cross_entropy(zoo.cast(model, config.mesh.dtype), batch)

    gradient = zoo.value_and_grad(loss_fn, mesh, **config.mesh.accumulation)
    evaluate = train.Evaluation(loss_fn, mesh, unit=data.unit, validation=test.ordered(config.batch_size, limit=16))

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        loss, grads = gradient(model, batch)
        updates, opt_state = optimizer.update(select(grads), opt_state, select(model))
        model = zoo.place(eqx.apply_updates(model, updates), mesh)
        return model, opt_state, {"loss": loss, "gradient_norm": optax.tree.norm(select(grads))}

    frozen = base if config.lora or is_frozen else None
    with train.Run(config, mesh=mesh, data=data, model=model, frozen=frozen) as run:
        before = evaluate(model)
        first = questions.answer(model, mesh)
        trained, opt_state = run.restore((select(model), opt_state), batches)
        model = eqx.combine(trained, model)
        for batch in run.steps(batches, steps):
            model, opt_state, metrics = step(batch, model, opt_state)
            run.log(**metrics, learning_rate=schedule(run.step - 1))
            if run.every(config.eval_every):
                run.log(**evaluate(model), **questions.compare(questions.answer(model, mesh)))
            if run.due(config.eval_every):
                run.save((select(model), opt_state), batches)
    if run.stopped:
        return

    answers = (first, questions.answer(model, mesh))
    merged = run.export_adapters(model, base=config.checkpoint)
    report(run, merged, questions, answers=answers, before=before, parameters=select(model))
    run.export(merged, seq_len=config.seq_len, source=checkpoint)


if __name__ == "__main__":
    train.run_cli(main, Config)
