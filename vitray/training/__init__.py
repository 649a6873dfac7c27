"""The training loop on each Ray Train worker, and its parts."""
