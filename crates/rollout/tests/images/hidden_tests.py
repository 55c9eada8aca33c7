"""Hidden tests; the first statement is not on the first line, as in most files."""

from __future__ import annotations

import unittest

import pytest
from calc import total


def test_total():
    assert total([1, 2, 3]) == 6
    assert total([]) == 0


@pytest.mark.parametrize("n", [1, 2])
def test_single(n):
    if total([n]) == n:
        return
    raise AssertionError


@pytest.mark.xfail
def test_wrong():
    assert total([1]) == 2


class TestPlain:
    def test_method(self, tmp_path, capsys):
        print("printed")
        result = total([4])
        assert result == 4


class TestCase(unittest.TestCase):
    def test_case(self):
        self.assertEqual(total([4, 5]), 9)


class TestCleanup(unittest.TestCase):
    def setUp(self):
        self.items = [1, 1]

    def tearDown(self):
        self.items.clear()

    def test_items(self):
        self.assertEqual(total(self.items), 2)


def test_raises():
    with pytest.raises(TypeError):
        total(3)
