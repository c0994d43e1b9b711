#!/usr/bin/env bash
# Prints the definition of one S3 gateway for Consul's agent of its host.
#   service.sh ADDRESS PORT [MONITOR_PORT] >/etc/consul.d/ingress-rgw-s3-PORT.hcl
#
# ADDRESS, PORT: those that clients connect to: of haproxy (the concentrator), or of a radosgw itself.
# MONITOR_PORT: of haproxy, whose /health says that it runs. It answers 200 with every radosgw behind it dead: so the
# check of PORT, which goes through to a radosgw, is always there.
#
# Settings: KVGATE_SERVICE (ingress-rgw-s3), KVGATE_CHECK_INTERVAL (5s), KVGATE_CHECK_TIMEOUT (2s).
set -euo pipefail

if [ $# -lt 2 ] || [ $# -gt 3 ]; then
    echo "usage: service.sh ADDRESS PORT [MONITOR_PORT]" >&2
    exit 2
fi
address=$1 port=$2 monitor=${3:-}
service=${KVGATE_SERVICE:-ingress-rgw-s3}
id=$service-$address-$port
for number in "$port" ${monitor:+"$monitor"}; do
    if ! [[ $number =~ ^[0-9]{1,5}$ ]]; then
        echo "$number is no port: give ADDRESS PORT [MONITOR_PORT]" >&2
        exit 2
    fi
done
# IPv6 in a URL.
host=$address
if [[ $address == *:* ]]; then host="[$address]"; fi

# check NAME URL WORDS : "passing" until it was tried: after a restart of the agent all are there, not none. kvgate finds
# out by itself which one is dead. Two failures in a row, since one can be a busy moment.
check() {
    cat <<CHECK
    {
      id                       = "$id-$1"
      name                     = "$3"
      http                     = "$2"
      interval                 = "${KVGATE_CHECK_INTERVAL:-5s}"
      timeout                  = "${KVGATE_CHECK_TIMEOUT:-2s}"
      status                   = "passing"
      failures_before_critical = 2
    },
CHECK
}

# Two services of one agent with one id would be one: so the address and the port are in it.
cat <<SERVICE
service {
  name    = "$service"
  id      = "$id"
  address = "$address"
  port    = $port
  checks  = [
$(check port "http://$host:$port/" "S3 answers where clients connect")
$(if [ -n "$monitor" ]; then check monitor "http://$host:$monitor/health" "haproxy runs"; fi)
  ]
}
SERVICE
