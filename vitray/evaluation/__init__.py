"""Scores of a split: arrays in, values out."""
