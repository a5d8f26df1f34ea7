"""The jaxpr, the lowered program and the optimised HLO show which kernel runs with which config."""

import jax
import pytest
from cases import (
    CASES,
    DIFFERENTIABLE,
    each_by_kind,
    first_of_each,
    pullback,
    tangent,
    with_primitives,
)
from programs import equations

import ejkernel
from ejkernel.ops import extract_labels_from_hlo_text, find_labels_in_lowered, labels_to_configs


def traced(case, transform):
    arrays = case.arrays()
    if not case.differentiable:
        return jax.jit(case.call).trace(arrays)
    direction = case.cotangents(arrays) if transform is pullback else case.tangents()
    return jax.jit(transform(case.call, case.differentiable)).trace(arrays, direction)


@each_by_kind(first_of_each(with_primitives(DIFFERENTIABLE)))
@pytest.mark.parametrize("transform, suffix", [(pullback, "_bwd"), (tangent, "_jvp")], ids=("grad", "jvp"))
def test_labels(case, transform, suffix, monkeypatch):
    """One label for each kernel, with the config of its equation."""
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "json")
    program = traced(case, transform)
    kernels = equations(program.jaxpr, case.operation)
    assert [e.primitive.name for e in kernels] == [case.operation, case.operation + suffix]
    configs = [e.params["config"] for e in kernels]
    assert all(f"config={config}" in str(program.jaxpr) for config in configs)
    lowered = program.lower()
    for labels in (find_labels_in_lowered(lowered), extract_labels_from_hlo_text(lowered.compile().as_text())):
        assert sorted(label.split(";config=")[0] for label in labels) == [
            f"ejkernel[op={e.primitive.name};impl={e.params['config'].platform}" for e in kernels
        ]
        assert [labels_to_configs([label])[label] for label in sorted(labels)] == configs


@each_by_kind(first_of_each(CASES))
@pytest.mark.parametrize("platform", ("cpu", "cuda", "rocm", "tpu"))
def test_the_label_agrees_with_explain(case, platform):
    """For any platform a program is lowered for, present or not. Composed operations have parts.

    A ring in float32 sums the weights of each hop by the tangent.
    """
    told = explained(case, platform)
    parts = told.parts if case.is_composed else (told,)
    labels = find_labels_in_lowered(traced(case, pullback).lower(lowering_platforms=(platform,)))
    for part in parts:
        runs = next(entry.platform for entry, reason in part.candidates if reason is None)
        assert f"ejkernel[op={part.operation};impl={runs}]" in labels
    kinds = ("", "_bwd", *(["_jvp"] if case.over else [])) if case.differentiable else ("",)
    forwards = {part.operation.removesuffix("_jvp") for part in parts}
    operations = {f"ejkernel[op={forward}{kind}" for forward in forwards for kind in kinds}
    assert {label.split(";")[0] for label in labels} == operations


def explained(case, platform):
    """What `explain` says of the call, which may be over a mesh."""
    explain = lambda arrays: ejkernel.explain(case.operation, target=platform, **arrays, **case.options)
    if not case.over:
        return explain(case.arrays())
    told = []
    jax.eval_shape(case.over.run(lambda arrays: told.append(explain(arrays)), case.specs({}), None), case.arrays())
    return told[0]
