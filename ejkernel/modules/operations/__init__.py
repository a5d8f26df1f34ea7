"""The built-in operations: a file each, with its arguments, its docstring and its checks."""
