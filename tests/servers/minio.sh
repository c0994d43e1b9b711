#!/usr/bin/env bash
# A throw-away MinIO on loopback.
#   minio.sh up      returns when it answers; source $KVGATE_MINIO_DIR/env to use it
#   minio.sh down    ends it and removes its data
# Settings: KVGATE_MINIO_DIR, KVGATE_MINIO_ADDR (127.0.0.1), KVGATE_MINIO_PORT (9100).
set -euo pipefail
# shellcheck source=tests/servers/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

DIR=${KVGATE_MINIO_DIR:-${TMPDIR:-/tmp}/kvgate-minio}
ADDR=${KVGATE_MINIO_ADDR:-127.0.0.1}
PORT=${KVGATE_MINIO_PORT:-9100}
ACCESS_KEY=kvgateminio
SECRET_KEY=kvgateminiosecret0123456789
PATH=$KVGATE_TEST_CACHE/bin:$PATH

up() {
    need minio minio
    fresh_dir "$DIR"
    check_free "$ADDR" "$PORT"
    # It must neither phone home for updates nor open its web console.
    start "$DIR" minio env MINIO_ROOT_USER=$ACCESS_KEY MINIO_ROOT_PASSWORD=$SECRET_KEY \
        MINIO_REGION=us-east-1 MINIO_UPDATE=off MINIO_BROWSER=off MINIO_CALLHOME_ENABLE=off \
        minio server --quiet --address "$ADDR:$PORT" "$DIR/data"
    ready "$DIR" minio "http://$ADDR:$PORT/minio/health/ready"
    {
        export_line KVGATE_TEST_MINIO_ENDPOINT "http://$ADDR:$PORT"
        export_line KVGATE_TEST_MINIO_ACCESS_KEY "$ACCESS_KEY"
        export_line KVGATE_TEST_MINIO_SECRET_KEY "$SECRET_KEY"
    } >"$DIR/env"
    echo "MinIO answers at http://$ADDR:$PORT; source $DIR/env"
}

case ${1:-} in
    up) up ;;
    down) remove_dir "$DIR" ;;
    *) fail "usage: minio.sh up|down" ;;
esac
