"""vitray bench WHAT ...: speed against a named alternative, interleaved in one run, with spread and circumstances."""

import sys
from typing import Any

from pipelines.__main__ import run_verb
from vitray.bench.options import build_parser
from vitray.config import load_run


def main(words: list[str]) -> dict[str, Any]:
    parser = build_parser(__doc__ or "")
    args = parser.parse_args(words)
    if args.rounds < 1 or args.image_size < 1:
        parser.error(f"--rounds {args.rounds}, --image-size {args.image_size}: wanted whole numbers from 1 on")
    if args.what == "ingest":
        from vitray.bench import ingest  # torch and Ray take seconds to load

        names = ("image_size", "batch", "workers", "images", "object_store", "rounds", "out")
        chosen = {name: vars(args)[name] for name in names}
        return ingest.measure_ingest(ingest.Settings(args.dataset, **chosen))
    if args.what == "finetune":
        from vitray.bench import finetune

        names = ("model", "batch", "image_size", "dtype", "rounds", "seconds", "out")
        chosen = {name: vars(args)[name] for name in names} | {"modes": args.modes.split(",")}
        return finetune.measure_finetune(finetune.Settings(**chosen))
    models = [load_run(None, [f"model.name={name}"]).model.name for name in args.models.split(",")]
    for name in models:
        load_run(None, [f"model.name={name}", f"model.image_size={args.image_size}"])
    if args.what == "train":
        from vitray.bench import train

        names = ("batch", "image_size", "dtype", "compile", "rounds", "seconds", "out")
        settings = train.Settings(models=models, **{name: vars(args)[name] for name in names})
        return train.measure_train(settings)
    if not all(batch.isdecimal() and int(batch) for batch in args.batches.split(",")):
        parser.error(f"--batches {args.batches}: wanted whole numbers from 1 on")

    from vitray.bench.branches import Settings, measure_branches

    batches = [int(batch) for batch in args.batches.split(",")]
    shape = (models, batches, args.image_size, args.dtype, args.compile, args.train)
    return measure_branches(Settings(*shape, args.rounds, args.seconds, args.out))


if __name__ == "__main__":
    sys.exit(run_verb(main, sys.argv[1:]))
