"""Ray clusters: the session of a process, checks of nodes and storage, jobs, and the launcher."""
