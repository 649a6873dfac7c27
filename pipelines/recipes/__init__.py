"""The recipes that vitray brings, by name."""

from vitray.config.parsing import recipe_names as names
from vitray.config.parsing import recipe_path as path_of

__all__ = ["names", "path_of"]
