"""Prompts of digits with their answers, and examples of which a share is right."""

from zoo.text.tasks.digit_sorting import count_sorted_digits, list_sorting_examples, list_sorting_prompts


def test_prompts_are_answered_by_sorted_digits():
    prompts = list_sorting_prompts()
    assert len({record["prompt"] for record in prompts}) == 10_000
    assert prompts[3141] == {"prompt": "3141=", "answer": "1134"}


def test_a_share_of_the_examples_is_sorted():
    examples = list_sorting_examples(4_000, sorted_share=0.3)
    pairs = [(example["prompt"][:4], example["completion"]) for example in examples]
    assert all(sorted(digits) == sorted(answer) for digits, answer in pairs)
    share = sum("".join(sorted(digits)) == answer for digits, answer in pairs) / len(pairs)
    assert 0.31 < share < 0.37  # 0.3, and a shuffle in 24, or more with equal digits, is sorted by chance
    assert list_sorting_examples(4_000, seed=1) != examples


def test_digits_in_their_place_are_rewarded():
    record = {"answer": "1134"}
    texts = ["1134", "1143", "113", "", "11345"]
    assert count_sorted_digits(texts, [record] * 5) == [1, 0.5, 0.75, 0, 1]
