#!/usr/bin/env bash
# Puts the C library, its header and its pkg-config file into a folder, for a release archive or a system.
#
#   cargo build --profile dist -p kvgate-capi
#   capi/install.sh target/dist /usr/local      # lib/libkvgate.so, include/kvgate.h, lib/pkgconfig/kvgate.pc
set -euo pipefail
[ $# = 2 ] || { echo "usage: capi/install.sh BUILD_FOLDER PREFIX" >&2 && exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
built=$1/libkvgate_c.so prefix=$2
[ -e "$built" ] || { echo "there is no $built: run cargo build --profile dist -p kvgate-capi" >&2 && exit 1; }
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$here/../Cargo.toml" | head -n 1)

install -D -m 755 "$built" "$prefix/lib/libkvgate.so.0"
ln -sf libkvgate.so.0 "$prefix/lib/libkvgate.so"
install -D -m 644 "$here/include/kvgate.h" "$prefix/include/kvgate.h"
install -d "$prefix/lib/pkgconfig"
# Its paths are relative to itself, so the folder may be moved.
sed "s/@VERSION@/$version/" "$here/kvgate.pc.in" >"$prefix/lib/pkgconfig/kvgate.pc"
