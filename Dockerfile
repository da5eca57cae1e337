# What a run needs on TPU nodes of GKE, without the code, which xpk lays into /app: docs/launch.md.
FROM python:3.12-slim

# libseccomp is for the sandbox of generated programs.
RUN apt-get update \
  && apt-get install --yes --no-install-recommends libseccomp2 \
  && rm -rf /var/lib/apt/lists/*

WORKDIR /app
COPY setup.py ./
COPY rlvr_jax/__init__.py rlvr_jax/
RUN pip install --no-cache-dir ".[tpu,hf,gcs,math,reasoning-gym]"

# Modules of the commit are found before the package without modules that was installed above.
ENV PYTHONPATH=/app PYTHONUNBUFFERED=1
