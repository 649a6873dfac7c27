"""`python -m vitray.config schema`: the JSON schema of a recipe, with which editors complete and check it."""

import json
import sys

from vitray.config.run import Run

if sys.argv[1:] != ["schema"]:
    print(f"usage: {__doc__}", file=sys.stderr)
    sys.exit(2)
print(json.dumps(Run.model_json_schema(), indent=2))
