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
    # Torch and Ray take seconds to load.
    match benchmark:
        case "ingest":
            from vitray.bench.ingest import IngestSettings, measure_ingest

            return measure_ingest(IngestSettings(url=options.pop("dataset"), **options))
        case "scaling":
            from vitray.bench.scaling import ScalingSettings, measure_scaling

            return measure_scaling(ScalingSettings(url=options.pop("dataset"), **options))
        case "finetune":
            from vitray.bench.finetune import FinetuneSettings, measure_finetune

            return measure_finetune(FinetuneSettings(**options))
        case "networks":
            from vitray.bench.networks import NetworksSettings, measure_networks

            return measure_networks(NetworksSettings(**options))
        case "family":
            from vitray.bench.families import FamilySettings, measure_family

            return measure_family(FamilySettings(**options))
        case "predict":
            from vitray.bench.predict import PredictSettings, measure_predict

            return measure_predict(PredictSettings(url=options.pop("dataset"), **options))
        case "serve":
            from vitray.bench.servers import ServeSettings, measure_serve

            return measure_serve(ServeSettings(**options))
    return _measure_models(benchmark, options)


def _measure_models(benchmark: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run one of the benchmarks that take `--models` at an image size."""
    names, size = options["models"].split(","), f"model.image_size={options['image_size']}"
    options["models"] = [load_run(None, [f"model.name={name}", size]).model.name for name in names]
    if benchmark == "latency":
        from vitray.bench.latency import LatencySettings, measure_latency

        return measure_latency(LatencySettings(**options))
    if benchmark == "branches":
        from vitray.bench.branches import BranchesSettings, measure_branches

        return measure_branches(BranchesSettings(**options))
    from vitray.bench.probes import measure_probes
    from vitray.bench.train import TrainSettings, measure_train

    measure = measure_probes if options.pop("probes") else measure_train
    return measure(TrainSettings(**options))


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
