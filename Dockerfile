# The image of `kvgate serve`: the program, the C library's files that it loads, certificates, and nothing else.
#
#   docker build -t kvgate .                                        from source
#   docker build -t kvgate --build-arg PROGRAM=archive dist/context   the program of a release: release/build.sh context
#
# It runs as user 65532 with a read-only root. /run/kvgate has the socket; the arena is in /dev/shm, whose size is --shm-size.
# Reproducible: pass SOURCE_DATE_EPOCH, and the digests that the two tags stand for, as the release workflow does.
ARG RUST=docker.io/library/rust:1.95.0-bookworm
ARG BASE=docker.io/library/buildpack-deps:bookworm-curl
ARG PROGRAM=source

FROM ${RUST} AS source
WORKDIR /src
COPY . .
RUN cargo build --quiet --locked --profile dist --bin kvgate \
    && install -D -s target/dist/kvgate /program/kvgate

FROM scratch AS archive
ARG TARGETARCH
COPY ${TARGETARCH}/kvgate /program/kvgate

FROM ${PROGRAM} AS program

FROM ${BASE} AS root
ARG SOURCE_DATE_EPOCH=0
COPY --from=program /program/kvgate /image/usr/bin/kvgate
WORKDIR /image
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# The loader says which files the program loads. /owned is what the program's user may write.
RUN ldd usr/bin/kvgate | grep -o '/[^ ]*' | sort -u | xargs cp -L --parents -t . \
    && cp -L --parents /etc/ssl/certs/ca-certificates.crt . \
    && echo 'kvgate:x:65532:65532:kvgate:/tmp:/nonexistent' > etc/passwd \
    && echo 'kvgate:x:65532:' > etc/group \
    && mkdir -p /owned/run/kvgate /owned/tmp \
    && find /image /owned -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +

FROM scratch
LABEL org.opencontainers.image.title="kvgate" \
      org.opencontainers.image.description="S3-native, content-addressed KV cache gateway for LLM inference" \
      org.opencontainers.image.source="https://github.com/kvgate/kvgate" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=root /image/ /
COPY --from=root --chown=65532:65532 /owned/ /
ENV PATH=/usr/bin TMPDIR=/tmp
USER 65532:65532
VOLUME ["/run/kvgate", "/tmp"]
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s CMD ["kvgate", "health"]
ENTRYPOINT ["kvgate"]
CMD ["serve"]
