"""Runs on the driver: plan, placement, run folder, Ray Train, logging and shutdown."""
