# For TPU nodes of Kubernetes; `python -m rlvr_jax.launch {xpk,jobset} start` builds it: docs/tpu.md.
FROM python:3.12-slim

# libseccomp is for the sandbox of generated programs.
RUN apt-get update \
  && apt-get install --yes --no-install-recommends libseccomp2 \
  && rm -rf /var/lib/apt/lists/*

WORKDIR /rlvr_jax
# What it depends on is a layer of its own, which is built again where setup.py changes.
COPY setup.py ./
COPY rlvr_jax/__init__.py rlvr_jax/
RUN pip install --no-cache-dir ".[tpu,hf,gcs,math]"

# Modules of the checkout are found before the package without modules that was installed above.
COPY . ./
ENV PYTHONPATH=/rlvr_jax PYTHONUNBUFFERED=1
