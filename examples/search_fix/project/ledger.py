"""A small ledger: amounts in cents, parsed from text, summed by account."""


def parse_amount(text):
    """'12.34' -> 1234; a minus in front and thousands commas are allowed."""
    sign = -1 if text.startswith("-") else 1
    whole, _, cents = text.lstrip("-").partition(".")
    return sign * (int(whole) * 100 + int(cents))


def parse_line(line):
    """'groceries: 12.34' -> ('groceries', 1234)."""
    account, amount = line.split(":")
    return account, parse_amount(amount.strip())


def totals(lines):
    """Sums the lines by account; blank lines and comments don't count."""
    sums = {}
    for line in lines:
        if not line:
            continue
        account, amount = parse_line(line)
        sums[account] = amount
    return sums


def format_amount(cents):
    """1234 -> '12.34'."""
    return f"{cents // 100}.{cents % 100}"
