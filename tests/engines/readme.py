"""The commands of a section of README.md, as a reader would type them."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def commands(section):
    """Each command of the section's shell blocks, with the lines that belong to it."""
    text = README.read_text()
    found = re.search(rf"^## {section}\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"^```sh\n(.*?)^```", found[1], re.MULTILINE | re.DOTALL)
    return [command for block in blocks for command in split(block)]


def split(block):
    """A command goes on as long as a quote is open, or after a pipe."""
    command, found = "", []
    for line in block.splitlines():
        command += line + "\n"
        if command.count("'") % 2 == 0 and not line.rstrip().endswith(("|", "\\")):
            found.append(command.strip())
            command = ""
    return found
