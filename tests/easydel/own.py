"""EasyDeL's own tests of attention, masks, caches, quantized layers and models, with the installed ejkernel.

They are in EasyDeL's repository alone; EASYDEL_CHECKOUT names a folder that has it, at a commit of 0.3.0. They run on
EasyDeL as it is installed.

`python -O tests/easydel/own.py FILE …`, or all, prints the outcome of every test, as JSON in the last line.
With --record it writes `own_tests.json`, what they give with the release that EasyDeL 0.3.0 pins, where easydel==0.3.0,
Pillow, torch and pytest are installed, and nothing of this library.
"""

import os

os.environ["XLA_FLAGS"] = " ".join(
    (
        "--xla_force_host_platform_device_count=2",  # over which the tests of models shard
        "--xla_backend_optimization_level=0",  # programs are small, and most of the time goes into compiling them
        "--xla_llvm_disable_expensive_passes=true",
    )
)

import hashlib
import json
import sys
from pathlib import Path

import pytest
import record  # whose import sets the environment

RECORDED = Path(__file__).with_name("own_tests.json")
NAMES = {
    "infra": """attention_axis_registry attention_multihost_fallback grouped_gdr_output_dtype kda_single_step_dtype
        operation_cache_config_decode_requirements qwen3_next_grouped_decode_equivalence""",
    "inference": "dp_page_sharding",
    "layers": """linear_attention_conv_state linear_quantized_sharding promote_rotary_operands sanitize_spec_for_shape
        sliding_window_mask""",
    "layers/caching": """kv_budget_parallelism kv_cache_update_jax ragged_page_attention_sharding
        ragged_page_dtype_compat transformer_mask_expand""",
    "modules": "mla_ragged_cache_regressions llama qwen3 mistral gemma2 mixtral gpt_oss",
}
FILES = [f"tests/{folder}/test_{name}.py" for folder, names in NAMES.items() for name in names.split()]


def checkout():
    return Path(os.environ["EASYDEL_CHECKOUT"]).resolve()


def blob(file):
    """The hash by which git knows a file's contents: `git log --find-object` tells the commits that have it."""
    contents = (checkout() / file).read_bytes()
    return hashlib.sha1(b"blob %d\0%b" % (len(contents), contents)).hexdigest()


class Outcomes:
    """A plugin of pytest that keeps passed, failed or skipped of every test by its file, and of files not imported."""

    def __init__(self):
        self.of = {}

    def keep(self, report):
        file, _, name = report.nodeid.partition("::")
        self.of.setdefault(file, {})[name or "import"] = report.outcome

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            self.keep(report)

    def pytest_collectreport(self, report):
        if not report.passed:
            self.keep(report)


def outcomes(files):
    """The outcomes of the tests of each file, by name."""
    import easydel  # noqa: F401  the installed one, before pytest puts the checkout on the path

    kept = Outcomes()
    options = ("-c", os.devnull, f"--rootdir={checkout()}", "-p", "no:cacheprovider", "--tb=short")
    pytest.main([*options, *(str(checkout() / file) for file in files)], plugins=[kept])
    return kept.of


def main(arguments):
    files = [name for name in arguments if name != "--record"] or FILES
    if "--record" not in arguments:
        print("\n" + json.dumps(outcomes(files)))
        return
    versions, all_found = record.versions(), outcomes(files)
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {"files": {}}
    recorded["versions"] = versions
    for file, found in all_found.items():
        names = lambda outcome, found=found: sorted(name for name in found if found[name] == outcome)
        kept = {"passed": len(names("passed")), "failed": names("failed"), "skipped": names("skipped")}
        recorded["files"][file] = {"blob": blob(file)} | {outcome: x for outcome, x in kept.items() if x}
    RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
