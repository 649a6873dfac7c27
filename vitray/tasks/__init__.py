"""Training tasks: modules whose `forward` returns the loss."""
