#!/usr/bin/env bash
# A throw-away OpenStack Swift with its S3 API on loopback: one proxy, one account, container and object
# server, and the memcached that its authentication wants.
#   swift.sh up      returns when it answers; source $KVGATE_SWIFT_DIR/env to use it
#   swift.sh down    ends it and removes its data
# Settings: KVGATE_SWIFT_DIR (its file system must have extended attributes), KVGATE_SWIFT_ADDR (127.0.0.1),
# KVGATE_SWIFT_PORT (9300; the other servers take the next four ports).
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/servers/common.sh
source "$HERE/common.sh"

DIR=${KVGATE_SWIFT_DIR:-${TMPDIR:-/tmp}/kvgate-swift}
ADDR=${KVGATE_SWIFT_ADDR:-127.0.0.1}
PORT=${KVGATE_SWIFT_PORT:-9300}
# tempauth's user "kvgate:test": that name is the access key, its password the secret key.
ACCESS_KEY=kvgate:test
SECRET_KEY=kvgateswiftsecret0123456789

# ring NAME PORT : where Swift finds the one device of that kind; one replica, four partitions.
ring() {
    swift-ring-builder "$DIR/$1.builder" create 2 1 0
    swift-ring-builder "$DIR/$1.builder" add "r1z1-$ADDR:$2/disk" 1
    swift-ring-builder "$DIR/$1.builder" rebalance
}

# server_conf NAME PORT : the configuration of a storage server.
server_conf() {
    cat >"$DIR/$1.conf" <<CONF
[DEFAULT]
bind_ip = $ADDR
bind_port = $2
workers = 0
user = $(id -un)
swift_dir = $DIR
devices = $DIR/data
mount_check = false
log_level = WARNING

[pipeline:main]
pipeline = $1-server

[app:$1-server]
use = egg:swift#$1
CONF
}

proxy_conf() {
    cat >"$DIR/proxy.conf" <<CONF
[DEFAULT]
bind_ip = $ADDR
bind_port = $PORT
workers = 0
user = $(id -un)
swift_dir = $DIR
log_level = WARNING

[pipeline:main]
pipeline = catch_errors gatekeeper healthcheck cache listing_formats bulk s3api tempauth copy slo dlo versioned_writes symlink proxy-server

[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true

[filter:cache]
use = egg:swift#memcache
memcache_servers = $ADDR:$((PORT + 4))

[filter:tempauth]
use = egg:swift#tempauth
user_${ACCESS_KEY/:/_} = $SECRET_KEY .admin

[filter:s3api]
use = egg:swift#s3api
location = us-east-1

[filter:versioned_writes]
use = egg:swift#versioned_writes
allow_object_versioning = true
CONF
    local filter
    for filter in catch_errors gatekeeper healthcheck listing_formats bulk copy slo dlo symlink; do
        printf '\n[filter:%s]\nuse = egg:swift#%s\n' "$filter" "$filter" >>"$DIR/proxy.conf"
    done
}

up() {
    need swift-ring-builder swift
    need memcached swift
    fresh_dir "$DIR"
    local name port=$PORT
    mkdir "$DIR/data/disk"
    printf '[swift-hash]\nswift_hash_path_suffix = kvgate\n' >"$DIR/swift.conf"
    proxy_conf
    for name in account container object; do
        port=$((port + 1))
        check_free "$ADDR" "$port"
        ring "$name" "$port" >>"$DIR/rings.log" 2>&1 || { tail -n 20 "$DIR/rings.log" >&2 && fail "swift-ring-builder"; }
        server_conf "$name" "$port"
    done
    check_free "$ADDR" "$PORT"
    check_free "$ADDR" "$((PORT + 4))"
    start "$DIR" memcached memcached -u "$(id -un)" -l "$ADDR" -p "$((PORT + 4))" -m 16
    for name in account container object proxy; do
        start "$DIR" "$name" /usr/bin/python3 "$HERE/swift_server.py" "$DIR/swift.conf" "$name" "$DIR/$name.conf"
    done
    port=$PORT
    ready "$DIR" proxy "http://$ADDR:$PORT/healthcheck"
    for name in account container object; do
        port=$((port + 1))
        ready "$DIR" "$name" "http://$ADDR:$port/"
    done
    {
        export_line KVGATE_TEST_SWIFT_ENDPOINT "http://$ADDR:$PORT"
        export_line KVGATE_TEST_SWIFT_ACCESS_KEY "$ACCESS_KEY"
        export_line KVGATE_TEST_SWIFT_SECRET_KEY "$SECRET_KEY"
    } >"$DIR/env"
    echo "Swift answers at http://$ADDR:$PORT; source $DIR/env"
}

case ${1:-} in
    up) up ;;
    down) remove_dir "$DIR" ;;
    *) fail "usage: swift.sh up|down" ;;
esac
