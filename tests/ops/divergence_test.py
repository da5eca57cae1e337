"""Divergences of distributions: formulas in NumPy, and the head's chunks against all at once."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.ops.divergence import Divergence
from rlvr_jax.ops.logprobs import TeacherHead, token_statistics
from rlvr_jax.train.cluster import sharding
from rlvr_jax.types import Head, Sampling

pytestmark = pytest.mark.usefixtures("x64")
V = 7


def case(seed, shape=(5, V)):
  rng = np.random.default_rng(seed)
  return tuple(jax.nn.log_softmax(jnp.asarray(rng.normal(size=shape) * 1.5)) for _ in range(2))


def kl(p, q):
  return np.sum(p * np.log(p / q))


def between(p, q, alpha):
  if alpha in (0, 1):
    return kl(p, q) if alpha else kl(q, p)
  m = (1 - alpha) * p + alpha * q
  return alpha * kl(q, m) + (1 - alpha) * kl(p, m)


def oracle(log_p, log_q, d):
  """Place by place, over lists of tokens."""
  found = []
  for p, q in zip(np.exp(log_p), np.exp(log_q), strict=True):
    top = lambda x: {*np.argsort(-x)[: d.top_k].tolist()}
    sets = {"student": top(p), "teacher": top(q), "union": top(p) | top(q)}
    S = sorted(sets.get(d.support, range(V)))
    rest = [v for v in range(V) if v not in S]
    a, b = p[S], q[S]
    if d.rest == "renormalize":
      a, b = a / a.sum(), b / b.sum()
    elif d.rest == "tail" and rest:
      a, b = np.append(a, p[rest].sum()), np.append(b, q[rest].sum())
    found.append(between(a, b, d.alpha))
  return found


HOW = [("all", 0, "renormalize")]
HOW += itertools.product(("student", "teacher", "union"), (3,), ("renormalize", "tail"))
SETTINGS = [
  Divergence(alpha=alpha, support=support, top_k=k, rest=rest)
  for alpha, of_alpha in ((0.0, HOW[-1:]), (0.3, HOW), (1.0, HOW[-1:]))
  for support, k, rest in of_alpha
]


@pytest.mark.parametrize("made", SETTINGS, ids=str)
def test_formula(made):
  log_p, log_q = case(0)
  np.testing.assert_allclose(made(log_p, log_q), oracle(log_p, log_q, made), rtol=1e-10)
  assert np.all(made(log_p, log_q) > 0)
  np.testing.assert_allclose(made(log_p, log_p), 0, atol=1e-14)
  gradient = jax.grad(lambda x: jnp.sum(made(jax.nn.log_softmax(x), log_p)))(log_p)
  np.testing.assert_allclose(gradient, 0, atol=1e-14)  # a teacher that is the student


@pytest.mark.parametrize(("alpha", "rest"), [(0.0, "tail"), (0.5, "renormalize"), (1.0, "tail")])
def test_a_support_of_everything_is_all(alpha, rest):
  log_p, log_q = case(1)
  whole = Divergence(alpha=alpha)
  run = lambda d: jax.value_and_grad(lambda x: jnp.sum(d(jax.nn.log_softmax(x), log_q)))(log_p)
  expected, of_whole = run(whole)
  for support in ("student", "teacher", "union"):
    value, gradient = run(Divergence(alpha=alpha, support=support, top_k=V, rest=rest))
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    np.testing.assert_allclose(gradient, of_whole, rtol=1e-9, atol=1e-14)


def test_the_score_form_has_the_conditioned_kl_s_gradient_and_a_push_on_the_set():
  log_p, log_q = case(2)
  how = dict(support="student", top_k=3)
  gradient = lambda f: jax.grad(lambda x: jnp.sum(f(jax.nn.log_softmax(x))))(log_p)
  kept = log_p >= jnp.sort(log_p)[:, -3:][:, :1]

  def with_push(log_pi):
    mass = jax.nn.logsumexp(jnp.where(kept, log_pi, -jnp.inf), axis=-1)
    weights = jax.nn.softmax(jnp.where(kept, log_p, -jnp.inf))
    f = jnp.sum(jnp.where(kept, weights * (log_p - log_q), 0.0), axis=-1)
    return Divergence(**how)(log_pi, log_q) + f * mass

  found = gradient(lambda x: Divergence(**how, rest="score")(x, log_q))
  np.testing.assert_allclose(found, gradient(with_push), rtol=1e-9, atol=1e-14)


def test_below_the_floor_there_is_no_gradient():
  log_p, log_q = case(3, (40, V))
  log_p = jax.nn.log_softmax(log_q + 0.3 * log_p)
  raw = Divergence(alpha=0.0, support="teacher", top_k=1, rest="drop")
  floored = Divergence(alpha=0.0, support="teacher", top_k=1, rest="drop", floor=0.0)
  below = raw(log_p, log_q) < 0
  assert 0 < below.sum() < len(below)
  gradient = jax.grad(lambda x: jnp.sum(floored(x, log_q)))(log_p)
  assert np.all(gradient[below] == 0) and np.all(np.any(gradient[~below] != 0, axis=-1))


def test_what_does_not_go_together_is_refused():
  for fields, message in (
    (dict(alpha=1.5), "alpha = 1.5"),
    (dict(support="teachers"), "support = 'teachers'"),
    (dict(floor="x"), "floor = 'x' is not a number"),
    (dict(top_k=3), "top_k = 3 does not fit support = 'all'"),
    (dict(support="student"), "top_k = 0 does not fit support = 'student'"),
    (
      dict(support="student", top_k=2, rest="score", alpha=0.0),
      "rest = 'score' needs alpha = 1, but alpha = 0.0",
    ),
    (dict(support="student", top_k=2, rest="pad"), "rest = 'pad'"),
    (
      dict(support="student", top_k=2, rest="score", floor=0.0),
      "rest = 'score' needs floor = None, but floor = 0.0",
    ),
    (dict(rest="tail"), "rest = 'tail' does not fit support = 'all', which leaves no rest"),
    (dict(rest="score"), "rest = 'score' does not fit support = 'all'"),
  ):
    with pytest.raises(ValueError, match=message):
      Divergence(**fields)


# --- in chunks of the head ------------------------------------------------------------------------


def head_case(seed, P=8, T=3, D=8, of_teacher=16, vocabulary=32):
  rng = np.random.default_rng(seed)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape))
  tokens = jnp.asarray(rng.integers(0, vocabulary, (P, T)), jnp.int32)
  student = normal(P, T, D), normal(D, vocabulary)
  teacher = normal(P, T, of_teacher), normal(of_teacher, vocabulary)
  return student, teacher, tokens, normal(3, P, T)


@pytest.mark.parametrize(("on_mesh", "wanted"), [(False, False), (True, True)])
def test_chunks_and_meshes_give_the_value_and_the_gradient_of_all_at_once(on_mesh, wanted):
  """Beside log-probabilities and entropies; the teacher has another width, cap and temperature."""
  (hidden, kernel), (of_teacher, teacher_kernel), tokens, weights = head_case(4)
  made = Divergence(alpha=0.3, support="union", top_k=4, rest="tail")
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2) if on_mesh else None
  chosen = jnp.arange(24).reshape(8, 3) % 3 != 1 if wanted else None

  def chunked(hidden, kernel, chunk_rows=2):
    teacher = TeacherHead(of_teacher, Head(teacher_kernel, 0.7, 5.0), 1.3, made)
    s = token_statistics(
      hidden,
      Head(kernel, 0.9, 4.0),
      tokens,
      Sampling(temperature=0.8),
      teacher=teacher,
      wanted=chosen,
      mesh=mesh,
      chunk_rows=chunk_rows,
    )
    total = jnp.sum(weights[0] * s.logprobs + weights[1] * s.entropy)
    return total + jnp.sum(weights[2] * s.taught.divergence), s.taught

  def whole(hidden, kernel):
    logits = 4.0 * jnp.tanh(hidden @ kernel * 0.9 / 4.0)
    log_p = jax.nn.log_softmax(logits / 0.8)
    log_q = jax.nn.log_softmax(5.0 * jnp.tanh(of_teacher @ teacher_kernel * 0.7 / 5.0) / 1.3)
    select = lambda x: jnp.take_along_axis(x, tokens[..., None], -1)[..., 0]
    of_q = -jnp.sum(jnp.exp(log_q) * log_q, -1)
    values = select(log_p), -jnp.sum(jnp.exp(log_p) * log_p, -1), made(log_p, log_q)
    taught = made(log_p, log_q), select(log_q), of_q
    keep = lambda x: x if chosen is None else jnp.where(chosen, x, 0.0)
    return sum(jnp.sum(w * keep(x)) for w, x in zip(weights, values, strict=True)), tuple(
      map(keep, taught)
    )

  run = lambda f: jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(hidden, kernel)
  near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
  (value, taught), gradient = run(chunked)
  (expected, of_whole), expected_gradient = run(whole)
  near(value, expected)
  jax.tree.map(near, tuple(taught), of_whole)
  jax.tree.map(near, gradient, expected_gradient)


def test_a_token_that_rounding_moves_below_the_bound_stays():
  """Another part of a program may compute the k-th token's log-probability with other rounding."""
  student = jax.nn.log_softmax(jnp.array([0.5, 0.1, 2.0, -1.0]))
  teacher = jnp.log(jnp.array([0.4, 0.25, 0.25, 0.1], jnp.float32))
  rounded = teacher.at[2].multiply(1 + 2.0**-22)
  assert rounded[2] < teacher[1]
  of_top = lambda k: Divergence(support="teacher", top_k=k)(student, rounded)
  assert of_top(2) == of_top(3) != of_top(1)
  beyond = teacher.at[2].multiply(1 + 2.0**-18)
  assert Divergence(support="teacher", top_k=2)(student, beyond) != of_top(3)
