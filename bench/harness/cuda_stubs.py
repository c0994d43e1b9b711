"""Makes PyTorch's CUDA build start without CUDA: small libraries with every symbol that its own ones want.

    cuda_stubs.py SITE_PACKAGES

On PyPI there is no other build for x86, and CUDA's libraries are 2.7 GB that a CPU never runs. Every function fails
with an error code; so PyTorch sees a machine without a GPU. Needs readelf and gcc.
"""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

STAND_INS = re.compile(r"^lib(cu|nccl|nv)")
# Unversioned symbols that no library of PyTorch's has, and that are CUDA's by their name.
CUDA_SYMBOL = re.compile(r"^(_*cu|p?nccl|nv|cupti)")
# Where an error code would be taken for a pointer, or what is behind the pointer is used all the same.
SPECIAL = {
    "cudaGetErrorString": 'const char *cudaGetErrorString(int e) { return "no CUDA here"; }',
    "cudaGetErrorName": 'const char *cudaGetErrorName(int e) { return "cudaErrorStub"; }',
    "cudaRuntimeGetVersion": "int cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }",
    "cudaDriverGetVersion": "int cudaDriverGetVersion(int *version) { *version = 0; return 0; }",
    "cudaGetDeviceCount": "int cudaGetDeviceCount(int *count) { *count = 0; return 100; }",
    "__cudaRegisterFatBinary": "void **__cudaRegisterFatBinary(void *binary) { static void *at[64]; return at; }",
    "cudaGetLastError": "int cudaGetLastError(void) { return 0; }",
    "cudaPeekAtLastError": "int cudaPeekAtLastError(void) { return 0; }",
}


def readelf(*flags: str | Path) -> list[str]:
    done = subprocess.run(["readelf", "--wide", *map(str, flags)], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def needed(library: Path) -> list[str]:
    """The stand-ins that a library names."""
    found = (re.search(r"\(NEEDED\).*\[(.+)\]", line) for line in readelf("--dynamic", library))
    return [match[1] for match in found if match and STAND_INS.match(match[1])]


def version_homes(library: Path) -> dict[str, str]:
    """Which stand-in a symbol's version must come from."""
    homes, home = {}, ""
    for line in readelf("--version-info", library):
        if match := re.search(r"File: (\S+)", line):
            home = match[1]
        elif (match := re.search(r"Name: (\S+)\s+Flags", line)) and STAND_INS.match(home):
            homes[match[1]] = home
    return homes


def symbols(library: Path) -> tuple[set[str], set[tuple[str, str, str]]]:
    """Names that it defines, and (name, version, type) that it wants."""
    defined, wanted = set(), set()
    for line in readelf("--dyn-syms", library):
        fields = line.split()
        if len(fields) < 8 or not fields[0].endswith(":"):
            continue
        name, _, version = fields[7].partition("@")
        if fields[6] == "UND":
            wanted.add((name, version, fields[3]))
        else:
            defined.add(name)
    return defined, wanted


def source(name: str, kind: str) -> str:
    if name in SPECIAL:
        return SPECIAL[name]
    return f"char {name}[4096];" if kind == "OBJECT" else f"int {name}(void) {{ return 100; }}"


def build(path: Path, content: set[tuple[str, str, str]]) -> None:
    versions = defaultdict(list)
    for name, version, _ in content:
        if version:
            versions[version].append(name)
    code, script = path.with_suffix(".c"), path.with_suffix(".map")
    code.write_text("\n".join(source(name, kind) for name, _, kind in sorted(content)) + "\n")
    script.write_text("".join(f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in versions.items()))
    command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", "-o", path, code, f"-Wl,-soname,{path.name}"]
    if versions:
        command.append(f"-Wl,--version-script={script}")
    subprocess.run(list(map(str, command)), check=True)
    code.unlink()
    script.unlink()


def main(packages: Path) -> None:
    libraries = sorted((packages / "torch" / "lib").glob("*.so"))
    # Where PyTorch looks for CUDA's.
    folder = packages / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True, exist_ok=True)
    stand_ins, homes, defined, wanted = defaultdict(set), {}, set(), set()
    for library in libraries:
        for name in needed(library):
            stand_ins[name] = set()
        homes.update(version_homes(library))
        has, wants = symbols(library)
        defined |= has
        wanted |= wants
    # A symbol without a version may come from any library that is loaded.
    anywhere = next(name for name in stand_ins if name.startswith("libcudart"))
    for name, version, kind in wanted:
        if version in homes:
            stand_ins[homes[version]].add((name, version, kind))
        elif not version and name not in defined and CUDA_SYMBOL.match(name):
            stand_ins[anywhere].add((name, version, kind))
    for name, content in stand_ins.items():
        build(folder / name, content)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
