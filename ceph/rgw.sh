#!/usr/bin/env bash
# One radosgw at a time, for tests of fan-out and of failures:
#   rgw.sh start ADDRESS...    start, and return when each answers
#   rgw.sh stop ADDRESS...     kill: connections are refused from now on
#   rgw.sh pause ADDRESS...    SIGSTOP: accepts connections, answers nothing (a hung server)
#   rgw.sh resume ADDRESS...   SIGCONT
# The cluster is the one in KVGATE_CEPH_DIR; up.sh must have been run. KVGATE_CEPH_RGW_ARGS: options of those that are
# started, as --rgw-max-concurrent-requests=1.
set -euo pipefail
# shellcheck source=ceph/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    echo "usage: rgw.sh start|stop|pause|resume ADDRESS..." >&2
    exit 2
}

# frontend ADDRESS : the beast frontend's line. The first radosgw also listens on KVGATE_CEPH_ALSO.
frontend() {
    local line="beast tcp_nodelay=1" address
    for address in $(listen_addresses "$1"); do
        line+=" endpoint=$address:$KVGATE_CEPH_PORT"
        if [ -n "$KVGATE_CEPH_SSL_PORT" ]; then line+=" ssl_endpoint=$address:$KVGATE_CEPH_SSL_PORT"; fi
    done
    if [ -n "$KVGATE_CEPH_SSL_PORT" ]; then line+=" ssl_certificate=$KVGATE_CEPH_DIR/tls.pem"; fi
    echo "$line"
}

listen_addresses() {
    echo "$1"
    if [ "$1" = "${KVGATE_CEPH_ADDRS%% *}" ] && [ -n "$KVGATE_CEPH_ALSO" ]; then echo "$KVGATE_CEPH_ALSO"; fi
}

# answers_or_died ADDRESS PIDFILE : ends the wait early when the process is gone.
answers_or_died() {
    curl -s -o /dev/null --max-time 5 "http://$1:$KVGATE_CEPH_PORT/" || ! pid_of "$2"
}

start() {
    local address pidfile options
    read -ra options <<<"${KVGATE_CEPH_RGW_ARGS:-}"
    for address in "$@"; do
        pidfile=$KVGATE_CEPH_DIR/pid/rgw-$address
        if pid_of "$pidfile" >/dev/null; then continue; fi
        daemon "$pidfile" "$KVGATE_CEPH_DIR/log/rgw-$address.out" \
            radosgw -n "client.rgw.${address//./-}" -f \
            --rgw-frontends "$(frontend "$address")" --rgw-data "$KVGATE_CEPH_DIR/rgw" "${options[@]}"
    done
    for address in "$@"; do
        pidfile=$KVGATE_CEPH_DIR/pid/rgw-$address
        if ! wait_for 30 answers_or_died "$address" "$pidfile" || ! pid_of "$pidfile" >/dev/null; then
            echo "radosgw $address does not answer; its last words:" >&2
            tail -n 5 "$KVGATE_CEPH_DIR/log/rgw-$address.out" >&2
            exit 1
        fi
    done
}

# signal NAME ADDRESS... : fails when one of them does not run, so that a test can't believe it paused it.
signal() {
    local name=$1 address pid
    shift
    for address in "$@"; do
        if ! pid=$(pid_of "$KVGATE_CEPH_DIR/pid/rgw-$address"); then
            echo "no radosgw runs on $address" >&2
            exit 1
        fi
        kill "-$name" "$pid"
    done
}

[ $# -ge 2 ] || usage
action=$1
shift
if [ ! -e "$KVGATE_CEPH_DIR/env" ]; then
    echo "no Ceph in $KVGATE_CEPH_DIR: run up.sh first" >&2
    exit 1
fi
# shellcheck source=/dev/null
source "$KVGATE_CEPH_DIR/env"

case $action in
    start) start "$@" ;;
    stop) for address in "$@"; do end_daemon "$KVGATE_CEPH_DIR/pid/rgw-$address"; done ;;
    pause) signal STOP "$@" ;;
    resume) signal CONT "$@" ;;
    *) usage ;;
esac
