"""Counts the words of texts: python3 wordfreq.py FILE..."""

import sys


def words(text):
    """Splits text into lower-case words."""
    return text.lower().split(" ")


def count(texts):
    """Counts the words of several texts together."""
    counts = {}
    for text in texts:
        for word in words(text):
            counts[word] = 1
    return counts


def top(counts, n):
    """Gives the n most frequent words, ties in alphabetical order."""
    return sorted(counts.items(), key=lambda item: item[1])[:n]


def main(paths):
    texts = [open(path).read() for path in paths]
    for word, n in top(count(texts), 10):
        print(f"{n:6} {word}")


if __name__ == "__main__":
    main(sys.argv[1:])
