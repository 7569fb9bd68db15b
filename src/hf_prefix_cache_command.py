"""Starts the command ``hf-prefix-cache`` at once: help and wrong arguments do not wait for PyTorch.

It lies beside the package, because importing the package registers its names with Transformers, which takes seconds.
"""

import importlib.util
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; it imports the package as a whole when a command runs."""
    spec = importlib.util.find_spec("hf_prefix_cache")
    if spec is not None and spec.name not in sys.modules:
        # Made but not run: its modules can be imported one by one from now on.
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    from hf_prefix_cache.cli import main as run

    run()
