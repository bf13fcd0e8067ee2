"""Means of log lines over the steps that were finite."""
import math

import numpy as np
import pytest
from mmcv.runner import LogBuffer

from mmdet3d_ext.engine.hooks.logging import SKIPPED, FiniteLogBuffer
from mmdet3d_ext.monitor import health


def filled(buffer, losses, counts=None, skips=()):
    for number, value in enumerate(losses):
        buffer.update({'loss': value, 'time': 0.1 * number}, 1 if counts is None else counts[number])
    for steps in skips:
        buffer.skipped(steps)
    return buffer


def test_finite_values_give_mmcvs_means_bitwise():
    draw = np.random.default_rng(0)
    losses, counts = draw.normal(size=37).tolist(), draw.integers(1, 9, 37).tolist()
    for n in (0, 1, 10, 37, 50):
        ours, theirs = filled(FiniteLogBuffer(), losses, counts, [0] * 37), filled(LogBuffer(), losses, counts)
        ours.average(n), theirs.average(n)
        assert ours.ready and dict(ours.output) == dict(theirs.output)


@pytest.mark.parametrize('bad', [math.nan, math.inf, -math.inf])
def test_the_others_of_the_interval_count(bad):
    buffer = filled(FiniteLogBuffer(), [1.0, bad, 3.0, bad, 8.0], [1, 5, 2, 5, 1])
    buffer.average(4)
    assert buffer.output['loss'] == (3.0 * 2 + 8.0) / 3 and buffer.output[SKIPPED] == 2
    assert buffer.output['time'] == pytest.approx((0.1 * 5 + 0.2 * 2 + 0.3 * 5 + 0.4) / 13), 'a value of its own is not left out'
    buffer.average(1)
    assert buffer.output['loss'] == 8.0 and SKIPPED not in buffer.output


def test_a_value_that_was_never_finite_stays_nan_and_a_statistic_may_be_missing():
    buffer = filled(FiniteLogBuffer(), [math.nan] * 3)
    buffer.update({'stats/object/matched_ious': math.nan})
    buffer.average()
    assert math.isnan(buffer.output['loss']) and buffer.output[SKIPPED] == 3
    buffer = filled(FiniteLogBuffer(), [1.0, 2.0])
    buffer.update({'stats/object/matched_ious': math.nan})
    buffer.average()
    assert math.isnan(buffer.output['stats/object/matched_ious']) and SKIPPED not in buffer.output


def test_steps_whose_gradient_alone_was_not_finite_are_counted_once():
    buffer = filled(FiniteLogBuffer(), [1.0, math.nan, 3.0, 4.0], skips=[0, 1, 1, 0])
    buffer.average(4)
    assert buffer.output[SKIPPED] == 2 and SKIPPED == health.SKIPPED
