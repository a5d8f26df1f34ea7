"""The types of calls in the form of ejkernel 0.0.78, checked in the tests that ask for `release_types`."""

import sys

import pytest
from beartype import BeartypeConf
from beartype.door import is_bearable
from jaxtyping import jaxtyped
from typechecker import with_numpy

import ejkernel.modules  # noqa: F401 (imports the module below)

RELEASE = sys.modules["ejkernel.modules._release"]  # ejkernel.modules has a function of this name


@pytest.fixture
def release_types(monkeypatch):
    """Every argument of a call in this form has the type that its signature declares, axes of arrays included."""
    bound = RELEASE.bound

    def checked(name, args, kwargs):
        types = {n: p.annotation for n, p in RELEASE.signature_of(name).parameters.items()}
        given = {**dict(zip(RELEASE.FORMS[name].arrays, args, strict=False)), **kwargs}
        with jaxtyped("context"):
            for n, x in given.items():
                conf = BeartypeConf(is_pep484_tower=True)
                assert is_bearable(x, with_numpy(types[n]), conf=conf), f"{name}: {n} is no {types[n]}"
        return bound(name, args, kwargs)

    monkeypatch.setattr(RELEASE, "bound", checked)
