# The image of `ingot serve`. docs/operate.md says how to build and run it.
FROM python:3.12-slim

# g++ compiles a checkpoint for a CPU; an artifact needs none. tini is process 1: it passes signals on, also while the
# server compiles.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ tini && rm -rf /var/lib/apt/lists/*

# EXTRAS: "cuda" for GPUs, "cuda,otlp" with spans. PIP_OPTIONS: for example another index, with a smaller torch.
ARG EXTRAS=""
ARG PIP_OPTIONS=""
RUN --mount=type=bind,target=/src,rw \
    python -m pip install --no-cache-dir ${PIP_OPTIONS} "/src${EXTRAS:+[${EXTRAS}]}"

# Compiled checkpoints, and downloads of the hub: a volume keeps them.
RUN useradd --uid 1000 --create-home ingot && install --directory --owner=ingot --mode=0700 /cache
ENV INGOT_CACHE=/cache/ingot HF_HOME=/cache/hub
# In a container, 127.0.0.1 is not reachable from elsewhere.
ENV INGOT_SERVE_HOST=0.0.0.0 INGOT_SERVE_PORT=8000
USER 1000
WORKDIR /home/ingot
EXPOSE 8000

# The server answers while it loads a model, and not yet while it compiles one.
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s CMD \
    python -c "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ[\"INGOT_SERVE_PORT\"]}/health', timeout=4)"
ENTRYPOINT ["tini", "--", "ingot", "serve"]
