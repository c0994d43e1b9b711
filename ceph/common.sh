# shellcheck shell=bash
# Settings and helpers shared by up.sh, rgw.sh and down.sh. Sourced, never run.
# Every setting is an environment variable with a default; README.md lists them.

KVGATE_CEPH_DIR=${KVGATE_CEPH_DIR:-${TMPDIR:-/tmp}/kvgate-ceph}
# A file that marks a directory as ours, so that no typing error can make us wipe another one.
# shellcheck disable=SC2034  # used by the scripts that source this
CEPH_MARKER=$KVGATE_CEPH_DIR/.kvgate-ceph
CEPH_STARTED_NS=$(date +%s%N)

# say WORDS... : a line of progress with the seconds since the script began.
say() {
    local ms=$((($(date +%s%N) - CEPH_STARTED_NS) / 1000000))
    printf '[%3d.%02ds] %s\n' $((ms / 1000)) $((ms % 1000 / 10)) "$*"
}

# wait_for SECONDS COMMAND... : run the command every 50 ms until it succeeds; fails after SECONDS.
wait_for() {
    local end=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < end)) || return 1
        sleep 0.05
    done
}

# daemon PIDFILE LOGFILE COMMAND... : start a process of its own session (a Ctrl-C does not reach it).
daemon() {
    local pidfile=$1 log=$2
    shift 2
    setsid "$@" </dev/null >>"$log" 2>&1 &
    echo $! >"$pidfile"
}

# pid_of PIDFILE : prints the process id when that process still runs and is a Ceph daemon.
# The name is checked because a process id may have been given to another program since.
pid_of() {
    local pid
    [ -e "$1" ] || return 1
    pid=$(cat "$1")
    # A dead process that nobody has waited for still has a name, but no program.
    [ -e "/proc/$pid/exe" ] || return 1
    case $(cat "/proc/$pid/comm" 2>/dev/null) in
        ceph-mon | ceph-osd | radosgw) echo "$pid" ;;
        *) return 1 ;;
    esac
}

# end_daemon PIDFILE : kill the process (even a paused one) and wait until its ports are free again.
end_daemon() {
    local pid
    if pid=$(pid_of "$1"); then
        kill -KILL "$pid"
        while [ -e "/proc/$pid/exe" ]; do sleep 0.01; done
    fi
    rm -f "$1"
}
