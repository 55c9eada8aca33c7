from calc import double, largest
from tests.helper import near


def test_largest():
    assert largest([3, 1, 2]) == 3


def test_double():
    assert near(double(2), 4)
