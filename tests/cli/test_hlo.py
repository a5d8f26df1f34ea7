"""`ejkernel hlo`: labels in dumps of this and other processes, and the message if there are none."""

import gzip
import os
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel.__main__ import main
from ejkernel.cli.hlo import instructions_by_label
from ejkernel.ops import label_fields


def lowered_gradient():
    loss = lambda q: ejkernel.lax.flash_attention(q, q, q, causal=True, config={"block_q": 32}).sum()
    return jax.jit(jax.grad(loss)).lower(jnp.ones((1, 16, 2, 16)))


def shown(capsys, file):
    """The exit status, and the rows below the header by operation."""
    status = main(["hlo", str(file)])
    lines = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()]
    return status, {line[0]: line[1:] for line in lines[1:]}


@pytest.mark.parametrize("stamp", ["json", "hash"])
@pytest.mark.parametrize("form", ["stablehlo", "hlo", "gzip"])
def test_operations_implementations_and_configs_are_found(capsys, monkeypatch, tmp_path, form, stamp):
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", stamp)
    lowered = lowered_gradient()
    text = lowered.as_text(debug_info=True) if form == "stablehlo" else lowered.compile().as_text()
    (file := tmp_path / "dump").write_bytes(gzip.compress(text.encode()) if form == "gzip" else text.encode())
    status, rows = shown(capsys, file)
    assert status == 0 and rows.keys() == {"flash_attention", "flash_attention_bwd"}
    for implementation, instructions, _ in rows.values():
        assert implementation == "xla" and int(instructions) > (0 if form == "stablehlo" else 5)
    assert rows["flash_attention"][2] == "KernelConfig(block_q=32, platform=xla, backend=cpu)"


PROGRAM = """
    import jax, jax.numpy as jnp
    from dataclasses import dataclass
    from ejkernel.ops import labelled
    @dataclass(frozen=True)
    class Theirs:
        block: int = 3
    def step(a):
        with labelled("matmul@v1", "triton", Theirs()):
            return jnp.sin(a)
    print(jax.jit(step).lower(jnp.ones(3)).compile().as_text())
"""


@pytest.mark.parametrize("stamp, config", [("json", '"config": *{"block": *3}'), ("hash", "is not known")])
def test_a_dump_of_somebody_elses_classes(capsys, tmp_path, stamp, config):
    environment = {**os.environ, "EJKERNEL_OPS_STAMP": stamp, "EJKERNEL_CACHE_DIR": str(tmp_path / "theirs")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    (file := tmp_path / "dump.txt").write_text(
        subprocess.run(program, env=environment, capture_output=True, text=True, check=True).stdout
    )
    status, rows = shown(capsys, file)
    assert status == 0 and rows["matmul@v1"][0] == "triton"
    assert re.search(config, rows["matmul@v1"][2])


def test_instructions_are_counted_through_locations():
    module = """
        #loc1 = loc("q")
        func.func public @main(%arg0: tensor<3xf32> loc("q")) -> tensor<3xf32> {
          %0 = stablehlo.sine %arg0 : tensor<3xf32> loc(#loc5)
          %1 = stablehlo.cosine %0 : tensor<3xf32> loc(#loc6)
          %2 = stablehlo.cosine %1 : tensor<3xf32> loc(#loc1)
          return %2 : tensor<3xf32> loc(#loc)
        } loc(#loc)
        #loc = loc(unknown)
        #loc5 = loc("jit(f)/ejkernel[op=wave;impl=xla]/sin"(#loc1))
        #loc6 = loc(callsite(#loc5 at #loc1))
    """
    assert instructions_by_label("\n".join(map(str.strip, module.splitlines()))) == {"ejkernel[op=wave;impl=xla]": 2}


def test_a_label_says_what_it_is_made_of():
    assert label_fields("ejkernel[op=matmul%40v1;call=0123]") == {"op": "matmul@v1", "call": "0123"}


def test_nothing_found_is_said_and_exits_with_1(capsys, tmp_path):
    (file := tmp_path / "other.txt").write_text(jax.jit(jnp.sin).lower(jnp.ones(3)).compile().as_text())
    assert main(["hlo", str(file)]) == 1
    assert capsys.readouterr().out == f"{file}: no operation of ejkernel is in it\n"
    file.write_text(lowered_gradient().as_text())
    assert main(["hlo", str(file)]) == 1
    assert "without locations: as_text(debug_info=True) has them" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content, why",
    [
        (None, "No such file"),
        (b"", "the file is empty"),
        (b" \n", "the file is empty"),
        (b"\xff\xfe\x00", "it is no text"),
        (b"ML\xefR\x01", "it is bytecode of MLIR"),
        (gzip.compress(b"HloModule", mtime=0)[:-6], "ended before"),
        (b"\x1f\x8b\x08damaged", "invalid|rror|incorrect|ended before"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_in_one_line(capsys, tmp_path, content, why):
    file = tmp_path / "dump"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SystemExit) as raised:
        main(["hlo", str(file)])
    out, err = capsys.readouterr()
    assert raised.value.code == 2 and out == "" and err.count("\n") == 1 and str(file) in err
    assert re.search(why, err)
