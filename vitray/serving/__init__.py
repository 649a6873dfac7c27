"""Trained networks in use: export to other runtimes and libraries."""
