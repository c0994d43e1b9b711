#!/usr/bin/env bash
# A throw-away real Ceph on loopback: one monitor, one OSD, one radosgw for each address. Ready in seconds.
#
# Everything lies in KVGATE_CEPH_DIR, which is wiped at each start; /etc/ceph and /var/lib/ceph are not read.
# A cluster that an earlier run left in that directory is ended first. Source $KVGATE_CEPH_DIR/env to use the cluster.
# No cephx, no manager daemon, no systemd, no root: never let it listen on anything but loopback.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=ceph/common.sh
source "$HERE/common.sh"

ADDRS=${KVGATE_CEPH_ADDRS:-127.0.0.11 127.0.0.12 127.0.0.13 127.0.0.14}
ALSO=${KVGATE_CEPH_ALSO-127.0.0.1}            # one more address of the first radosgw; may be empty
PORT=${KVGATE_CEPH_PORT:-7480}
SSL_PORT=${KVGATE_CEPH_SSL_PORT:-}            # set it to listen with TLS too
MON=${KVGATE_CEPH_MON:-127.0.0.1:16789}
STORE=${KVGATE_CEPH_STORE:-memstore}          # memstore (memory) or bluestore (a sparse file)
SIZE=${KVGATE_CEPH_SIZE:-6442450944}          # bytes; memstore reports it but does not enforce it
LC_DAY=${KVGATE_CEPH_LC_DAY:--1}              # more than 0: a lifecycle day lasts that many seconds
ACCESS_KEY=${KVGATE_CEPH_ACCESS_KEY:-kvgateaccess}
SECRET_KEY=${KVGATE_CEPH_SECRET_KEY:-kvgatesecret0123456789}
DENIED_ACCESS_KEY=kvgatedenied
DENIED_SECRET_KEY=kvgatedeniedsecret0123456789
FSID=11111111-2222-3333-4444-555555555555
TLS_NAME=s3.kvgate.test

DIR=$KVGATE_CEPH_DIR
read -ra addresses <<<"$ADDRS"

die() {
    say "FAILED: $*"
    tail -n 5 "$DIR"/log/*.out 2>/dev/null || true
    KVGATE_CEPH_KEEP=1 "$HERE/down.sh"
    rm -f "$DIR/env"
    echo "the logs are in $DIR/log" >&2
    exit 1
}

check_programs() {
    local program missing=()
    for program in ceph ceph-mon ceph-osd monmaptool radosgw radosgw-admin curl; do
        command -v "$program" >/dev/null || missing+=("$program")
    done
    if ((${#missing[@]})); then
        echo "missing: ${missing[*]}; tests/servers/install.sh ceph installs Ceph" >&2
        exit 1
    fi
}

# check_free ADDRESS:PORT... : says which port is taken, instead of a daemon's cryptic message later.
check_free() {
    local where
    for where in "$@"; do
        if (exec 3<>"/dev/tcp/${where%:*}/${where##*:}") 2>/dev/null; then
            echo "something else listens on $where; a second Ceph needs its own KVGATE_CEPH_DIR," \
                "KVGATE_CEPH_MON and KVGATE_CEPH_PORT (or other ADDRS and an empty KVGATE_CEPH_ALSO)" >&2
            exit 1
        fi
    done
}

prepare_directory() {
    if [ -d "$DIR" ] && [ ! -e "$CEPH_MARKER" ] && [ -n "$(ls -A "$DIR")" ]; then
        echo "$DIR is not empty and was not made by this script: not touching it" >&2
        exit 1
    fi
    env -u KVGATE_CEPH_KEEP "$HERE/down.sh"
    rm -rf "$DIR"
    mkdir -p "$DIR"/{mon,osd,log,run,rgw,pid}
    chmod 700 "$DIR"
    touch "$CEPH_MARKER"
}

# Without cephx the messenger must be in crc mode: radosgw's built-in "secure" would retry for ever.
write_conf() {
    cat >"$CEPH_CONF" <<CONF
[global]
fsid = $FSID
mon host = v2:$MON
public addr = ${MON%:*}
cluster addr = ${MON%:*}
ms bind msgr1 = false
auth cluster required = none
auth service required = none
auth client required = none
auth allow insecure global id reclaim = true
keyring = /dev/null
ms mon client mode = crc
ms mon service mode = crc
ms mon cluster mode = crc
ms cluster mode = crc
ms service mode = crc
ms client mode = crc
ms crc data = false
run dir = $DIR/run
crash dir = $DIR/run
admin socket = $DIR/run/\$name.asok
log file = $DIR/log/\$name.log
debug ms = 0/0
debug mon = 0/0
debug osd = 0/0
debug auth = 0/0
debug paxos = 0/0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon allow pool delete = true
mon max pg per osd = 2000
mon warn on pool no redundancy = false
mon warn on insecure global id reclaim allowed = false
mon data avail warn = 0
mon data avail crit = 0

[mon]
mon data = $DIR/mon
mon cluster log file = $DIR/log/cluster.log
mon initial members = a
paxos propose interval = 0.05
paxos min wait = 0.01

[osd]
osd data = $DIR/osd
osd objectstore = $STORE
memstore device bytes = $SIZE
bluestore block size = $SIZE
osd memory target = 1073741824
osd max scrubs = 0
osd op num shards = 2
osd op num threads per shard = 2

[client]
rgw run sync thread = false
rgw enable usage log = false
rgw enable ops log = false
rgw enable apis = s3, admin
rgw thread pool size = 32
rgw num rados handles = 1
rgw rados pool pg num min = 4
rgw override bucket index max shards = 1
rgw lc debug interval = $LC_DAY
rgw lifecycle work time = 00:00-23:59
debug rgw = 0/0
${KVGATE_CEPH_RGW_EXTRA:-}
CONF
}

# urls SCHEME PORT : the endpoints, separated by spaces.
urls() {
    local list=("${addresses[@]/#/$1://}")
    list=("${list[@]/%/:$2}")
    echo "${list[*]}"
}

# export_line NAME VALUE
export_line() { printf 'export %s=%s\n' "$1" "${2@Q}"; }

# The file to source: the cluster's settings for rgw.sh and down.sh, then what the tests need.
write_env() {
    {
        export_line CEPH_CONF "$CEPH_CONF"
        export_line KVGATE_CEPH_DIR "$DIR"
        export_line KVGATE_CEPH_ADDRS "${addresses[*]}"
        export_line KVGATE_CEPH_ALSO "$ALSO"
        export_line KVGATE_CEPH_PORT "$PORT"
        export_line KVGATE_CEPH_SSL_PORT "$SSL_PORT"
        export_line AWS_ACCESS_KEY_ID "$ACCESS_KEY"
        export_line AWS_SECRET_ACCESS_KEY "$SECRET_KEY"
        export_line AWS_REGION us-east-1
        export_line KVGATE_TEST_RGW_ENDPOINTS "$(urls http "$PORT")"
        export_line KVGATE_TEST_RGW_ACCESS_KEY "$ACCESS_KEY"
        export_line KVGATE_TEST_RGW_SECRET_KEY "$SECRET_KEY"
        export_line KVGATE_TEST_RGW_DENIED_ACCESS_KEY "$DENIED_ACCESS_KEY"
        export_line KVGATE_TEST_RGW_DENIED_SECRET_KEY "$DENIED_SECRET_KEY"
        if [ -n "$SSL_PORT" ]; then
            export_line KVGATE_TEST_RGW_TLS_ENDPOINTS "$(urls https "$SSL_PORT")"
            export_line KVGATE_TEST_RGW_TLS_CA "$DIR/ca.crt"
        fi
    } >"$DIR/env"
}

start_mon() {
    monmaptool --create --clobber --fsid "$FSID" --addv a "[v2:$MON]" "$DIR/monmap" >"$DIR/log/monmap.out" ||
        die "monmaptool"
    ceph-mon --mkfs -i a --monmap "$DIR/monmap" --keyring /dev/null >"$DIR/log/mon-mkfs.out" 2>&1 ||
        die "the monitor's mkfs"
    daemon "$DIR/pid/mon" "$DIR/log/mon.out" ceph-mon -i a -f
}

# `osd new` must come before mkfs: it gives the OSD its number.
start_osd() {
    local uuid
    uuid=$(cat /proc/sys/kernel/random/uuid)
    ceph --connect-timeout 20 osd new "$uuid" 0 >"$DIR/log/osd-new.out" 2>&1 ||
        die "the monitor does not answer on $MON"
    ceph-osd -i 0 --mkfs --osd-uuid "$uuid" --no-mon-config >"$DIR/log/osd-mkfs.out" 2>&1 || die "the OSD's mkfs"
    daemon "$DIR/pid/osd" "$DIR/log/osd.out" ceph-osd -i 0 -f
    wait_for 30 osd_is_up || die "the OSD does not come up"
}

osd_is_up() { ceph osd stat 2>/dev/null | grep -q '1 up'; }

# A self-signed certificate for the name, its sub-domains and every address.
make_certificate() {
    local address names="DNS:$TLS_NAME,DNS:*.$TLS_NAME,DNS:localhost,IP:127.0.0.1"
    for address in "${addresses[@]}"; do names+=",IP:$address"; done
    # An authority and a certificate signed by it: strict clients refuse one certificate that is both.
    {
        openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj "/CN=kvgate test CA" \
            -keyout "$DIR/ca.key" -out "$DIR/ca.crt" &&
            openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$TLS_NAME" \
                -keyout "$DIR/tls.key" -out "$DIR/tls.csr" &&
            openssl x509 -req -in "$DIR/tls.csr" -CA "$DIR/ca.crt" -CAkey "$DIR/ca.key" -CAcreateserial -days 3650 \
                -extfile <(echo "subjectAltName=$names") -out "$DIR/tls.crt"
    } 2>"$DIR/log/openssl.out" || die "openssl"
    cat "$DIR/tls.key" "$DIR/tls.crt" >"$DIR/tls.pem"
}

# create_user UID ACCESS SECRET OPTION...
create_user() {
    local uid=$1 access=$2 secret=$3
    shift 3
    radosgw-admin -n client.admin user create --uid="$uid" --display-name="$uid" \
        --access-key="$access" --secret-key="$secret" "$@" >"$DIR/log/user-$uid.out" 2>&1
}

# The second user owns nothing and may create no bucket: everything it asks for is refused with 403.
create_users() {
    create_user kvgate "$ACCESS_KEY" "$SECRET_KEY" &&
        create_user denied "$DENIED_ACCESS_KEY" "$DENIED_SECRET_KEY" --max-buckets=-1
}

check_programs
prepare_directory
check_free "$MON" "${addresses[@]/%/:$PORT}" ${ALSO:+"$ALSO:$PORT"}
export CEPH_CONF=$DIR/ceph.conf CEPH_ARGS=
write_conf
start_mon
start_osd
say "monitor and OSD ($STORE) are up"

if [ -n "$SSL_PORT" ]; then make_certificate; fi
write_env
# The first radosgw starts alone, because it makes the zone and the pools.
"$HERE/rgw.sh" start "${addresses[0]}" || die "the first radosgw does not start"
say "the first radosgw answers"
create_users &
users=$!
if ((${#addresses[@]} > 1)); then
    "$HERE/rgw.sh" start "${addresses[@]:1}" || die "a radosgw does not start"
fi
wait "$users" || die "radosgw-admin can't create the users"
say "ready: ${#addresses[@]} radosgw at $(urls http "$PORT")"
say "to use it: source $DIR/env"
