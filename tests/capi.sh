#!/usr/bin/env bash
# The C API: the library is installed into a folder, a program in C and C++ is built by pkg-config, and runs against a gateway.
#
#   tests/capi.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp -d)
daemon=
trap 'kill $daemon 2>/dev/null || true; rm -rf "$work" "/dev/shm/kvgate-capi-$$"' EXIT

# As the wheel is built, whose parts it takes.
cargo build --release --quiet --locked -p kvgate-capi
build=${CARGO_TARGET_DIR:-target}/release
kvgate=${KVGATE_TEST_BIN:-}
if [ -z "$kvgate" ]; then
    cargo build --release --quiet --locked --bin kvgate
    kvgate=$build/kvgate
fi
capi/install.sh "$build" "$work/prefix"

export PKG_CONFIG_PATH=$work/prefix/lib/pkgconfig LD_LIBRARY_PATH=$work/prefix/lib
read -ra flags < <(pkg-config --cflags --libs kvgate)
strict=(-O1 -Wall -Wextra -Wpedantic -Werror)
gcc -std=c11 "${strict[@]}" tests/capi/check.c -o "$work/in-c" "${flags[@]}"
g++ -std=c++17 "${strict[@]}" -x c++ tests/capi/check.c -x none -o "$work/in-cpp" "${flags[@]}"

# The library exports what the header names, and nothing else.
nm -D --defined-only "$work/prefix/lib/libkvgate.so" | awk '{ print $NF }' | grep -v '^_' | sort >"$work/exported"
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
