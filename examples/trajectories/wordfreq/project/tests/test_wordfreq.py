import unittest

import wordfreq


class Words(unittest.TestCase):
    def test_lower_case(self):
        self.assertEqual(wordfreq.words("Box Wood"), ["box", "wood"])

    def test_punctuation(self):
        self.assertEqual(wordfreq.words("box, wood; box."), ["box", "wood", "box"])

    def test_lines_and_blanks(self):
        self.assertEqual(wordfreq.words("box\n  wood "), ["box", "wood"])


class Count(unittest.TestCase):
    def test_twice(self):
        self.assertEqual(wordfreq.count(["a b", "a"]), {"a": 2, "b": 1})


class Top(unittest.TestCase):
    def test_most_frequent_first(self):
        self.assertEqual(wordfreq.top({"a": 1, "b": 3, "c": 2}, 2), [("b", 3), ("c", 2)])

    def test_ties(self):
        self.assertEqual(wordfreq.top({"b": 1, "a": 1}, 2), [("a", 1), ("b", 1)])


if __name__ == "__main__":
    unittest.main()
