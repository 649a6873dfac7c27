"""`vitray evaluate`: scores of networks by address, comparisons, probes and the page."""
