#!/usr/bin/env python3
"""Writes the blocking face of the Python package from the asyncio one, boxwood/aio.

The two are the same code: what is written here lacks `async` and `await`, and a few
names differ (NAMES). What can't be had that way lies in boxwood/_face.py and
boxwood/aio/_face.py, which are written by hand. `--check` writes nothing and fails
if something would change.
"""

from __future__ import annotations

import io
import pathlib
import re
import subprocess
import sys
import tokenize

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "python-client" / "src" / "boxwood"
MODULES = ("client", "fork", "images", "node", "run", "sandbox", "session", "tree", "turn")

NAMES = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "AsyncIterator": "Iterator",
    "AsyncGenerator": "Generator",
    "asynccontextmanager": "contextmanager",
    "aclosing": "closing",
    "Forking": "Children",
}
# Decorators and imports that only the asyncio face has.
LEFT_OUT = re.compile(r"^\s*@(pending|forking)\n|^from \._forking import forking\n", re.M)
IMPORTS = [
    (re.compile(r"^(\s*)from \.\.(?=[\w ])", re.M), r"\1from ."),
    (re.compile(r"^(\s*)from \._forking import", re.M), r"\1from .fork import"),
    (re.compile(r"^(from \._face import .*?)\bpending, ", re.M), r"\1"),
]


def blocking(source: str) -> str:
    """The blocking form of a module."""
    source = LEFT_OUT.sub("", source)
    for pattern, replacement in IMPORTS:
        source = pattern.sub(replacement, source)
    lines = source.splitlines(keepends=True)
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    for number, token in reversed(list(enumerate(tokens))):
        if token.type != tokenize.NAME:
            continue
        (row, start), (_, end) = token.start, token.end
        line = lines[row - 1]
        if token.string in ("async", "await"):
            after = tokens[number + 1]
            if after.start[0] != row:
                sys.exit(f"{token.string} and what it belongs to lie on two lines: {line}")
            lines[row - 1] = line[:start] + line[after.start[1] :]
        elif token.string in NAMES:
            lines[row - 1] = line[:start] + NAMES[token.string] + line[end:]
    return "".join(lines)


def tidy(text: str, path: pathlib.Path) -> str:
    """Sorted imports and the formatter's lines, which are shorter now."""
    ruff = str(PACKAGE.parents[2] / ".venv" / "bin" / "ruff")
    for arguments in (["check", "--quiet", "--fix", "--select", "I,F401,F811"], ["format", "--quiet"]):
        command = [ruff, *arguments, "--no-cache", "--stdin-filename", str(path), "-"]
        text = subprocess.run(command, input=text, text=True, stdout=subprocess.PIPE, check=True).stdout
    return text


def main() -> None:
    stale = []
    for name in MODULES:
        path = PACKAGE / f"{name}.py"
        head = f"# Written by scripts/gen-sync.py from aio/{name}.py: edit that.\n"
        text = tidy(head + blocking((PACKAGE / "aio" / f"{name}.py").read_text()), path)
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(text)
    if stale and "--check" in sys.argv:
        sys.exit(f"not what boxwood/aio gives: {', '.join(stale)}; run scripts/gen-sync.py")


if __name__ == "__main__":
    main()
