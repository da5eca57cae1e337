"""Sliders and their static fallback; colors."""

import types

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rlvr_jax.colab import display


def test_every_meaning_has_a_color_of_its_own():
  assert len(set(display.COLORS.values())) == len(display.COLORS) == 8


def test_a_span_holds_both_ends_and_starts_at_the_nearest_value():
  control = display.span(0.0, 0.3, step=0.1, start=0.19)
  assert control == display.Control((0.0, 0.1, 0.2, 0.3), 0.2)
  assert display.span(1, 8, step=2, start=8).values == (1, 3, 5, 7)
  with pytest.raises(ValueError, match="low <= start <= high; got low = 0, high = 1"):
    display.span(0, 1, step=0.1, start=2)
  with pytest.raises(ValueError, match="step = 0"):
    display.span(0, 1, step=0, start=0)


def test_a_choice_starts_at_one_of_its_values():
  assert display.choice(["a", "b"]) == display.Control(("a", "b"), "a")
  assert display.choice([0, 8], start=8).start == 8
  with pytest.raises(ValueError, match=r"start = 3 is unknown; choose one of \[0, 8\]"):
    display.choice([0, 8], start=3)
  with pytest.raises(ValueError, match="give at least one value"):
    display.choice([])


def test_without_a_front_end_the_picture_is_static(capsys):
  drawn = []
  display.show_sliders(
    lambda *args, **values: drawn.append((args, values)),
    "run",
    lag=display.choice([0, 8], start=8),
    alpha=display.span(0, 1, step=0.5, start=0.5),
  )
  assert drawn == [(("run",), {"lag": 8, "alpha": 0.5})]
  assert "Static picture at lag = 8, alpha = 0.5." in capsys.readouterr().out


GET = "IPython.core.getipython.get_ipython"


class Shell:
  """A kernel's shell whose request came from a front end that can ask for input, or cannot."""

  def __init__(self, allow_stdin):
    self.kernel, self._allowed = self, allow_stdin
    self.events = types.SimpleNamespace(register=lambda *_: None)  # pyplot asks for it

  def get_parent(self, channel):
    return {"content": {"allow_stdin": self._allowed}} if channel == "shell" else {}


def test_a_front_end_moves_the_picture(monkeypatch):
  widgets = pytest.importorskip("ipywidgets")
  shown, drawn = [], []
  monkeypatch.setattr(GET, lambda: Shell(False))
  assert not display.is_live()
  monkeypatch.setattr(GET, lambda: Shell(True))
  assert display.is_live()
  monkeypatch.setattr("IPython.display.display", shown.append)
  display.show_sliders(lambda lag: drawn.append(lag), lag=display.choice([0, 8, 32], start=8))
  slider, output = shown[0].children
  assert isinstance(slider, widgets.SelectionSlider) and isinstance(output, widgets.Output)
  assert (slider.description, slider.options, slider.value) == ("lag", (0, 8, 32), 8)
  slider.value = 32
  assert drawn == [8, 32]


def test_the_legend_stands_to_the_right_of_the_data():
  figure = Figure(layout="constrained")
  axes = figure.subplots()
  axes.plot([0, 1], [0, 1], label="line")
  display.legend_outside(axes, title="of what")
  FigureCanvasAgg(figure).draw()
  legend = axes.get_legend()
  assert legend.get_window_extent().x0 >= axes.get_window_extent().x1
  assert legend.get_window_extent().x1 <= figure.bbox.x1
  assert legend.get_title().get_text() == "of what"
