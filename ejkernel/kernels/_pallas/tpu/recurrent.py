"""recurrent on TPU, by the kernels of the linear recurrence."""

from ._recurrence import register

register("recurrent")
