#!/usr/bin/env bash
# The daemon against its own description: schemathesis makes calls from docs/openapi.json, and the answers must be as it says.
#
#     tests/api.sh            with the tools of tests/servers/install.sh python
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=tests/servers/common.sh
source tests/servers/common.sh

work=$(mktemp -d)
port=${KVGATE_TEST_API_PORT:-9380}
trap 'kill "$daemon" 2>/dev/null || true; rm -rf "$work" "/dev/shm/kvgate-api-$$"' EXIT

cargo build --quiet --bin kvgate
"${CARGO_TARGET_DIR:-target}/debug/kvgate" serve --embedded "$work/data" --socket "$work/kvgate.sock" \
    --listen "127.0.0.1:$port" --arena-path "/dev/shm/kvgate-api-$$" >"$work/log" 2>&1 &
daemon=$!
for _ in $(seq 100); do
    grep -q serves "$work/log" && break
    sleep 0.1
done

# Streams (attach) end only with their client, and /v1/load needs a session: tests/it has those.
"$VENV/bin/schemathesis" run "http://127.0.0.1:$port/v1/openapi.json" --url "http://127.0.0.1:$port" \
    --exclude-path /v1/attach --exclude-path / \
    --checks not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance \
    --max-examples "${KVGATE_TEST_API_EXAMPLES:-40}" --seed 1 --no-color --request-timeout 20
kill -0 "$daemon"
