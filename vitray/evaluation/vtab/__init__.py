"""`vitray evaluate --vtab`: the VTAB-1k protocol for any set of datasets."""
