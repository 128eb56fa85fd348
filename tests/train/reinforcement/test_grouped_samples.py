"""Samples come with the log-probabilities of the training forward, on any mesh; draws fill a batch of groups."""

import functools

import jax
import numpy as np
import pytest

import zoo
from zoo import train
from zoo.train.reinforcement.grouped_samples import Groups, Samples, fill_groups
from zoo.train.reinforcement.rewards import RewardValues

VOCAB, PROMPT, NEW, SAMPLES = 64, 9, 8, 4
MESHES = {"one device": ({"data": 1}, 1), "data 2 x fsdp 2 x tensor 2": ({"data": 2, "fsdp": 2, "tensor": 2}, 8)}
MODELS = {
    "transformer": functools.partial(zoo.models.Transformer, heads=4, kv_heads=2, mlp=64),
    "mamba2": functools.partial(zoo.models.Mamba2, head_dim=16, groups=2, state_dim=16),
}


def make_prompts():
    """Four left-padded prompts of different lengths."""
    mask = np.arange(PROMPT) >= np.array([[5], [0], [PROMPT - 1], [3]])
    tokens = np.random.default_rng(0).integers(1, VOCAB, mask.shape) * mask
    return {"tokens": tokens.astype(np.int32), "mask": mask, "record": np.arange(4)}


@functools.cache
def draw(family, place):
    """Sample and compute log p again; return samples, log p of the training forward, its batch and greedy samples."""
    sizes, devices = MESHES[place]
    mesh = zoo.make_mesh(**sizes, devices=jax.devices()[:devices])
    make = functools.partial(MODELS[family], vocab=VOCAB, embed=32, layers=2)
    model = zoo.init(lambda key: make(key=key), jax.random.key(0), mesh)
    prompts = make_prompts()
    sampler = train.make_sampler(model, mesh, "float32")
    options = {"samples": SAMPLES, "max_new_tokens": NEW, "mesh": mesh, "stop_tokens": (3, 4, 5)}
    samples = train.sample_groups(sampler, prompts, temperature=0.7, key=jax.random.key(1), **options)
    greedy = train.sample_groups(sampler, prompts, temperature=0.0, **options)
    batch, rollouts = train.pack_rollouts(prompts, samples, np.ones((4, SAMPLES)), PROMPT + NEW - 1)
    forward = zoo.spmd(lambda model, batch: zoo.log_probs(model, batch, temperature=0.7), mesh, out="batch seq")
    found = jax.device_get(forward(model, zoo.place_batch(batch, mesh)))
    return samples, greedy, batch, np.asarray(rollouts.sampler), found


@pytest.mark.parametrize("family", ["transformer", pytest.param("mamba2", marks=pytest.mark.ci)])
@pytest.mark.parametrize("place", MESHES)
def test_samples_have_the_log_probs_of_the_training_forward(family, place):
    samples, _, batch, sampler, found = draw(family, place)
    is_new = batch["weights"] > 0
    assert (samples.tokens == -1).any() and is_new.sum() == (samples.tokens >= 0).sum()
    assert np.abs(found[is_new]).min() > 0 and np.abs(found).max() > 1
    np.testing.assert_allclose(sampler, found * is_new, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["transformer", pytest.param("mamba2", marks=pytest.mark.ci)])
def test_samples_of_a_prompt_differ_and_are_those_of_any_mesh(family):
    samples, greedy, *_ = draw(family, "one device")
    for tokens in samples.tokens.reshape(4, SAMPLES, NEW):
        assert len({tuple(row) for row in tokens.tolist()}) == SAMPLES
    for tokens in greedy.tokens.reshape(4, SAMPLES, NEW):
        assert (tokens == tokens[0]).all()
    assert not greedy.sampling_log_probs.any()
    for found, expected in zip(draw(family, "data 2 x fsdp 2 x tensor 2")[:2], (samples, greedy), strict=True):
        np.testing.assert_array_equal(found.tokens, expected.tokens)


def test_samples_are_of_the_distribution_that_is_trained(no_type_checks):
    options = {"samples": 2, "max_new_tokens": 2, "mesh": None}
    for name, value in {"top_k": 5, "top_p": 0.9, "repetition_penalty": 1.1, "stop_sequences": ((1, 2),)}.items():
        with pytest.raises(ValueError, match=f"{name}=.*tokens would not be drawn from softmax"):
            train.sample_groups(None, make_prompts(), **options, **{name: value})
    with pytest.raises(TypeError, match="sample_groups has no option topk"):
        train.sample_groups(None, make_prompts(), **options, topk=5)


def make_groups(*rewards):
    """Groups with these rewards; the prompt of each is its mean reward, and each token is the reward itself."""
    rewards = np.array(rewards, float)
    prompts = {"tokens": rewards.mean(1, keepdims=True), "mask": np.ones((len(rewards), 1), bool)}
    samples = Samples(rewards.reshape(-1, 1), -rewards.reshape(-1, 1))
    return Groups.of(prompts, samples, RewardValues(rewards.reshape(-1), {"a": rewards.reshape(-1)}))


def test_metrics_of_groups():
    tokens = np.array([[5, 3, -1], [5, 6, 7], [3, -1, -1], [5, 5, 3]])
    rewards = RewardValues(np.array([1.0, 0, 1, 1]), {"a": np.array([1.0, 0, 1, 1]), "b": np.array([1.0, 1, 0, 1])})
    prompts = {"tokens": np.ones((2, 1)), "mask": np.ones((2, 1), bool)}
    groups = Groups.of(prompts, Samples(tokens, np.zeros((4, 3))), rewards, stop_tokens=(3,))
    assert groups.metrics == {
        "reward": 0.75, "rewards/a": 0.75, "rewards/b": 0.75, "solved": 0.5, "length": 2.25, "unfinished": 0.25,
        "no_signal": 0.5,
    }  # fmt: skip


def test_groups_with_unequal_rewards_fill_a_batch():
    draws = [make_groups((0, 0), (0, 2)), make_groups((1, 1), (1, 3)), make_groups((5, 5), (5, 9))]
    taken = []

    def take(count):
        taken.clear()
        for groups in draws[:count]:
            taken.append(groups)
            yield groups

    found = fill_groups(take(3), 2)
    assert len(taken) == 2 and found.metrics["draws"] == 2
    np.testing.assert_array_equal(found.rewards, [[0, 2], [1, 3]])
    np.testing.assert_array_equal(found.prompts["tokens"][:, 0], found.rewards.mean(1))
    np.testing.assert_array_equal(found.samples.tokens[:, 0], found.rewards.reshape(-1))
    np.testing.assert_array_equal(found.samples.sampling_log_probs, -found.samples.tokens)
    assert found.metrics["reward"] == 1.0 and found.metrics["no_signal"] == 0.5

    alone = fill_groups(take(1), 2)
    np.testing.assert_array_equal(alone.rewards, [[0, 2], [0, 0]])
    with pytest.raises(ValueError, match="1 draws have 2 groups: expected 3"):
        fill_groups(take(1), 3)
