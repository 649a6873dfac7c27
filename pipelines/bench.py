"""vitray bench BENCHMARK ...: speed against a named alternative, interleaved in one run, with spread and hardware."""

from typing import Any

from pipelines.__main__ import run_verb
from vitray.bench.options import build_parser
from vitray.config import load_run


def main(args: list[str]) -> dict[str, Any]:
    """Run one benchmark and return its rows."""
    parser = build_parser(__doc__ or "")
    options = vars(parser.parse_args(args))
    options.pop("json", None)
    benchmark = options.pop("benchmark")
    if options["rounds"] < 1 or options["image_size"] < 1:
        parser.error(f"got --rounds {options['rounds']}, --image-size {options['image_size']}, wanted at least 1")
    # Torch and Ray take seconds to load.
    if benchmark == "ingest":
        from vitray.bench.ingest import IngestSettings, measure_ingest

        return measure_ingest(IngestSettings(url=options.pop("dataset"), **options))
    if benchmark == "scaling":
        from vitray.bench.scaling import ScalingSettings, measure_scaling

        consumers = [int(count) for count in options.pop("consumers").split(",")]
        return measure_scaling(ScalingSettings(url=options.pop("dataset"), consumers=consumers, **options))
    if benchmark == "finetune":
        from vitray.bench.finetune import FinetuneSettings, measure_finetune

        return measure_finetune(FinetuneSettings(modes=options.pop("modes").split(","), **options))
    names, size = options["models"].split(","), f"model.image_size={options['image_size']}"
    options["models"] = [load_run(None, [f"model.name={name}", size]).model.name for name in names]
    if benchmark == "train":
        from vitray.bench.train import TrainSettings, measure_train

        return measure_train(TrainSettings(**options))
    batches = options["batches"].split(",")
    if not all(batch.isdecimal() and int(batch) for batch in batches):
        parser.error(f"got --batches {options['batches']}, wanted whole numbers from 1 on, as in 1,8,64")
    options["batches"] = [int(batch) for batch in batches]

    from vitray.bench.branches import BranchesSettings, measure_branches

    return measure_branches(BranchesSettings(**options))


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
