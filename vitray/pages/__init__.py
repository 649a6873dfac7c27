"""Pages of reports: HTML as values, their frame, and one style sheet in two themes."""
