"""The source fingerprint of a measured config covers every file that its implementation depends on, and no other."""

import json
import re

import pytest

from ejkernel.kernels._registry import kernel_registry
from ejkernel.kernels._sources import PACKAGE, imported_files
from ejkernel.modules._primitive_kernel import KERNELS, source_files
from ejkernel.types import Backend, Platform, Target

BACKENDS = (Backend.CPU, Backend.GPU, Backend.TPU)


# For each operation's folder, a file that its implementations depend on, other than their own `configs.py`.
OF_PAGES = ("page_attention", "ragged_decode_attention", "ragged_page_attention", "ragged_page_attention_v3")
TURBOQUANT = ("ragged_page_attention_v2_turboquant", "ragged_page_attention_v3_turboquant")
ALSO_OF_PAGES_ON_TPU = ("multi_latent_page_attention", "native_sparse_decode_attention")
MADE_WITH = {
    **{("_triton", name): "_paged/kernel.py" for name in OF_PAGES},
    **{("_pallas/tpu", name): "_paged/kernel.py" for name in (*OF_PAGES, *ALSO_OF_PAGES_ON_TPU)},
    **{(folder, name): "_turboquant/kernel.py" for folder in ("_triton", "_pallas/tpu") for name in TURBOQUANT},
    **{("_pallas/gpu", name): "ragged_page_attention/forward.py" for name in OF_PAGES},
    ("_pallas/gpu", "multi_latent_page_attention"): "multi_latent_page_attention/forward.py",
    ("_pallas/tpu", "ragged_gated_delta_rule"): "gated_delta_rule/kernels.py",
    **{(folder, "flash_mla"): "flash_attention/configs.py" for folder in ("_triton", "_pallas/gpu", "_pallas/tpu")},
}
# Operations whose implementations call those of other operations.
MADE_OF = dict.fromkeys(
    ("blocksparse_attention", "flash_mla", "native_sparse_attention", *OF_PAGES, *ALSO_OF_PAGES_ON_TPU, *TURBOQUANT),
    "flash_attention",
) | dict.fromkeys(("gated_delta_rule", "ragged_gated_delta_rule", "state_space_v1", "state_space_v2"), "_recurrence")


def names(files):
    return {str(path.relative_to(PACKAGE)) for path in files}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operation", sorted(KERNELS))
def test_an_edit_of_a_kernel_is_seen(operation, backend):
    """Files of one operation, and those that its family shares, on the backend that they are for."""
    files = names(source_files(operation, backend))
    name = operation.removesuffix("_jvp").removesuffix("_bwd")
    algorithm = "_recurrence" if name in ("recurrent", "gla", "lightning_attention") else name
    platforms = {e.platform for e in kernel_registry.list_implementations(operation) if e.backend == backend}
    assert f"kernels/_xla/{algorithm}.py" in files
    for platform, folder in ((Platform.TRITON, "_triton"), (Platform.PALLAS, f"_pallas/{backend}")):
        shared = f"kernels/{folder}/_launch.py"
        own = MADE_WITH.get((folder, algorithm), f"{algorithm}/configs.py")
        wanted = {f"kernels/{folder}/{own}", *([shared] if (PACKAGE / shared).exists() else [])}
        assert wanted <= files if platform in platforms else not any(f"kernels/{folder}/" in file for file in files)
    others = {"flash_attention", "grouped_matmul", "mean_pooling", "_recurrence"} - {algorithm, MADE_OF.get(name)}
    assert not any(f"/{other}/" in file or f"/{other}." in file for file in files for other in others)


@pytest.mark.parametrize("folder", ["_pallas/gpu/flash_attention", "_triton/native_sparse_attention"])
def test_what_was_measured_of_a_forward_outlives_an_edit_of_the_backward(folder):
    operation = folder.rpartition("/")[2]
    forward, backward = (names(source_files(operation + suffix, Backend.GPU)) for suffix in ("", "_bwd"))
    of_forward, of_backward, of_both = (f"kernels/{folder}/{name}.py" for name in ("forward", "backward", "configs"))
    assert of_forward in forward and of_backward not in forward
    assert of_backward in backward
    assert {of_both, f"kernels/{folder}/__init__.py"} <= forward & backward


@pytest.mark.parametrize("table", sorted((PACKAGE / "modules/tuned").glob("*.json")), ids=lambda path: path.stem)
def test_no_entry_of_a_shipped_table_is_stale(table):
    """Where this fails an edited kernel has to be measured again (`ejkernel tune --out`), or its entries removed."""
    stale = set()
    for key in json.loads(table.read_text())["configs"]:
        name, kind, source = re.match(r"(\w+)@.*\|cuda \((.+)\)\|source (\w+)\|", key).groups()
        if source != KERNELS[name].source_fingerprint(Target("cuda", kind)):
            stale.add(name)
    assert not stale


def test_the_init_file_of_a_package_counts_for_its_importers():
    files = names(source_files("ragged_page_attention_v3", Backend.GPU))
    assert {"kernels/_triton/_paged/__init__.py", "kernels/_pallas/gpu/ragged_page_attention/forward.py"} <= files


def test_files_of_another_backend_and_the_registry_are_left_out():
    files = names(source_files("flash_attention", Backend.GPU))
    assert {"kernels/_triton/flash_attention/forward.py", "kernels/_visibility.py"} <= files
    assert not any("/tpu/" in file for file in files)
    assert files.isdisjoint(
        {"kernels/_registry.py", "kernels/_dispatch.py", "kernels/_kernel_trio.py", "types/config.py"}
    )


def test_imports_are_followed_however_they_are_written(tmp_path, monkeypatch):
    from ejkernel.kernels import _sources

    monkeypatch.setattr(_sources, "PACKAGE", tmp_path)
    for name in (
        "kernels/a/b.py",
        "kernels/a/c.py",
        "kernels/a/d.py",
        "kernels/e.py",
        "kernels/f.py",
        "xla_utils/g.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    file = tmp_path / "kernels/a/kernel.py"
    file.write_text(
        """
import math
from . import b, c as other
from .. import f
from ejkernel.kernels.e import something
from ejkernel.types import KernelConfig

def late():
    from .d import (  # only here
        one,
        two,
    )
    from ...xla_utils import g
"""
    )
    found = {str(path.relative_to(tmp_path)) for path in imported_files(file)}
    assert found == {f"kernels/{name}.py" for name in ("a/b", "a/c", "a/d", "e", "f")} | {"xla_utils/g.py"}
