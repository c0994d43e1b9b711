#!/usr/bin/env python3
"""Which folder of src may import which. Fails where an import goes up, where a folder is not in the list, and where the
table in ARCHITECTURE.md says other imports than the code has.

tests/layers.py            checks, and says what is wrong
tests/layers.py --graph    prints the folders and what each imports, for ARCHITECTURE.md
tests/layers.py --self-test
"""

import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# From the lowest up. The gateway's rooms are listed one by one, so that they stay in one line.
GATEWAY = [
    "credit",
    "task",
    "warnings",
    "miss",
    "options",
    "slot",
    "chunk",
    "bucket",
    "tiers",
    "fetch",
    "lower",
    "for_peer",
    "store",
    "load",
    "lookup",
]
LAYERS = {
    "format": [],
    "arena": ["format"],
    "protocol": ["format"],
    "config": ["format", "protocol"],
    "metrics": [],
    "s3/dns": [],
    "s3/fanout": ["metrics"],
    "s3/net": ["arena", "metrics", "s3/dns", "s3/fanout"],
    "s3/object": ["format", "metrics", "protocol", "s3/dns", "s3/fanout", "s3/net"],
    "cache/admission": ["cache/recent"],
    "cache/episode": [],
    "cache/existence": ["format", "metrics", "s3", "cache/episode"],
    "cache/recent": ["format"],
    "cache/peers": ["arena", "format", "metrics", "s3", "cache/recent"],
    "cache/tier": ["arena", "format", "metrics", "protocol", "cache/recent"],
    "cache/gateway/credit": [],
    "cache/gateway/task": ["metrics"],
    "cache/gateway/warnings": ["cache/episode"],
    "cache/gateway/miss": ["format", "s3/object"],
    "cache/gateway/options": ["arena", "cache/existence", "config", "format", "s3"],
    "cache/gateway/slot": ["arena", "format"],
    "cache/gateway/chunk": ["arena", "cache/gateway/credit", "format", "protocol"],
    "cache/gateway/bucket": [
        *("arena", "cache/existence", "cache/recent", "format", "metrics", "s3/object"),
        *(f"cache/gateway/{leaf}" for leaf in ("credit", "miss", "options", "slot", "warnings")),
    ],
    "cache/gateway/tiers": [
        *("arena", "cache/admission", "cache/peers", "cache/recent", "cache/tier", "format", "metrics", "protocol"),
        *(f"cache/gateway/{room}" for room in ("bucket", "chunk", "credit", "miss", "task", "warnings")),
    ],
    "cache/gateway/fetch": [
        *("arena", "cache/existence", "cache/peers", "cache/tier", "format", "metrics", "protocol"),
        *("s3/net", "s3/object"),
        *(f"cache/gateway/{room}" for room in ("bucket", "chunk", "miss", "task", "tiers")),
    ],
    "cache/gateway/lower": [
        *("arena", "cache/admission", "cache/existence", "cache/tier", "format", "metrics", "protocol", "s3/object"),
        *(f"cache/gateway/{room}" for room in ("bucket", "chunk", "fetch", "tiers")),
    ],
    "cache/gateway/for_peer": [
        *("cache/peers", "format"),
        *(f"cache/gateway/{room}" for room in ("bucket", "chunk", "fetch", "lower", "tiers")),
    ],
    "cache/gateway/store": [
        *("cache/tier", "format", "protocol"),
        *(f"cache/gateway/{room}" for room in ("credit", "lower", "slot", "tiers")),
    ],
    "cache/gateway/load": [
        *("arena", "format", "metrics", "protocol", "s3/object"),
        *(f"cache/gateway/{room}" for room in ("bucket", "chunk", "credit", "fetch", "lower", "miss", "task", "tiers")),
    ],
    "cache/gateway/lookup": [
        *("cache/existence", "cache/gateway/bucket", "cache/gateway/tiers", "format", "protocol", "s3/object"),
    ],
    # The face: all public methods, and nothing that the rooms use.
    "cache/gateway": [
        *("arena", "cache/existence", "cache/peers", "config", "format", "metrics", "protocol", "s3"),
        *(f"cache/gateway/{room}" for room in GATEWAY),
    ],
    "inventory": ["arena", "cache", "format", "protocol", "s3"],
    "node": ["arena", "cache", "format", "protocol", "s3"],
    "node/api": ["arena", "cache", "config", "format", "metrics", "node", "protocol", "s3"],
    "node/daemon": ["arena", "cache", "config", "format", "inventory", "node", "node/api", "s3"],
    "engine/client": ["arena", "format", "protocol"],
    "engine/copy": ["arena", "config", "format", "protocol"],
    "engine/rank": ["arena", "engine/client", "engine/copy", "format", "protocol"],
    "engine/follower": ["engine/client", "format", "protocol"],
    "engine/direct": ["engine/client", "engine/copy", "engine/rank", "format", "protocol"],
    "embedded": [],
    "tools": ["arena", "cache", "config", "embedded", "engine", "format", "inventory", "node", "protocol", "s3"],
}
# They put the folders together.
ROOTS = {"lib.rs", "main.rs"}
IMPORT = re.compile(r"\bcrate::((?:\w+::)*\w+)")
GROUP = re.compile(r"\bcrate::((?:\w+::)*)\{([^;]*?)\}\s*;", re.DOTALL)
SUPER = re.compile(r"\b(?:super::)+")
# `super` means another module there.
TESTS = re.compile(r"#\[cfg\(test\)\]\s*mod \w+ \{.*", re.DOTALL)
COMMENT = re.compile(r"//[^\n]*")


def folder_of(path):
    """The entry of LAYERS that a path below src belongs to: the longest that fits."""
    fits = [layer for layer in LAYERS if path == layer or path.startswith((layer + "/", layer + ".rs"))]
    return max(fits, key=len, default=None)


def imports(source, module):
    """Paths below the crate that a file names; `module` is its own."""
    source = TESTS.sub("", COMMENT.sub("", source))
    source = SUPER.sub(lambda up: "crate::" + "".join(f"{part}::" for part in module[: -up[0].count("super")]), source)
    for base, names in GROUP.findall(source):
        for name in re.split(r",(?![^{]*\})", names):
            yield (base + name.strip()).split("::{")[0]
    yield from IMPORT.findall(source)


def target_of(path, src):
    """The folder that a module path is in."""
    parts = path.split("::")
    best = None
    for end in range(1, len(parts) + 1):
        place = "/".join(parts[:end])
        if (src / place).is_dir() or (src / f"{place}.rs").is_file():
            best = place
    return None if best is None else folder_of(best) or best


def edges(src):
    """Every import between folders: (from, to) -> the files that have it. Also files that are in no folder of the list."""
    found, strays = defaultdict(set), []
    for file in sorted(src.rglob("*.rs")):
        name = file.relative_to(src).as_posix()
        if name in ROOTS:
            continue
        source = folder_of(name)
        if source is None:
            # `mod.rs` of a folder whose parts are listed only names them.
            if not (file.name == "mod.rs" and any(layer.startswith(f"{file.parent.name}/") for layer in LAYERS)):
                strays.append(name)
            continue
        module = [part for part in name.removesuffix(".rs").split("/") if part != "mod"]
        for path in imports(file.read_text(), module):
            target = target_of(path, src)
            if target is not None and target != source:
                found[source, target].add(name)
    return found, strays


def may(source, target):
    """With a folder come those within it, unless the one that imports is within it, too."""
    return any(
        target == layer or (target.startswith(layer + "/") and not source.startswith(layer + "/"))
        for layer in LAYERS.get(source, [])
    )


def check(src):
    found, strays = edges(src)
    wrong = [f"src/{name} is in no folder of tests/layers.py: put it into one, or list its folder" for name in strays]
    for (source, target), files in sorted(found.items()):
        if not may(source, target):
            wrong.append(
                f"src/{source} may not import src/{target}: {', '.join('src/' + name for name in sorted(files))}"
            )
    wrong += [
        f"tests/layers.py lists src/{layer}, which is not there"
        for layer in LAYERS
        if not (src / layer).exists() and not (src / f"{layer}.rs").exists()
    ]
    return wrong + cycles()


def cycles():
    """Of the list itself."""
    wrong, done = [], set()

    def visit(layer, way):
        if layer in way:
            wrong.append(f"tests/layers.py has a circle: {' -> '.join([*way[way.index(layer) :], layer])}")
        elif layer not in done:
            for target in LAYERS:
                if target != layer and may(layer, target):
                    visit(target, [*way, layer])
            done.add(layer)

    for layer in LAYERS:
        visit(layer, [])
    return wrong


def table(src, page):
    """What is wrong with the page's table of the top folders: a line `| folder | imports |` for each."""
    found, _ = edges(src)
    tops = list(dict.fromkeys(layer.split("/")[0] for layer in LAYERS))
    wrong = []
    for top in tops:
        targets = {target.split("/")[0] for source, target in found if source.split("/")[0] == top} - {top}
        line = f"| {top} | {', '.join(sorted(targets, key=tops.index)) or 'nothing'} |"
        if line not in page.splitlines():
            wrong.append(f"ARCHITECTURE.md lacks the line {line}")
    return wrong


def graph(src):
    found, _ = edges(src)
    for layer in LAYERS:
        targets = sorted({target for source, target in found if source == layer}, key=list(LAYERS).index)
        print(f"{layer:22} -> {', '.join(targets) or '(nothing)'}")


def self_test():
    """An import that is turned round is found, whatever it looks like."""
    turned = {
        "cache/gateway/up.rs": "use crate::node::Node;",
        "s3/net/up.rs": "fn f() { crate::s3::object::get(); }",
        "format/up.rs": "use crate::{arena::Arena, format::Space};",
        "cache/gateway/tiers/up.rs": "use super::super::load::LoadSpec;",
        "cache/gateway/bucket/up.rs": "use crate::cache::gateway::Gateway;",
        "engine/client/up.rs": "use crate::engine::{copy::Copier, rank::{LoadJob, StoreJob}};",
    }
    with tempfile.TemporaryDirectory() as folder:
        src = Path(folder)
        for layer in LAYERS:
            place = src / layer
            place.parent.mkdir(parents=True, exist_ok=True)
            place.mkdir(exist_ok=True)
        (src / "cache/gateway/down.rs").write_text("use crate::s3::object::ObjectStore; // crate::node::Node\n")
        assert check(src) == [], check(src)
        for name, text in turned.items():
            (src / name).write_text(text)
            assert any(name in line for line in check(src)), f"{name}: {text} is not found"
            (src / name).unlink()
        (src / "stray.rs").write_text("")
        assert check(src), "a file in no folder is not found"
    print("ok: imports that go up are found")


def main():
    src = ROOT / "src"
    if "--self-test" in sys.argv:
        return self_test()
    if "--graph" in sys.argv:
        return graph(src)
    wrong = check(src) + table(src, (ROOT / "ARCHITECTURE.md").read_text())
    print("\n".join(wrong) or f"ok: {len(LAYERS)} folders, no import goes up")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
