"""Networks behind HTTP: a Ray Serve application that answers for one base network and any number of its deltas."""
