"""Examples of responses and of what they are worth. Run them with: python test_my_reward.py (or pytest)."""

from types import SimpleNamespace

from my_reward import plural

TASK = SimpleNamespace(raw_task={"prompt": "What is the plural of 'box'?", "answer": "boxes"})


def test_a_right_answer_in_a_short_sentence() -> None:
    assert plural("The plural of 'box' is 'Boxes'.", TASK) == {"correct": 1.0, "form": 0.2}


def test_a_wrong_answer_in_a_short_sentence() -> None:
    assert plural("The plural is box.", TASK) == {"correct": 0.0, "form": 0.2}


def test_a_right_answer_after_many_words() -> None:
    assert plural("In the English language the plural of the word box is boxes", TASK) == {"correct": 1.0, "form": 0.0}


def test_an_empty_response_is_worth_nothing() -> None:
    assert plural("", TASK) == {"correct": 0.0, "form": 0.0}


if __name__ == "__main__":
    tests = [test for name, test in sorted(globals().items()) if name.startswith("test_")]
    for test in tests:
        test()
    print(f"{len(tests)} tests passed")
