"""Inference: networks over images, each image exactly once, in this process or on the actors of a cluster."""
