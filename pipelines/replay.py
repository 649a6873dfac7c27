"""vitray replay RUN --step N: a past step of a run again, with the loss of each of its images."""

import argparse
from typing import Any

from pipelines.__main__ import run_verb
from vitray import verbs


def main(args: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray replay",
        description="Takes the steps from the last checkpoint before step N again, in this process and without a"
        " recording, and shows the images of step N as the network saw them, with the loss and the gradient norm of"
        " each, and what broke the loss. Nothing of the run changes.",
        epilog="example: vitray replay runs/first --step 1200",
    )
    parser.add_argument("run", metavar="RUN", help="a run folder, as in runs/first, or s3://")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="counted from 1, as in MLflow's charts")
    parser.add_argument("--out", metavar="DIR", help="folder or s3:// (default: replays/RUN-step-N)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON: loss, grad_norm, verdict, worst")
    options = parser.parse_args(args)
    report = verbs.replay(options.run, options.step, out=options.out)
    print(report.text)
    return report.values


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
