"""Scores, intervals, tests and probes: arrays in, values out."""
