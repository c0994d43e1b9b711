#!/usr/bin/env python3
"""docs/THREATS.md names a test for each claim. Every one of them must exist.

`file::test` is in tests/it/file.rs; with a folder the file is named whole.

tests/threats.py
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/THREATS.md"
# The page has some more. Fewer: names are written in a way that is not read here.
LEAST = 40
NAMED = re.compile(r"`([\w./]+)::(\w+)`")


def missing(text):
    for file, test in sorted(set(NAMED.findall(text))):
        path = ROOT / (file if "/" in file else f"tests/it/{file}.rs")
        if not path.is_file():
            yield f"there is no {path.relative_to(ROOT)}"
        elif not re.search(rf"(?m)^\s*(async fn|fn|def) {test}\(", path.read_text()):
            yield f"{path.relative_to(ROOT)} has no test {test}"


def main():
    text = PAGE.read_text()
    named = len(set(NAMED.findall(text)))
    problems = list(missing(text))
    if named < LEAST:
        problems.append(f"only {named} tests are named: at least {LEAST} were")
    print("\n".join(problems) or f"all {named} tests exist")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
