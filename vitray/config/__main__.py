"""python -m vitray.config schema | settings: the JSON schema of a recipe for editors, or docs/settings.md."""

import json
import sys

from vitray.config.reference import settings_page
from vitray.config.run import Run

match sys.argv[1:]:
    case ["schema"]:
        print(json.dumps(Run.model_json_schema(), indent=2))
    case ["settings"]:
        print(settings_page(), end="")
    case _:
        print(f"usage: {__doc__}", file=sys.stderr)
        sys.exit(2)
