"""The command line: parse, call, render. The only layer that prints."""
