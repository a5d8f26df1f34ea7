"""The built-in operations, one per file, each with its public signature, docstring and checks."""
