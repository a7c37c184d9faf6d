# syntax=docker/dockerfile:1
# Build with ./build.sh, run with ./run.sh gpu|cpu or docker compose. A newer PyTorch:
#   ./build.sh --build-arg BASE_IMAGE=pytorch/pytorch:<tag> --build-arg CONSTRAINTS=constraints.txt
ARG BASE_IMAGE=pytorch/pytorch:2.4.0-cuda12.4-cudnn9-runtime
FROM ${BASE_IMAGE}

ARG CONSTRAINTS=constraints-image.txt
# Only while building: a shell in the finished container may well be interactive.
ARG DEBIAN_FRONTEND=noninteractive
ARG PIP_NO_CACHE_DIR=1
# Newer base images hold PyTorch in the system's Python, which pip otherwise refuses to add to.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PIP_DISABLE_PIP_VERSION_CHECK=1
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# git: the upstream tools come from commits; procps: the scripts look for left-over processes.
RUN apt-get update \
    && apt-get install -y --no-install-recommends git procps \
    && rm -rf /var/lib/apt/lists/*

# Rarely changing layers first: the project's own files come last.
WORKDIR /workspace/mosim-llms
COPY requirements.txt requirements-dev.txt constraints.txt constraints-image.txt ./
COPY scripts/docker_python_steps.sh scripts/
RUN CONSTRAINTS=${CONSTRAINTS} bash scripts/docker_python_steps.sh requirements
RUN CONSTRAINTS=${CONSTRAINTS} bash scripts/docker_python_steps.sh tools
RUN bash scripts/docker_python_steps.sh tokenizers /workspace/pretrained_models

COPY . .
CMD ["bash"]
