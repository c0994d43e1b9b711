#!/usr/bin/env bash
# The daemon against its own description: schemathesis makes calls from docs/openapi.json, and the answers must be as it says;
# over the unix socket, through a small forwarder since schemathesis knows TCP only, and by TCP with the token.
#
#     tests/api.sh            with the tools of tests/servers/install.sh python
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=tests/servers/common.sh
source tests/servers/common.sh

work=$(mktemp -d)
port=${KVGATE_TEST_API_PORT:-9380}
through=$((port + 1))
echo sesame >"$work/token"
trap 'kill "$daemon" $(jobs -p) 2>/dev/null || true; rm -rf "$work" "/dev/shm/kvgate-api-$$"' EXIT

# By itself cargo builds it with fewer features of what it depends on, and all of that anew.
kvgate=${KVGATE_TEST_BIN:-}
if [ -z "$kvgate" ]; then
    cargo build --quiet --bin kvgate
    kvgate=${CARGO_TARGET_DIR:-target}/debug/kvgate
fi
KVGATE__API__TOKEN_FILE=$work/token "$kvgate" serve --embedded "$work/data" --socket "$work/kvgate.sock" \
    --listen "127.0.0.1:$port" --arena-path "/dev/shm/kvgate-api-$$" >"$work/log" 2>&1 &
daemon=$!
for _ in $(seq 100); do
    grep -q serves "$work/log" && break
    sleep 0.1
done

# All calls come from the forwarder's process, so a session of one of them is a session of all.
"$VENV/bin/python" - "$through" "$work/kvgate.sock" <<'END' &
import socket, sys, threading

def copy(source, sink):
    """Until the end: the daemon may answer, and close, before it has read a body that it does not want."""
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
    except OSError:
        pass
    try:
        sink.shutdown(socket.SHUT_WR)
        while source.recv(1 << 16):
            pass
    except OSError:
        pass

with socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=64) as server:
    while True:
        client, _ = server.accept()
        daemon = socket.socket(socket.AF_UNIX)
        daemon.connect(sys.argv[2])
        for ends in [(client, daemon), (daemon, client)]:
            threading.Thread(target=copy, args=ends, daemon=True).start()
END
at="http://127.0.0.1:$through"
for _ in $(seq 100); do
    curl -fsS "$at/healthz" >/dev/null 2>&1 && break
    sleep 0.1
done

# The calls need a space and a session, whose stream stays open.
space='{"model":"test/api","revision":"1","dtype":"float16","chunk_tokens":16,"mha":{"layers":2,"heads":2,"head_dim":16}}'
space_id=$(curl -fsS -X PUT "$at/v1/spaces" -d "$space" | "$VENV/bin/python" -c 'import json, sys; print(json.load(sys.stdin)["space_id"])')
curl -fsSN -X POST "$at/v1/attach" -d '{"instance": "api.sh"}' >"$work/attached" &
for _ in $(seq 100); do
    [ -s "$work/attached" ] && break
    sleep 0.1
done
"$VENV/bin/python" - "$work/attached" "$space_id" docs/openapi.json >"$work/known.json" <<'END'
import json, sys

attached, space, description = sys.argv[1:]
session = json.loads(open(attached).readline())["session"]
doc = json.load(open(description))
known = {"space": space, "session": session}

def fill(schema):
    """Names the space and the session that are there, instead of any that could be."""
    if isinstance(schema, list):
        return [fill(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: fill(value) for key, value in schema.items()}
    for name, value in known.items():
        if schema.get("properties", {}).get(name, {}).get("type") == "string":
            schema["properties"][name] = {"type": "string", "enum": [value]}
        if schema.get("name") == name and schema.get("in") == "path":
            schema["schema"] = {"type": "string", "enum": [value]}
    return schema

json.dump(fill(doc), sys.stdout)
END

# check DESCRIPTION EXAMPLES URL MORE... : attach's stream ends only with its client, and is used above.
check() {
    "$VENV/bin/schemathesis" run "$1" --url "$3" "${@:4}" --exclude-path /v1/attach --exclude-path / \
        --checks not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance \
        --max-examples "$2" --phases coverage,fuzzing --seed 1 --no-color --request-timeout 20
}
check docs/openapi.json 15 "$at"
check "$work/known.json" "${KVGATE_TEST_API_EXAMPLES:-25}" "$at"
check "$work/known.json" 5 "http://127.0.0.1:$port" --header "Authorization: Bearer sesame"
kill -0 "$daemon"
