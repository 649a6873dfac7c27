"""Measurements against a named alternative, interleaved in one run."""
