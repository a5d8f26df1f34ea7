"""The command line. Every module here whose name has no leading underscore is a command.

A command has a docstring, whose first line is its help, `add_arguments(parser)` and `run(arguments)`, which returns the
exit status. Arguments that do not fit together are an `argparse.ArgumentError`.
"""
