"""P3O: the batch's effective sample size caps the weights and sets the pull towards β.

Source: arXiv 2605.12380 and the authors' code. No clip range and no coefficient to choose. Its
ablations are `--config.loss.kwargs.kl_term=False`, `.cap=none`, `.cap=inverse_ess`,
`.ess=sequence` and `.ess=one`.

  python -m rlvr_jax.main --config=configs/p3o.py --workdir=runs/p3o

What is not set below is the quickstart's. Card: docs/methods/p3o.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.loss = dict(
    name="p3o",
    kwargs=dict(ess="batch", cap="ess", kl_term=True),
    aggregation="token_mean",
  )
  c.schedule.kwargs.batches = 4
  return c
