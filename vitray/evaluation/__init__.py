"""Scores of a split, their uncertainty, and probes of features: arrays in, values out."""
