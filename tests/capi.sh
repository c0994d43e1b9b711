#!/usr/bin/env bash
# The C API: the library is installed into a folder, a program in C and C++ is built by pkg-config, and runs against a gateway.
#
#   tests/capi.sh                                    with a library that it builds
#   KVGATE_TEST_PREFIX=FOLDER tests/capi.sh          with the one of a release's archive, unpacked there
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp -d)
daemon=
trap 'kill $daemon 2>/dev/null || true; rm -rf "$work" "/dev/shm/kvgate-capi-$$"' EXIT

prefix=${KVGATE_TEST_PREFIX:-}
kvgate=${KVGATE_TEST_BIN:-$prefix/bin/kvgate}
if [ -z "$prefix" ]; then
    cargo build --release --quiet --locked -p kvgate -p kvgate-capi
    build=${CARGO_TARGET_DIR:-target}/release prefix=$work/prefix
    capi/install.sh "$build" "$prefix"
    kvgate=${KVGATE_TEST_BIN:-$build/kvgate}
fi

export PKG_CONFIG_PATH=$prefix/lib/pkgconfig LD_LIBRARY_PATH=$prefix/lib
read -ra flags < <(pkg-config --cflags --libs kvgate)
strict=(-O1 -Wall -Wextra -Wpedantic -Werror)
gcc -std=c11 "${strict[@]}" tests/capi/check.c -o "$work/in-c" "${flags[@]}"
g++ -std=c++17 "${strict[@]}" -x c++ tests/capi/check.c -x none -o "$work/in-cpp" "${flags[@]}"

# The library exports what the header names, and nothing else.
nm -D --defined-only "$prefix/lib/libkvgate.so" | awk '{ print $NF }' | grep -v '^_' | sort >"$work/exported"
grep -o '\bkvgate_[a-z_]*(' capi/include/kvgate.h | tr -d '(' | sort -u >"$work/named"
diff "$work/named" "$work/exported"

"$kvgate" serve --embedded "$work/data" --socket "$work/kvgate.sock" --arena-path "/dev/shm/kvgate-capi-$$" >"$work/log" 2>&1 &
daemon=$!
for _ in $(seq 100); do
    if grep -q serves "$work/log"; then break; fi
    sleep 0.1
done
"$work/in-c" "$work/kvgate.sock"
"$work/in-cpp" "$work/kvgate.sock"
