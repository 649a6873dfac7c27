"""Networks in use: HTTP through Ray Serve for a base and its deltas; exports to other runtimes and libraries."""
