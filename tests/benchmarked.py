"""Contenders of tests: one that is prepared with these results, and one that breaks."""

from benchmarks import _harness as harness


def prepared(results, batch):
    return lambda: harness.Prepared(results, batch)


def breaks(*_):
    raise RuntimeError("out of\n memory")
