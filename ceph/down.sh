#!/usr/bin/env bash
# Ends the Ceph that up.sh started in KVGATE_CEPH_DIR and removes its data.
# KVGATE_CEPH_KEEP=1 leaves the directory (logs, configuration) in place. Nothing running is no error.
set -euo pipefail
# shellcheck source=ceph/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[ -e "$CEPH_MARKER" ] || exit 0

# The gateways first, then the OSD, then the monitor: the reverse of the order they were started in.
for pidfile in "$KVGATE_CEPH_DIR"/pid/rgw-* "$KVGATE_CEPH_DIR"/pid/osd "$KVGATE_CEPH_DIR"/pid/mon; do
    if [ -e "$pidfile" ]; then end_daemon "$pidfile"; fi
done

if [ "${KVGATE_CEPH_KEEP:-0}" != 1 ]; then rm -rf "$KVGATE_CEPH_DIR"; fi
