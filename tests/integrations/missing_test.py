"""Without the framework that it is for, a plug-in names its extra; everything else works."""

import importlib
import importlib.util

import pytest


@pytest.mark.skipif(importlib.util.find_spec("tunix") is not None, reason="tunix is installed")
def test_the_extra_is_named():
  with pytest.raises(ImportError, match=r'pip install "rlvr_jax\[tunix\]"'):
    importlib.import_module("rlvr_jax.integrations.tunix")
