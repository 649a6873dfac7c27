"""What one runs: each verb parses its words, calls one function and prints one result."""

import vitray.waking  # noqa: F401 - before all that takes long to load
