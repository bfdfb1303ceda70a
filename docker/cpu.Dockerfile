# eplb_runtime without a GPU: the demo, the tests' machine, planning and reports. From the project's root:
#   docker build -f docker/cpu.Dockerfile -t eplb-runtime-cpu .
#   docker run --rm eplb-runtime-cpu                                             # the demo: bash launch/demo.sh
#   docker run --rm eplb-runtime-cpu .venv/bin/eplb-runtime assess sample --ranks 8
ARG BASE_IMAGE=python:3.12-slim-bookworm
FROM ${BASE_IMAGE}

# torch for CPUs comes from an index of its own; elsewhere the same version brings gigabytes of CUDA.
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

RUN useradd --uid 1000 --create-home --shell /bin/bash eplb && install --directory --owner 1000 /opt/eplb_runtime
USER 1000
WORKDIR /opt/eplb_runtime
COPY --chown=1000 pyproject.toml README.md LICENSE ./
COPY --chown=1000 launch launch
COPY --chown=1000 eplb_runtime eplb_runtime
# As launch/demo.sh would install it, so that it starts at once.
RUN . launch/environment.sh && install_project test && planner_compiled

HEALTHCHECK --interval=60s --timeout=30s \
    CMD ["bash", "-c", "if [ -n \"$EPLB_JOB\" ]; then .venv/bin/eplb-runtime report \"$EPLB_JOB\" -o \"$EPLB_JOB/report.html\"; else .venv/bin/eplb-runtime --version; fi"]

CMD ["bash", "launch/demo.sh"]
