# Thawline on CPUs, linux/amd64. Build from the repository's root: `make image` (docs/images.md).

ARG BASE=debian:bookworm-20261005-slim@sha256:7c7b2c966bc9ee8cedfeef67e0e279108992c77681fa595db4a9d65c06ccc587

# Wheels that come before the index's: `--build-context wheels=FOLDER`. None by default.
FROM scratch AS wheels

FROM ${BASE} AS build
# Debian serves only the newest version of a package, so that a version named here would soon be gone.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /build
COPY docker/requirements-build.txt docker/requirements-cpu.txt docker/install.sh ./
# PyTorch's CPU index is where uv looks for torch; empty: the usual index and the wheels above.
ARG TORCH_BACKEND=cpu
RUN --mount=type=bind,from=wheels,target=/wheels \
    --mount=type=secret,id=certificates \
    sh install.sh requirements-cpu.txt

COPY pyproject.toml README.md LICENSE ./
COPY thawline thawline
COPY components components
COPY pipelines pipelines
RUN --mount=type=secret,id=certificates sh install.sh thawline

FROM ${BASE}
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/* \
    && useradd --uid 1000 --gid 0 --home-dir /tmp --no-create-home thawline
COPY --from=build /opt/thawline /opt/thawline

# Any user id may run it, with no home and no entry in /etc/passwd: what a library has to write
# goes to /tmp, and libraries that ask for a name find one.
ENV PATH=/opt/thawline/bin:$PATH \
    HOME=/tmp \
    USER=thawline \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 1000:0
WORKDIR /tmp

ARG VERSION=
ARG GIT_COMMIT=
ARG CREATED=
ENV THAWLINE_GIT_COMMIT=$GIT_COMMIT
LABEL org.opencontainers.image.title="thawline" \
      org.opencontainers.image.description="Train recommenders whose ID embedding tables survive more than one epoch, on CPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$GIT_COMMIT" \
      org.opencontainers.image.created="$CREATED"

HEALTHCHECK --interval=1m --timeout=30s CMD ["thawline", "--version"]
# Kubeflow gives its own command, `sh -ec "... python3 -m kfp.dsl.executor_main ..."`.
ENTRYPOINT ["thawline"]
CMD ["--help"]
