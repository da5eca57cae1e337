"""Cases of a golden folder: manifest.json, and one file of arrays for each."""

import json
import os
import pathlib

import numpy as np
import pytest

RTOL, ATOL = 1e-6, 1e-7
# Their names of aggregations, and ours.
AGGREGATIONS = {
  "token-mean": "token_mean",
  "seq-mean-token-mean": "sequence_mean",
  "seq-mean-token-sum": "sequence_sum",
  "seq-mean-token-sum-norm": "constant",
  "mean over rollouts": "sequence_mean",
}


class Golden:
  """The cases under RLVR_SHARED/NAME; skips the module that asks where RLVR_SHARED is unset."""

  def __init__(self, name: str):
    if "RLVR_SHARED" not in os.environ:
      pytest.skip(f"set RLVR_SHARED to the folder that holds {name}/", allow_module_level=True)
    self._folder = pathlib.Path(os.environ["RLVR_SHARED"]) / name
    self.cases = json.loads((self._folder / "manifest.json").read_text())

  def params(self, is_chosen):
    """The chosen cases as pytest's parameters, each under its name."""
    return [pytest.param(case, id=case["name"]) for case in self.cases if is_chosen(case)]

  def arrays(self, case):
    """The case's arrays, checked against the shapes that the manifest gives."""
    with np.load(self._folder / f"{case['name']}.npz") as file:
      arrays = dict(file)
    for name, shape in case["arrays"].items():
      assert list(arrays[name].shape) == shape, (case["name"], name)
    return arrays
