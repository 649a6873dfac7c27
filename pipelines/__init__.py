"""The verbs of the command line: each module parses its arguments, calls one function and prints one result."""
