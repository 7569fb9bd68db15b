"""Other libraries' own interfaces, one module each; import the one you need, since each needs its library."""

__all__: list[str] = []
