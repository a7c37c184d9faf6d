# syntax=docker/dockerfile:1
# Build with ./build.sh, run with ./run.sh gpu|cpu or docker compose. A newer PyTorch:
#   ./build.sh --build-arg BASE_IMAGE=pytorch/pytorch:<tag> --build-arg LOCK=locks/dev.txt
ARG BASE_IMAGE=pytorch/pytorch:2.4.0-cuda12.4-cudnn9-runtime

# ASTRA-sim for tests/astra, which the image below doesn't need and doesn't build:
#   docker build --target astra-sim --output astra-sim .      the binaries come to lie in astra-sim/
FROM debian:12-slim AS astra-sim-build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
       ca-certificates cmake g++ git libprotobuf-dev make protobuf-compiler zlib1g-dev \
    && rm -rf /var/lib/apt/lists/*
COPY scripts/build_astra_sim.sh /
RUN /build_astra_sim.sh /astra-sim
FROM scratch AS astra-sim
COPY --from=astra-sim-build /astra-sim/bin /

FROM ${BASE_IMAGE}

ARG LOCK=locks/image.txt
# Only while building: a shell in the finished container may well be interactive.
ARG DEBIAN_FRONTEND=noninteractive
ARG PIP_NO_CACHE_DIR=1
# Newer base images have PyTorch in the system's Python, to which pip otherwise adds nothing.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PIP_DISABLE_PIP_VERSION_CHECK=1
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# git: the upstream tools come from commits; procps: the scripts look for left-over processes.
# Not pinned: Ubuntu's mirrors keep no old versions.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends git procps \
    && rm -rf /var/lib/apt/lists/*

# The container runs as the user of the mounted outputs/, see scripts/docker_entrypoint.sh.
ENV HF_HOME=/workspace/huggingface
WORKDIR /workspace/mosim-llms
RUN mkdir -p "$HF_HOME" /workspace/home && chmod 1777 "$HF_HOME" /workspace/home .

# Layers that rarely change first: the project's own files come last. The steps are layers of their own, so
# that a failed one is repeated alone.
COPY pyproject.toml ./
COPY locks locks/
COPY scripts/docker_python_steps.sh scripts/environment.py scripts/
RUN LOCK=${LOCK} bash scripts/docker_python_steps.sh requirements
# hadolint ignore=DL3059
RUN bash scripts/docker_python_steps.sh tools
# hadolint ignore=DL3059
RUN bash scripts/docker_python_steps.sh tokenizers /workspace/pretrained_models

COPY . .
# The image has no .git.
ARG PROJECT_COMMIT=
LABEL org.opencontainers.image.revision=${PROJECT_COMMIT}
ENTRYPOINT ["/workspace/mosim-llms/scripts/docker_entrypoint.sh"]
CMD ["bash"]
