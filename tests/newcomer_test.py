"""What a newcomer's first component is told by the tests that every component has to pass."""

import contract_test
import jax.numpy as jnp
import pytest
from advantages import estimators_test

from rlvr_jax import advantages
from rlvr_jax.advantages import stateless


def centered(batch):
  return batch.rewards - jnp.mean(batch.rewards, axis=1, keepdims=True)


def over_deviation(batch):
  return centered(batch) / jnp.std(batch.rewards, axis=1, keepdims=True)


def told_by(test, *arguments):
  """The remedies of a test that fails."""
  with pytest.raises((Exception, pytest.fail.Exception)) as failed:
    test(*arguments)
  return " ".join(failed.value.__notes__)


@pytest.fixture(name="estimator")
def _estimator(monkeypatch):
  def add(function):
    name = function.__name__
    monkeypatch.setitem(contract_test.ESTIMATORS, name, stateless(function))
    monkeypatch.setattr(advantages, name, lambda: stateless(function), raising=False)
    monkeypatch.setattr(estimators_test, "ZERO_WHEN_CONSTANT", [name])
    return name

  return add


def test_an_estimator_in_the_dtype_of_its_input(estimator):
  told = told_by(
    contract_test.test_estimator_gives_float32_per_rollout, estimator(centered), jnp.bfloat16
  )
  assert "as_group(NAME, batch.rewards, batch.valid)" in told and "divides" not in told


def test_an_estimator_that_divides_by_zero(estimator):
  told = told_by(
    contract_test.test_estimator_is_finite_on_any_group, estimator(over_deviation), jnp.float32
  )
  assert "add an epsilon to what divides" in told and "zero_if_constant" in told


def test_an_estimator_without_the_helpers(estimator):
  name = estimator(centered)
  told = told_by(estimators_test.test_a_constant_group_is_exactly_zero, name, jnp.float32)
  assert (
    "return zero_if_constant(coefficients, rewards, batch.valid)" in told
    and "WITHOUT_GROUP" in told
  )
  told = told_by(estimators_test.test_a_group_of_one, name)
  assert "as_group(NAME, batch.rewards, batch.valid)" in told and "refuses G = 1" in told
  assert "group_mean(rewards, batch.valid)" in told and "WITHOUT_GROUP" in told


SIGNATURES = {"annotated": "(alpha=2.0) -> 'Advantage'", "bare": "(*, alpha=2.0)"}


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_file_that_is_not_exported(name, tmp_path, monkeypatch):
  others = ["def _hidden(): ...", "def helper(x): ..."]
  lines = [f"def {name}{SIGNATURES[name]}: ...", *others]
  (tmp_path / f"{name}.py").write_text("\n".join(lines))
  monkeypatch.setattr(advantages, "__path__", [*advantages.__path__, str(tmp_path)])
  factories = set(contract_test._factories(advantages, advantages.Advantage))
  assert factories - set(advantages.__all__) == {name}
  with pytest.raises(AssertionError, match=rf"{name} is written but not exported: import it in"):
    contract_test.test_a_factory_that_is_written_is_exported(advantages, name)
