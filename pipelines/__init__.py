"""What one runs: each verb parses its words, calls one function and prints one result."""
