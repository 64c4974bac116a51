"""All ranks are told the same when they ask for the newest checkpoint, and can read what they were told."""

from __future__ import annotations

from raysgd.controller.loads import LoadAnswers


def test_the_answer_of_the_first_is_that_of_all() -> None:
    answers = LoadAnswers()
    assert answers.answer(0, 1, None) is None
    assert answers.answer(0, 1, 1) is None  # a checkpoint was committed between the questions of two ranks
    assert answers.answer(1, 1, 1) == 1
    assert answers.answer(1, 1, 2) == 1
    assert answers.answer(2, 2, 2) == 2


def test_what_nobody_was_told_goes_at_once() -> None:
    answers = LoadAnswers()
    assert answers.may_go(1)
    answers.answer(0, 1, 2)
    assert answers.may_go(1)
    assert answers.committed(3) == [] == answers.end()


def test_an_answer_stays_until_all_ranks_have_saved_again() -> None:
    answers = LoadAnswers(first_number=5)
    answers.committed(5)
    assert answers.answer(0, 2, 5) == 5  # rank 0 has saved 5 and 6; rank 1 has yet to ask
    assert answers.committed(6) == []
    assert not answers.may_go(5)
    assert answers.answer(0, 2, 6) == 5
    assert answers.committed(7) == [5]
    assert answers.committed(8) == []


def test_a_late_question_does_not_shorten_the_stay() -> None:
    answers = LoadAnswers()
    answers.answer(0, 1, 1)
    answers.answer(1, 2, 1)
    answers.answer(0, 1, 1)  # of a rank that has yet to ask for the second time
    answers.committed(2)
    assert not answers.may_go(1)


def test_one_that_was_read_by_all_goes_with_the_save_that_shows_it() -> None:
    answers = LoadAnswers()
    answers.answer(0, 1, 1)
    assert answers.committed(2) == []
    assert answers.may_go(1)


def test_the_end_of_the_attempt_lets_everything_go() -> None:
    answers = LoadAnswers()
    answers.answer(0, 3, 1)
    answers.answer(1, 3, 2)
    assert not answers.may_go(2) and not answers.may_go(1)
    assert answers.end() == [1, 2]
    assert answers.end() == []
