"""The training loop on each worker and its parts; a door to Ray Train."""
