"""Pages of reports: templates, the values that they lay out, and one style sheet in two themes."""
