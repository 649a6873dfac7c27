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
    from vitray.bench import (
        augmented,
        branches,
        families,
        finetune,
        ingest,
        latency,
        networks,
        predict,
        probes,
        scaling,
        servers,
        train,
    )

    match benchmark:
        case "ingest":
            return ingest.measure_ingest(ingest.IngestSettings(url=options.pop("dataset"), **options))
        case "scaling":
            return scaling.measure_scaling(scaling.ScalingSettings(url=options.pop("dataset"), **options))
        case "finetune":
            return finetune.measure_finetune(finetune.FinetuneSettings(**options))
        case "networks":
            return networks.measure_networks(networks.NetworksSettings(**options))
        case "family":
            return families.measure_family(families.FamilySettings(**options))
        case "predict":
            return predict.measure_predict(predict.PredictSettings(url=options.pop("dataset"), **options))
        case "serve":
            return servers.measure_serve(servers.ServeSettings(**options))
    names, size = options["models"].split(","), f"model.image_size={options['image_size']}"
    options["models"] = [load_run(None, [f"model.name={name}", size]).model.name for name in names]
    if benchmark == "latency":
        return latency.measure_latency(latency.LatencySettings(**options))
    if benchmark == "branches":
        return branches.measure_branches(branches.BranchesSettings(**options))
    policy, has_probes = options.pop("augment"), options.pop("probes")
    settings = train.TrainSettings(**options)
    measure = probes.measure_probes if has_probes else train.measure_train
    return augmented.measure_augmented(settings, policy) if policy else measure(settings)


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
