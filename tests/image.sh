#!/usr/bin/env bash
# The image, built by buildah without a registry and run as its user, with a read-only root and no rights.
#
#   tests/image.sh FOLDER     FOLDER has the archive of release/build.sh; tools of tests/servers/install.sh image
#
# Debian by mmdebstrap stands in for the base image of the registry. bubblewrap runs what is in the image, as a container engine
# does with --read-only and --cap-drop ALL: own namespaces, and folders of the host where the image has its volumes.
set -euo pipefail
[ $# = 1 ] || { echo "usage: tests/image.sh FOLDER" >&2 && exit 2; }
built=$(realpath "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=tests/servers/common.sh
source tests/servers/common.sh
for tool in buildah mmdebstrap bwrap; do need "$tool" image; done

work=$(mktemp -d)
daemon=
store=(buildah --root "$work/store" --runroot "$work/run" --storage-driver vfs)
trap 'kill $daemon 2>/dev/null || true; "${store[@]}" umount --all >"$work/umount" || true; rm -rf "$work"' EXIT
base=$KVGATE_TEST_CACHE/debian-bookworm.tar
epoch=1700000000

base_image() {
    local container
    [ -e "$base" ] || mmdebstrap --quiet --variant=minbase --include=ca-certificates bookworm "$base"
    container=$("${store[@]}" from scratch)
    "${store[@]}" add --quiet "$container" "$base" / >"$work/layer"
    "${store[@]}" commit --quiet --format docker "$container" localhost/debian:bookworm >"$work/base"
}

# build TAG : the image of the archive's program.
build() {
    "${store[@]}" build --isolation chroot --format docker --pull-never --no-cache --quiet --timestamp "$epoch" \
        --build-arg SOURCE_DATE_EPOCH="$epoch" --build-arg TARGETARCH="$machine" \
        --build-arg BASE=localhost/debian:bookworm --build-arg PROGRAM=archive -t "localhost/kvgate:$1" "$work/context" >"$work/build.log"
}

# inside COMMAND... : in the image's root.
inside() {
    bwrap --unshare-all --die-with-parent --clearenv --setenv PATH /usr/bin --setenv TMPDIR /tmp --uid 65532 --gid 65532 --cap-drop ALL \
        --ro-bind "$root" / --proc /proc --dev /dev --tmpfs /dev/shm --bind "$work/socket" /run/kvgate --tmpfs /tmp -- "$@"
}

machine=$(uname -m) machine=${machine/x86_64/amd64} machine=${machine/aarch64/arm64}
mkdir "$work/dist" "$work/socket"
cp "$built"/kvgate-*-"$(uname -m)"-linux.tar.gz "$work/dist/"
release/build.sh context "$work/dist"
mv "$work/dist/context" "$work/context"

echo "-- built twice, the same"
base_image
build one
build two
# The rest of an image in Docker's form names the container that it was made in.
layers() { "${store[@]}" inspect --type image --format '{{.OCIv1.RootFS.DiffIDs}}' "localhost/kvgate:$1"; }
[ "$(layers one)" = "$(layers two)" ] || fail "two builds differ: $(layers one) and $(layers two)"
echo "the image's size: $("${store[@]}" images --format '{{.Size}}' localhost/kvgate:one)"

config=$("${store[@]}" inspect --type image --format '{{.OCIv1.Config.User}} {{.Docker.Config.Healthcheck.Test}}' localhost/kvgate:one)
[ "$config" = "65532:65532 [CMD kvgate health]" ] || fail "its user and health check are: $config"

root=$("${store[@]}" mount "$("${store[@]}" from localhost/kvgate:one)")
# Where an engine mounts something, it makes the folder first.
mkdir "$root/proc" "$root/dev"

echo "-- nothing can be written but in its volumes"
inside kvgate man /tmp/pages
if inside kvgate man /pages 2>"$work/said"; then fail "it can write to its root"; fi
grep -q "Read-only file system" "$work/said" || fail "$(cat "$work/said")"

echo "-- demo"
inside kvgate demo --tokens 2048

echo "-- serve, and its health check"
if inside kvgate health 2>"$work/said"; then fail "a gateway that does not run is healthy"; fi
inside kvgate serve --embedded /tmp/data >"$work/serve.log" 2>&1 &
daemon=$!
healthy() { inside kvgate health; }
wait_for 30 healthy || fail "it is not healthy: $(cat "$work/serve.log")"
inside kvgate health --ready
