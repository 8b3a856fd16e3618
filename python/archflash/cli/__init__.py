"""The command line: `archflash COMMAND`, or `python -m archflash COMMAND`. Each command is a module
with add_parser and run.
"""
