#!/usr/bin/env bash
# AWS as kvgate meets it: no endpoint is configured, the host follows from bucket and region, and TLS is on. A real S3 server
# (MinIO) answers under AWS's names, which a DNS server of our own leads to it. It listens on port 443, so this needs root.
#
#   tests/aws.sh            with MinIO and dnsmasq of tests/servers/install.sh minio dns
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=tests/servers/common.sh
source tests/servers/common.sh
PATH=$KVGATE_TEST_CACHE/bin:$PATH
need minio minio
need dnsmasq dns

ADDRESS=127.0.0.61 REGION=eu-central-1
HOST=s3.$REGION.amazonaws.com
BUCKET="kvgate-demo"
dir=${TMPDIR:-/tmp}/kvgate-aws
trap 'remove_dir "$dir"' EXIT
fresh_dir "$dir"
check_free "$ADDRESS" 443

kvgate=${KVGATE_TEST_BIN:-}
if [ -z "$kvgate" ]; then
    cargo build --quiet --bin kvgate
    kvgate=${CARGO_TARGET_DIR:-target}/debug/kvgate
fi

certificates() {
    mkdir -p "$dir/certs"
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj "/CN=$HOST" \
        -addext basicConstraints=critical,CA:FALSE -addext "subjectAltName=DNS:$HOST,DNS:*.$HOST" \
        -keyout "$dir/certs/private.key" -out "$dir/certs/public.crt" 2>"$dir/openssl.log"
}

certificates
start "$dir" minio env MINIO_ROOT_USER=kvgateminio MINIO_ROOT_PASSWORD=kvgateminiosecret0123456789 \
    MINIO_UPDATE=off MINIO_BROWSER=off MINIO_CALLHOME_ENABLE=off MINIO_DOMAIN="$HOST" MINIO_REGION="$REGION" \
    minio server --quiet --address "$ADDRESS:443" --certs-dir "$dir/certs" "$dir/data"
start "$dir" dnsmasq dnsmasq --keep-in-foreground --conf-file=/dev/null --no-resolv --no-hosts --log-queries --log-facility=- \
    --listen-address="$ADDRESS" --bind-interfaces --port=5361 --address="/amazonaws.com/$ADDRESS" --pid-file="$dir/dnsmasq.pid"
answers() { curl -s -o "$dir/health" --max-time 2 --cacert "$dir/certs/public.crt" --resolve "$HOST:443:$ADDRESS" "https://$HOST/minio/health/ready"; }
wait_for 30 answers || { tail -n 20 "$dir"/*.log >&2 && fail "MinIO does not answer as $HOST"; }

export AWS_ACCESS_KEY_ID=kvgateminio AWS_SECRET_ACCESS_KEY=kvgateminiosecret0123456789
export KVGATE__DNS__SERVERS=$ADDRESS:5361 KVGATE__S3__CA_FILE=$dir/certs/public.crt
unset KVGATE__S3__ENDPOINT KVGATE__S3__PATH_STYLE AWS_ENDPOINT_URL AWS_ENDPOINT_URL_S3

# asked NAME : kvgate asked DNS for exactly this name.
asked() { grep -q "query\[A\] $1 from" "$dir/dnsmasq.log"; }

echo "-- the bucket is in the host name"
"$kvgate" demo --bucket "$BUCKET" --region "$REGION" --tokens 2048 >"$dir/said" || { cat "$dir/said" && exit 1; }
asked "$BUCKET.$HOST" || fail "kvgate did not ask for $BUCKET.$HOST"
if asked "$HOST"; then fail "kvgate asked for $HOST: the bucket was in the path"; fi
"$kvgate" ls --bucket "$BUCKET" --region "$REGION" >>"$dir/said"

echo "-- other regions have other hosts"
for region in us-east-1 cn-north-1; do
    "$kvgate" ls --bucket "$BUCKET" --region "$region" >>"$dir/said" 2>&1 && fail "a certificate of $REGION was taken for $region"
done
asked "$BUCKET.s3.us-east-1.amazonaws.com" || asked "$BUCKET.s3.amazonaws.com" || fail "us-east-1 has another host"
asked "$BUCKET.s3.cn-north-1.amazonaws.com.cn" || fail "cn-north-1 has another host"

echo "-- a directory bucket is refused"
status=0
"$kvgate" ls --bucket kv--euc1-az1--x-s3 --region "$REGION" 2>"$dir/refused" || status=$?
if [ "$status" != 2 ] || ! grep -q 'name a general purpose bucket' "$dir/refused"; then
    fail "status $status: $(cat "$dir/refused")"
fi
echo "AWS's names work"
