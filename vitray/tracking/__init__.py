"""Experiment tracking with MLflow: records are spooled on the driver's disk and uploaded once, in order."""
