"""Runs on the driver: plan, placement, run folder, logging and shutdown; the door to Ray Train."""
