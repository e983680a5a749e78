# The MLflow server of k8s/mlflow, linux/amd64. Build from the repository's root: `make image-mlflow`
# (docs/images.md).

ARG BASE=debian:bookworm-20261005-slim@sha256:7c7b2c966bc9ee8cedfeef67e0e279108992c77681fa595db4a9d65c06ccc587

FROM ${BASE} AS build
# Debian serves only the newest version of a package, so that a version named here would soon be gone.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /build
COPY docker/requirements-build.txt docker/requirements-mlflow.txt docker/install.sh ./
RUN --mount=type=secret,id=certificates \
    mkdir /wheels && sh install.sh requirements-mlflow.txt && python3 -m compileall -q -j 0 /opt/thawline

FROM ${BASE}
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/* \
    && useradd --uid 1000 --gid 0 --home-dir /tmp --no-create-home mlflow
COPY --from=build /opt/thawline /opt/thawline

ENV PATH=/opt/thawline/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 1000:0
WORKDIR /tmp

ARG VERSION=
ARG GIT_COMMIT=
ARG CREATED=
LABEL org.opencontainers.image.title="thawline-mlflow" \
      org.opencontainers.image.description="The MLflow server that keeps Thawline's runs and models" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$GIT_COMMIT" \
      org.opencontainers.image.created="$CREATED"

HEALTHCHECK --interval=1m --timeout=30s CMD ["mlflow", "--version"]
ENTRYPOINT ["mlflow"]
CMD ["server", "--help"]
