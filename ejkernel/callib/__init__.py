"""Calibration: the highest rates of this device, measured. Benchmarks show a fraction of it, tuners order by it.

`cdiv` and `ejit` are here for models that import them from here.
"""

from ._cdiv import cdiv
from ._ejit import ejit
from .ceilings import Ceilings, calibrate, known_ceilings

__all__ = ["Ceilings", "calibrate", "cdiv", "ejit", "known_ceilings"]
