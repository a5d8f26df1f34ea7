"""Without a GPU no file of this folder is imported: each is one skipped test."""

import jax
import pytest


class Skipped(pytest.Item):
    """Represents all tests of a file."""

    def runtest(self):
        raise AssertionError("it is not to be run")

    def reportinfo(self):
        return self.path, 0, self.path.name


class OfGPU(pytest.File):
    """A file of tests that need a GPU, on a machine without one."""

    def collect(self):
        item = Skipped.from_parent(self, name="all")
        item.add_marker("gpu")
        item.add_marker(pytest.mark.skip(reason="no GPU"))
        yield item


def pytest_pycollect_makemodule(module_path, parent):
    return None if jax.default_backend() == "gpu" else OfGPU.from_parent(parent, path=module_path)
