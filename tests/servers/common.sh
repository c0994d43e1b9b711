# shellcheck shell=bash
# Helpers shared by the scripts in this folder. Sourced, never run.

# Everything that is downloaded or built for the tests lies here, outside of the checkout.
KVGATE_TEST_CACHE=${KVGATE_TEST_CACHE:-$HOME/.cache/kvgate-tests}
# shellcheck disable=SC2034  # used by the scripts that source this
VENV=$KVGATE_TEST_CACHE/venv
# A file that marks a data directory as ours, so that no typing error can make us wipe another one.
MARKER=.kvgate-test-server

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

# need PROGRAM NAME : the program must exist; NAME is what install.sh calls it.
need() {
    command -v "$1" >/dev/null || fail "$1 is missing: run tests/servers/install.sh $2"
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

# http_answers URL : any HTTP answer will do, 403 too.
http_answers() { curl -s -o /dev/null --max-time 2 "$1"; }

# check_free ADDRESS PORT
check_free() {
    if (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null; then fail "something else listens on $1:$2"; fi
}

# fresh_dir DIR : an empty data directory of ours; ends what an earlier run left in it.
fresh_dir() {
    if [ -d "$1" ] && [ ! -e "$1/$MARKER" ] && [ -n "$(ls -A "$1")" ]; then
        fail "$1 is not empty and was not made by this script: not touching it"
    fi
    remove_dir "$1"
    mkdir -p "$1/data" "$1/pid"
    chmod 700 "$1"
    touch "$1/$MARKER"
}

# remove_dir DIR : end the processes and remove the data. Nothing there is no error.
remove_dir() {
    [ -e "$1/$MARKER" ] || return 0
    end_all "$1"
    rm -rf "$1"
}

end_all() {
    local pidfile
    for pidfile in "$1"/pid/*; do
        if [ -e "$pidfile" ]; then end_process "$pidfile"; fi
    done
}

# start DIR NAME COMMAND... : a background process of its own session; its id in pid/NAME, its words in NAME.log.
# With the id goes the time it was started at, since an id may later be given to another process.
start() {
    local dir=$1 name=$2 pid
    shift 2
    setsid "$@" </dev/null >"$dir/$name.log" 2>&1 &
    pid=$!
    echo "$pid $(start_time "$pid")" >"$dir/pid/$name"
}

# start_time PID : field 22 of stat, counted after the program's name (which may hold spaces).
start_time() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d ' ' -f 20; }

# runs PIDFILE : prints the process id while that process lives.
runs() {
    local pid started
    read -r pid started <"$1" || return 1
    # A dead process that nobody has waited for has no program any more.
    [ -e "/proc/$pid/exe" ] && [ -n "$started" ] && [ "$(start_time "$pid")" = "$started" ] && echo "$pid"
}

# end_process PIDFILE : the whole session, since Swift's servers fork workers.
end_process() {
    local pid
    if pid=$(runs "$1"); then
        kill -KILL -- "-$pid" 2>/dev/null || kill -KILL "$pid" 2>/dev/null || true
        while [ -e "/proc/$pid/exe" ]; do sleep 0.01; done
    fi
    rm -f "$1"
}

# ready DIR NAME URL : wait until it answers; or show why not, and end what has been started.
ready() {
    if ! wait_for 30 answers_or_died "$1/pid/$2" "$3" || ! runs "$1/pid/$2" >/dev/null; then
        tail -n 20 "$1/$2.log" >&2
        end_all "$1"
        fail "$2 does not answer at $3"
    fi
}

answers_or_died() { http_answers "$2" || ! runs "$1"; }

# export_line NAME VALUE : a line for an env file.
export_line() { printf 'export %s=%s\n' "$1" "${2@Q}"; }
