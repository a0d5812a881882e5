import unittest

from ledger import format_amount, parse_amount, parse_line, totals


class Amounts(unittest.TestCase):
    def test_plain(self):
        self.assertEqual(parse_amount("12.34"), 1234)

    def test_whole(self):
        self.assertEqual(parse_amount("12"), 1200)

    def test_one_digit(self):
        self.assertEqual(parse_amount("12.5"), 1250)

    def test_thousands(self):
        self.assertEqual(parse_amount("1,234.56"), 123456)

    def test_negative(self):
        self.assertEqual(parse_amount("-0.50"), -50)


class Lines(unittest.TestCase):
    def test_line(self):
        self.assertEqual(parse_line("rent: 900.00"), ("rent", 90000))

    def test_colon_in_account(self):
        self.assertEqual(parse_line("home:rent: 900.00"), ("home:rent", 90000))


class Sums(unittest.TestCase):
    def test_sum(self):
        self.assertEqual(totals(["a: 1.00", "b: 2.00", "a: 3.00"]), {"a": 400, "b": 200})

    def test_comments(self):
        self.assertEqual(totals(["# a note", "   ", "a: 1.00"]), {"a": 100})


class Format(unittest.TestCase):
    def test_format(self):
        self.assertEqual(format_amount(1234), "12.34")

    def test_padding(self):
        self.assertEqual(format_amount(1205), "12.05")

    def test_negative(self):
        self.assertEqual(format_amount(-50), "-0.50")


if __name__ == "__main__":
    unittest.main()
