"""Processes of this machine, and the lease of a folder."""
