"""Importing the package stays light beside Transformers' generation module."""

import subprocess
import sys

PROGRAM = """
import sys
import transformers.generation.utils
before = set(sys.modules)
import hf_prefix_cache
new = set(sys.modules) - before
print(*sorted(name for name in new if name.split(".")[0] not in ("hf_prefix_cache", "psutil", "tqdm", "accelerate")))
"""
# Each of these takes from half a second to several.
HEAVY = (
    "transformers.modeling_utils",
    "transformers.models.auto",
    "scipy",
    "matplotlib",
    "bitsandbytes",
    "hqq",
    "lm_eval",
    "rich",
)


def test_the_import_brings_in_nothing_heavy():
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    imported = result.stdout.split()
    assert not [name for name in imported if name.startswith(HEAVY)]
