#!/usr/bin/env bash
# zig as Cargo's linker and C compiler: release/build.sh sets KVGATE_ZIG_TARGET, such as x86_64-linux-gnu.2.28. One path for wheel
# and archive, so that Cargo compiles the crates of both once.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
arguments=()
for argument; do
    # zig does not know --exclude-libs, which keeps a dependency's C API out of ours; the last version script wins.
    case $argument in
        -Wl,--exclude-libs,ALL) argument=-Wl,--version-script=$here/exports.map ;;
    esac
    arguments+=("$argument")
done
exec cargo-zigbuild zig cc -- -g -fno-sanitize=all -target "$KVGATE_ZIG_TARGET" "${arguments[@]}"
