"""The picture holds the curves of the metrics that exist, at the right values."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from cipo_jax.errors import UserError
from cipo_jax.training import plots
from cipo_jax.training.metrics import MetricsWriter


def test_a_picture_is_written_from_a_metrics_file(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for step in range(6):
            writer.write(step, {"reward": step / 6, "em": step / 7, "kl_k3": float("nan"), "phase": "rl"})
        writer.write(5, {"validation/em": 0.5})
    path = plots.plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png", title="run")
    picture = imread(path)
    assert picture.shape[1] > picture.shape[0] > 200
    assert (np.abs(picture[..., :3] - [0, 0x72 / 255, 0xB2 / 255]).max(-1) < 0.02).sum() > 100  # a blue curve
    assert [file.name for file in tmp_path.iterdir() if file.suffix != ".jsonl"] == ["curves.png"]


def test_lines_carry_the_values_and_validation_is_marked():
    records = [{"step": step, "em": step / 10} for step in range(5)] + [{"step": 4, "validation/em": 0.5}, {"note": 1}]
    axis = Figure().subplots()
    plots._draw(axis, plots.Panel("EM", (("em", "EM", "#000000"),), True), records)
    raw, mean, validation = axis.lines
    np.testing.assert_allclose(raw.get_ydata(), np.arange(5) / 10)
    # by hand: (.8 * .2 * 0 + .2 * .1) / (.8 * .2 + .2) = .0555...
    assert mean.get_ydata()[0] == 0 and mean.get_ydata()[1] == pytest.approx(0.02 / 0.36)
    assert validation.get_xdata() == [4] and validation.get_ydata() == [0.5] and validation.get_marker() == "o"
    assert axis.get_ylim() == (-0.02, 1.02)


def test_nothing_to_plot_is_said(tmp_path):
    with pytest.raises(UserError, match="hold no metric to plot"):
        plots.plot_curves([{"step": 0, "loss": 1.0}, {"step": 1, "reward": None}], tmp_path / "x.png")
