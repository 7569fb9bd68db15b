"""Commands that import the package as a whole when they run, and not to show their help."""

import sys
from typing import Any

from typer.core import TyperCommand

from ._console import clear_errors

__all__ = ["PackageCommand"]


class PackageCommand(TyperCommand):
    """A command of this package: pass it to Typer as ``cls``."""

    def invoke(self, ctx: Any) -> Any:
        """Import the package, which registers its names with Transformers, and run the command."""
        with clear_errors():
            _import_package()
        return super().invoke(ctx)


def _import_package() -> None:
    """Run the package's ``__init__`` where ``hf_prefix_cache_command`` has left it out."""
    package = sys.modules[__name__.partition(".")[0]]
    if not hasattr(package, "register") and package.__spec__ is not None and package.__spec__.loader is not None:
        package.__spec__.loader.exec_module(package)
