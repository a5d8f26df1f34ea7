"""The packages of a wheel: `ejkernel/`, and `lowering/` under its installed name. All else is in pyproject.toml."""

from setuptools import find_packages, setup

lowering = ["ejkernel.lowering", *(f"ejkernel.lowering.{package}" for package in find_packages("lowering"))]

setup(
    packages=find_packages(include=["ejkernel", "ejkernel.*"]) + lowering,
    package_dir={"ejkernel": "ejkernel", "ejkernel.lowering": "lowering"},
    package_data={"": ["py.typed", "*.pyi", "**/*.json"]},
)
