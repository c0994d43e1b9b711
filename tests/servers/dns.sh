#!/usr/bin/env bash
# A throw-away dnsmasq on loopback that answers one name with a set of addresses, changed while it runs.
#   dns.sh up [ADDRESS...]    returns when it answers (127.0.0.11 to .14 unless told)
#   dns.sh set [ADDRESS...]   replace the whole set at once; no address at all means NXDOMAIN
#   dns.sh down
# Settings: KVGATE_DNS_DIR, KVGATE_DNS_ADDR (127.0.0.53), KVGATE_DNS_PORT (5300), KVGATE_DNS_TTL (1 s),
# KVGATE_DNS_NAME (s3.kvgate.test). Each query is logged in $KVGATE_DNS_DIR/dnsmasq.log.
set -euo pipefail
# shellcheck source=tests/servers/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

DIR=${KVGATE_DNS_DIR:-${TMPDIR:-/tmp}/kvgate-dns}
ADDR=${KVGATE_DNS_ADDR:-127.0.0.53}
PORT=${KVGATE_DNS_PORT:-5300}
TTL=${KVGATE_DNS_TTL:-1}
NAME=${KVGATE_DNS_NAME:-s3.kvgate.test}
PATH=$PATH:/usr/sbin:/sbin

# The file is replaced by a rename, so that dnsmasq never reads half of it.
write_hosts() {
    local address
    : >"$DIR/hosts.new"
    for address in "$@"; do echo "$address $NAME" >>"$DIR/hosts.new"; done
    mv "$DIR/hosts.new" "$DIR/hosts"
}

answers() { dig +tries=1 +time=1 "@$ADDR" -p "$PORT" "$NAME" | grep -q 'status:'; }

# gives [ADDRESS...] : whether these are its answer.
gives() {
    local told
    told=$(dig +tcp +short +tries=1 +time=1 "@$ADDR" -p "$PORT" "$NAME" | sort)
    [ "$told" = "$(for address in "$@"; do echo "$address"; done | sort)" ]
}

up() {
    need dnsmasq dns
    need dig dns
    fresh_dir "$DIR"
    check_free "$ADDR" "$PORT"
    if [ $# = 0 ]; then set -- 127.0.0.11 127.0.0.12 127.0.0.13 127.0.0.14; fi
    write_hosts "$@"
    start "$DIR" dnsmasq dnsmasq --keep-in-foreground --conf-file=/dev/null --no-resolv --no-hosts --no-poll \
        --bind-interfaces --listen-address="$ADDR" --port="$PORT" --addn-hosts="$DIR/hosts" \
        --local="/${NAME#*.}/" --local-ttl="$TTL" --cache-size=0 --pid-file="$DIR/dnsmasq.pid" \
        --user="$(id -un)" --log-queries --log-facility=-
    if ! wait_for 10 answers; then
        tail -n 20 "$DIR/dnsmasq.log" >&2
        end_all "$DIR"
        fail "dnsmasq does not answer at $ADDR:$PORT"
    fi
    {
        export_line KVGATE_TEST_DNS_SERVER "$ADDR:$PORT"
        export_line KVGATE_TEST_DNS_NAME "$NAME"
    } >"$DIR/env"
    echo "dnsmasq answers at $ADDR:$PORT for $NAME: $*; source $DIR/env"
}

replace() {
    local pid
    pid=$(runs "$DIR/pid/dnsmasq") || fail "no dnsmasq runs from $DIR"
    write_hosts "$@"
    kill -HUP "$pid"
    wait_for 10 gives "$@" || fail "dnsmasq does not read its new addresses"
}

case ${1:-} in
    up) up "${@:2}" ;;
    set) replace "${@:2}" ;;
    down) remove_dir "$DIR" ;;
    *) fail "usage: dns.sh up|set|down [ADDRESS...]" ;;
esac
