"""Calibration: the highest rates of a device, as measured, for the fractions in benchmarks and for the tuner.

`cdiv` and `ejit` are here because models import them from here.
"""

from ._cdiv import cdiv
from ._ejit import ejit
from .ceilings import Ceilings, calibrate, known_ceilings

__all__ = ["Ceilings", "calibrate", "cdiv", "ejit", "known_ceilings"]
