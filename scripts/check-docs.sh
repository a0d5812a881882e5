#!/usr/bin/env bash
# check-docs.sh [FILE.md...]: runs the commands that README.md and docs/ show.
#
# A block is run if the line before its fence is
#     <!-- run -->  or  <!-- run: fails -->  for a command that must fail
# and the fence is ```console: lines that begin with "$ " are commands, run in
# one shell a block at the top of the checkout with bin/ and .venv/bin in PATH.
# Lines without it are output, of which "..." stands for anything; they must
# occur in the real output, in that order. Blocks without the mark are only shown.
#
# A block after <!-- file: PATH --> must stand in that file as it is, which is run
# elsewhere.
#
# Links to files of the checkout must lead somewhere, in every page.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
PATH=$PWD/bin:$PWD/.venv/bin:$PATH
if [ $# -eq 0 ]; then
  mapfile -t pages < <(git ls-files -co --exclude-standard '*.md')
  set -- "${pages[@]}"
fi
exec python3 - "$@" <<'PY'
import os, re, subprocess, sys

LIMIT = 120  # seconds a block may take
failures = ran = links = 0


def fail(page, line, why):
    global failures
    failures += 1
    print(f"{page}:{line}: {why}", file=sys.stderr)


def occurs(expected, output):
    at = 0
    for line in expected:
        pattern = re.compile(".*".join(re.escape(part) for part in line.rstrip().split("...")))
        match = pattern.search(output, at)
        if not match:
            return line
        at = match.end()
    return None


def run(page, line, block, must_fail):
    global ran
    ran += 1
    commands = [text[2:] for text in block if text.startswith("$ ")]
    expected = [text for text in block if not text.startswith("$ ") and text.strip()]
    try:
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", "\n".join(commands)], stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return fail(page, line, f"not done in {LIMIT} s: {commands}")
    if (done.returncode != 0) != must_fail:
        return fail(page, line, f"exit status {done.returncode} of {commands}\n{done.stdout[-2000:]}")
    absent = occurs(expected, done.stdout)
    if absent is not None:
        fail(page, line, f"the output lacks {absent!r}:\n{done.stdout[-2000:]}")


def stands(page, line, block, path):
    if "\n".join(block) not in open(path, encoding="utf-8").read():
        fail(page, line, f"the block isn't what stands in {path}")


for page in sys.argv[1:]:
    lines = open(page, encoding="utf-8").read().split("\n")
    mark, block, start, fenced, source, quoted = None, None, 0, False, None, None
    for number, text in enumerate(lines, 1):
        if text.startswith("```"):
            if not fenced and mark and text.strip() == "```console":
                block, start = [], number
            elif not fenced and source:
                quoted, start = [], number
            elif fenced and block is not None:
                run(page, start, block, mark == "fails")
                block = None
            elif fenced and quoted is not None:
                stands(page, start, quoted, source)
                source = quoted = None
            fenced = not fenced
            if not fenced:
                mark = None
        elif block is not None:
            block.append(text)
        elif quoted is not None:
            quoted.append(text)
        elif not fenced:
            if found := re.fullmatch(r"<!-- run(?:: (fails))? -->", text.strip()):
                mark = found[1] or "works"
            if found := re.fullmatch(r"<!-- file: (\S+) -->", text.strip()):
                source = found[1]
            for target in re.findall(r"\]\(([^)#\s]+)", text):
                if "://" not in target and not target.startswith("mailto:"):
                    links += 1
                    if not os.path.exists(os.path.join(os.path.dirname(page), target)):
                        fail(page, number, f"a link leads nowhere: {target}")
print(f"docs: {len(sys.argv) - 1} pages, {ran} blocks run, {links} links followed, {failures} failures")
sys.exit(failures > 0)
PY
