#!/usr/bin/env bash
# A throw-away `rclone serve s3` on loopback, over a folder of its own.
#   rclone.sh up      returns when it answers; source $KVGATE_RCLONE_DIR/env to use it
#   rclone.sh down    ends it and removes its data
# Settings: KVGATE_RCLONE_DIR, KVGATE_RCLONE_ADDR (127.0.0.1), KVGATE_RCLONE_PORT (9200).
set -euo pipefail
# shellcheck source=tests/servers/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

DIR=${KVGATE_RCLONE_DIR:-${TMPDIR:-/tmp}/kvgate-rclone}
ADDR=${KVGATE_RCLONE_ADDR:-127.0.0.1}
PORT=${KVGATE_RCLONE_PORT:-9200}
ACCESS_KEY=kvgaterclone
SECRET_KEY=kvgaterclonesecret0123456789
PATH=$VENV/bin:$PATH

up() {
    need rclone rclone
    fresh_dir "$DIR"
    check_free "$ADDR" "$PORT"
    # An empty configuration file of its own: the user's is not read.
    touch "$DIR/rclone.conf"
    start "$DIR" rclone rclone --config "$DIR/rclone.conf" serve s3 --addr "$ADDR:$PORT" \
        --auth-key "$ACCESS_KEY,$SECRET_KEY" --vfs-cache-mode writes --cache-dir "$DIR/cache" "$DIR/data"
    ready "$DIR" rclone "http://$ADDR:$PORT/"
    {
        export_line KVGATE_TEST_RCLONE_ENDPOINT "http://$ADDR:$PORT"
        export_line KVGATE_TEST_RCLONE_ACCESS_KEY "$ACCESS_KEY"
        export_line KVGATE_TEST_RCLONE_SECRET_KEY "$SECRET_KEY"
    } >"$DIR/env"
    echo "rclone answers at http://$ADDR:$PORT; source $DIR/env"
}

case ${1:-} in
    up) up ;;
    down) remove_dir "$DIR" ;;
    *) fail "usage: rclone.sh up|down" ;;
esac
