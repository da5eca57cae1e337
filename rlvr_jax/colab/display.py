"""Style of the notebooks' figures, their colors, and sliders."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rlvr_jax.evaluate.figures import COLORS as COLORS
from rlvr_jax.evaluate.figures import legend_outside as legend_outside

DPI = 72  # of the page; pictures have twice as many dots


def setup() -> None:
  """Sets the figures' look: twice the resolution of the page, legible text, the palette."""
  from cycler import cycler
  from matplotlib import rcParams

  rcParams.update(
    {
      "figure.dpi": DPI,
      "savefig.dpi": 2 * DPI,
      "figure.constrained_layout.use": True,
      "axes.prop_cycle": cycler(color=list(COLORS.values())),
      "axes.grid": True,
      "axes.spines.top": False,
      "axes.spines.right": False,
      "grid.alpha": 0.3,
      "font.size": 11.0,
      "axes.titlesize": 11.0,
      "legend.frameon": False,
      "mathtext.fontset": "cm",  # formulas look as in the text
    }
  )
  if "IPython" in sys.modules:
    from matplotlib_inline import backend_inline

    backend_inline.set_matplotlib_formats("retina")  # double dots, shown at the size of single ones


# --- sliders --------------------------------------------------------------------------------------


class Control(NamedTuple):
  """A slider over some values."""

  values: tuple[Any, ...]
  start: Any  # one of them: where the slider begins, and what the static picture shows


def choice(values: Sequence[Any], start: Any = None) -> Control:
  """A slider over `values`, which begins at `start`, by default the first.

  Raises:
    ValueError: there are no values, or `start` is not one of them.
  """
  values = tuple(values)
  if not values:
    raise ValueError("choice: values is empty; give one value or more")
  start = values[0] if start is None else start
  if start not in values:
    raise ValueError(f"choice: start = {start!r} is unknown; choose one of {list(values)}")
  return Control(values, start)


def span(low: float, high: float, *, step: float, start: float) -> Control:
  """A slider over low, low + step, … up to high, which begins at the value nearest to `start`.

  Raises:
    ValueError: `step` is not positive, or `start` is not within low … high.
  """
  if step <= 0 or not low <= start <= high:
    raise ValueError(
      f"span: needs step > 0 and low <= start <= high; got low = {low}, high = {high},"
      f" step = {step}, start = {start}"
    )
  count = int((high - low) / step + 1e-9) + 1
  # Rounded, so that a label reads 0.3 and not 0.30000000000000004.
  values = tuple(round(low + step * i, 10) for i in range(count))
  return Control(values, min(values, key=lambda value: abs(value - start)))


def sliders(draw: Callable[..., Any], *args: Any, **controls: Control) -> None:
  """Draws `draw(*args, **values)`, where each keyword has a slider.

  Without an interactive front end the figure is static: `draw` at the sliders' start, with a line
  that names these values. That holds without ipywidgets, and if a program runs the notebook.

  Args:
    draw: makes one figure by pyplot.
    args: its positional arguments.
    controls: from `choice` or `span`, by keyword.
  """
  if not is_live():
    draw(*args, **{name: control.start for name, control in controls.items()})
    values = ", ".join(f"{name} = {control.start}" for name, control in controls.items())
    print(f"Static picture at {values}. With a live kernel and ipywidgets, these are sliders.")
    return
  import ipywidgets
  from IPython.display import display
  from matplotlib import pyplot

  def show(**values: Any) -> None:
    draw(*args, **values)
    pyplot.show()

  # A picture takes a moment: it is drawn where the slider is let go, not on the way there.
  widgets = {
    name: ipywidgets.SelectionSlider(
      options=control.values, value=control.start, description=name, continuous_update=False
    )
    for name, control in controls.items()
  }
  shown = ipywidgets.interactive_output(show, widgets)
  display(ipywidgets.VBox([*widgets.values(), shown]))


def is_live() -> bool:
  """Returns whether ipywidgets is installed and an interactive front end runs the cell.

  A front end lets a cell ask for input; nbclient and nbconvert, which run whole notebooks, do not.
  """
  try:
    import ipywidgets  # noqa: F401
    from IPython.core.getipython import get_ipython
  except ImportError:
    return False
  kernel = getattr(get_ipython(), "kernel", None)
  if kernel is None:
    return False
  request = kernel.get_parent("shell") or {}
  return "google.colab" in sys.modules or bool(request.get("content", {}).get("allow_stdin"))
