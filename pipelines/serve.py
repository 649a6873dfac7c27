"""vitray serve MODEL [TASK=DELTA ...]: a network and its deltas behind HTTP."""

from typing import Any

from pipelines.__main__ import run_verb
from vitray.serving.options import build_parser, read_settings
from vitray.weights.zoo import check_there


def main(args: list[str]) -> dict[str, Any]:
    options = build_parser().parse_args(args)
    serving = read_settings(options)
    check_there(serving.base, *serving.tasks.values())
    from vitray.serving.serve import serve_until_stopped  # torch takes a second

    serve_until_stopped(serving, options.host, options.port)
    return {}


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
