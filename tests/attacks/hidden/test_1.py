from calc import double, largest, total
from tests.helper import near


def test_total():
    assert total([1, 2, 3]) == 6


def test_total_of_nothing():
    assert total([]) == 0


def test_total_of_one():
    assert near(total([4]), 4)


def test_largest():
    assert largest([3, 1, 2]) == 3


def test_double():
    assert double(2) == 4
