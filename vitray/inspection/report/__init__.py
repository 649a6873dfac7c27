"""The figures of an inspection as a page, pictures and tables: `vitray inspect`."""
