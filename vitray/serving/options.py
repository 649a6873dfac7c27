"""The options of `vitray serve`, and the settings that they make; nothing heavy."""

import argparse

from vitray.config.parsing import count_up_to, number_up_to
from vitray.config.serving import TOKEN_VARIABLE, Limits, Serving, parse_tasks
from vitray.errors import ConfigError

USUAL = Serving(base="")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="vitray serve",
        description="Serves a network, and deltas of it as tasks: POST /v1/predict?task=birds&top_k=5 with image bytes,"
        " a form or JSON; GET /v1/tasks, /healthz and /metrics. A task whose address is an alias follows it. Runs in"
        " this process; on Ray where RAY_ADDRESS or --replicas asks for it; until Ctrl-C."
        f" {TOKEN_VARIABLE}, if set, is the token that requests need.",
        epilog="example: vitray serve runs/base/model cars=runs/cars/model birds=models:/birds@champion",
    )
    parser.add_argument("model", metavar="MODEL", help="the base: a model folder, zoo/NAME, models:/name@alias, s3://")
    parser.add_argument("tasks", nargs="*", metavar="TASK=DELTA", help="deltas of the base, each with a name")
    parser.add_argument("--host", default="127.0.0.1", help="beyond this machine a token is needed (%(default)s)")
    for option, most, default, text in (
        ("--port", 65_535, 8000, "port (%(default)s)"),
        ("--batch", 65_536, USUAL.batch, "images of a batch (%(default)s)"),
        ("--queue", 10**6, USUAL.limits.queue, "waiting requests; more get 503 (%(default)s)"),
        ("--max-mb", 1024, USUAL.limits.body_bytes // 2**20, "largest body of a request (%(default)s)"),
        ("--memory-mb", 2**20, USUAL.limits.memory_bytes // 2**20, "sum of the bodies in memory (%(default)s)"),
        ("--max-images", 10**6, USUAL.limits.images, "images of a request (%(default)s)"),
        ("--max-pixels", 10**9, USUAL.limits.pixels, "pixels of an image (%(default)s)"),
        ("--cpus", 1024, 1, "CPUs of a replica (%(default)s)"),
    ):
        parser.add_argument(option, type=count_up_to(most), default=default, help=text)
    text = "GPUs of a replica, as in 0.25; 0 computes on CPUs (default: one, or a share of those of the cluster)"
    parser.add_argument("--gpus", type=float, metavar="N", help=text)
    parser.add_argument("--replicas", default="1", metavar="N[-M]", help="number, or bounds (%(default)s)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    text = "compute batches of one task as CUDA graphs on a GPU, which launch all kernels at once"
    parser.add_argument("--graphs", action="store_true", help=text)
    text = "longest time of an upload in seconds (%(default)s)"
    parser.add_argument("--upload-s", type=number_up_to(86_400), default=USUAL.limits.upload_seconds, help=text)
    text = "seconds between two checks of the aliases (%(default)s)"
    parser.add_argument("--follow", type=number_up_to(86_400), default=USUAL.follow_seconds, help=text)
    parser.add_argument("--json", action="store_true", help="accepted, as by every verb; the address is on stderr")
    return parser


def read_settings(options: argparse.Namespace) -> Serving:
    """Return the settings of a command line."""
    fewest, _, most = options.replicas.partition("-")
    most = most or fewest
    if not (fewest.isdecimal() and most.isdecimal() and 1 <= int(fewest) <= int(most) <= 10_000):
        raise ConfigError(f"--replicas: got {options.replicas}, expected a number or bounds, as in 2 or 1-4")
    if options.gpus is not None and not 0 <= options.gpus <= 8:
        raise ConfigError(f"--gpus: got {options.gpus:g}, expected a number from 0 to 8")
    if options.memory_mb < options.max_mb:
        raise ConfigError(f"--memory-mb: got {options.memory_mb}, expected at least --max-mb, {options.max_mb}")
    limits = {"body_bytes": options.max_mb * 2**20, "upload_seconds": options.upload_s, "pixels": options.max_pixels}
    limits |= {"memory_bytes": options.memory_mb * 2**20}
    return Serving(
        base=options.model,
        tasks=parse_tasks(options.tasks),
        limits=Limits.model_validate(limits | {"queue": options.queue, "images": options.max_images}),
        batch=options.batch,
        replicas=(int(fewest), int(most)),
        cpus=float(options.cpus),
        gpus=options.gpus,
        precision="bf16" if options.bf16 else "fp32",
        graphs=options.graphs,
        follow_seconds=options.follow,
    )
