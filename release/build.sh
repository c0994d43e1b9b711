#!/usr/bin/env bash
# What a release consists of. The workflow that publishes and the tests call the same steps.
#
#   release/build.sh wheel   TARGET FOLDER    the wheel: connectors, Python API and the program `kvgate`
#   release/build.sh archive TARGET FOLDER    program, C library, completions, manual pages, bill of materials, as a .tar.gz
#   release/build.sh chart   FOLDER           the Helm chart
#   release/build.sh check   FOLDER           each wheel and program there needs no newer system than it says
#   release/build.sh sbom    FOLDER           the software bills of materials of wheels and archives in FOLDER, beside them
#   release/build.sh context FOLDER           FOLDER/context, from which the image is built, of the archives in FOLDER
#   release/build.sh sums    FOLDER           SHA256SUMS of all that lies in FOLDER
#   release/build.sh version                  the version, from Cargo.toml
#   release/build.sh notes                    what the changelog says of it
#
# TARGET is x86_64-unknown-linux-gnu or aarch64-unknown-linux-gnu, on a machine of either kind: zig links against the
# glibc that is named below, whatever the machine has. For the archive of the other kind, RUNNER is a command that runs its
# program, such as "qemu-aarch64-static -L /usr/aarch64-linux-gnu". KVGATE_PROFILE is Cargo's profile (dist).
#
# Needs Rust, the packages of release/requirements.txt (PyPI) and cargo-cyclonedx (crates.io).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Debian 10, RHEL 8 and Ubuntu 18.10, and all that are newer.
GLIBC=2.28
PROFILE=${KVGATE_PROFILE:-dist}
# In the archive.
BILL=share/doc/kvgate/kvgate.cyclonedx.json

fail() { echo "release/build.sh: $*" >&2 && exit 1; }
usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2 && exit 2; }

# The one place that has the version.
version() { sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml; }

# The time of the commit, so that the same commit gives the same bytes.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || stat -c %Y Cargo.lock)}
export SOURCE_DATE_EPOCH
# Paths of this machine have no place in what is handed out.
export RUSTFLAGS="${RUSTFLAGS:-} --remap-path-prefix=$PWD=kvgate --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=cargo"

# with_zig TARGET : zig links and compiles C for it.
with_zig() {
    local name=${1//-/_}
    export KVGATE_ZIG_TARGET=${1/-unknown/}.$GLIBC
    export "CC_$name=$PWD/release/zig.sh" "CARGO_TARGET_${name^^}_LINKER=$PWD/release/zig.sh"
}

wheel() {
    with_zig "$1"
    maturin build --quiet --locked --profile "$PROFILE" --compatibility "manylinux_${GLIBC/./_}" --target "$1" \
        -m python/Cargo.toml -o "$2"
}

archive() {
    local target=$1 folder=$2 built name stage sysroot objcopy file
    name=kvgate-$(version)-${target%%-*}-linux
    built=${CARGO_TARGET_DIR:-target}/$target/${PROFILE/#dev/debug}
    with_zig "$target"
    cargo build --quiet --locked --profile "$PROFILE" --target "$target" -p kvgate -p kvgate-capi --bin kvgate --lib

    stage=$(mktemp -d)
    trap 'rm -rf "${stage:-}"' EXIT
    capi/install.sh "$built" "$stage/$name"
    install -D -m 755 "$built/kvgate" "$stage/$name/bin/kvgate"
    # Rust's own, since binutils know one kind of machine.
    sysroot=$(rustc --print sysroot)
    objcopy=("$sysroot"/lib/rustlib/*/bin/rust-objcopy)
    for file in bin/kvgate lib/libkvgate.so.0; do
        LD_LIBRARY_PATH=$sysroot/lib "${objcopy[0]}" --strip-all "$stage/$name/$file"
    done
    install -D -m 644 -t "$stage/$name/share/doc/kvgate" LICENSE README.md CHANGELOG.md docs/kvgate.service
    completions "$stage/$name"
    bill "$target" "$stage/$name/$BILL"
    mkdir -p "$folder"
    tar -C "$stage" --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=go-w -cf - "$name" |
        gzip -9n >"$folder/$name.tar.gz"
}

# completions PREFIX : where each shell and `man` look for them.
completions() {
    local run
    read -ra run <<<"${RUNNER:-}"
    run+=("$1/bin/kvgate")
    install -d "$1"/share/{bash-completion/completions,zsh/site-functions,fish/vendor_completions.d}
    "${run[@]}" completions bash >"$1/share/bash-completion/completions/kvgate"
    "${run[@]}" completions zsh >"$1/share/zsh/site-functions/_kvgate"
    "${run[@]}" completions fish >"$1/share/fish/vendor_completions.d/kvgate.fish"
    "${run[@]}" man "$1/share/man/man1"
}

# bill TARGET FILE : the crates of program and library with versions, digests and licences, as CycloneDX. maturin puts the
# like into the wheel (PEP 770), by the same code.
bill() {
    local file
    cargo cyclonedx --quiet --manifest-path capi/Cargo.toml --format json --spec-version 1.5 --target "$1" \
        --override-filename kvgate-bill
    sed "s|path+file://$PWD|path+file:///kvgate|g" capi/kvgate-bill.json >"$2"
    # It writes one for each crate of the workspace.
    for file in {.,capi,python}/kvgate-bill.json; do rm "$file"; done
}

chart() { helm package helm/kvgate --version "$(version)" --app-version "$(version)" --destination "$1"; }

context() {
    local archive machine
    mkdir -p "$1/context"
    cp Dockerfile "$1/context/"
    for archive in "$1"/kvgate-*-linux.tar.gz; do
        machine=${archive%-linux.tar.gz} machine=${machine##*-}
        machine=${machine/x86_64/amd64} machine=${machine/aarch64/arm64}
        install -d "$1/context/$machine"
        tar -C "$1/context/$machine" --strip-components 2 --wildcards -xzf "$archive" '*/bin/kvgate'
    done
}

notes() {
    awk -v version="$(version)" '/^## /{ found = index($2, version) == 1; next } found' CHANGELOG.md
}

sbom() {
    local file
    for file in "$1"/*.whl; do
        unzip -p "$file" '*.dist-info/sboms/*.json' >"${file%.whl}.cyclonedx.json"
    done
    for file in "$1"/kvgate-*-linux.tar.gz; do
        tar -xzOf "$file" "$(basename "$file" .tar.gz)/$BILL" >"${file%.tar.gz}.cyclonedx.json"
    done
}

sums() {
    local sums
    sums=$(cd "$1" && sha256sum -- *.*)
    echo "$sums" >"$1/SHA256SUMS"
}

check() {
    local file stage found
    stage=$(mktemp -d)
    trap 'rm -rf "${stage:-}"' EXIT
    for file in "$1"/*.whl; do
        auditwheel show "$file" | tee "$stage/said"
        grep -q "manylinux_${GLIBC/./_}" "$stage/said" || fail "$file needs more than manylinux_${GLIBC/./_}"
    done
    for file in "$1"/*.tar.gz; do
        tar -C "$stage" -xzf "$file"
    done
    for file in "$stage"/*/bin/kvgate "$stage"/*/lib/libkvgate.so.0; do
        found=$(readelf -V "$file" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -n 1)
        echo "${file#"$stage"/}: $found"
        printf '%s\n' "$found" "GLIBC_$GLIBC" | sort -CV || fail "$file needs $found"
    done
}

case ${1:-}:$# in
    wheel:3 | archive:3) "$@" ;;
    chart:2 | check:2 | context:2 | sbom:2 | sums:2) "$@" ;;
    version:1 | notes:1) "$@" ;;
    *) usage ;;
esac
