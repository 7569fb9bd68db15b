"""The command line, ``hf-prefix-cache``: one module for each subcommand."""

from .app import main

__all__ = ["main"]
