"""vitray bench BENCHMARK ...: speed against a named alternative, interleaved in one run, with spread and hardware."""

from typing import Any

from pipelines.__main__ import run_verb
from vitray.bench.options import build_parser
from vitray.config import load_run


def main(args: list[str]) -> dict[str, Any]:
    """Run one benchmark and return its rows."""
    options = vars(build_parser(__doc__ or "").parse_args(args))
    del options["json"]
    benchmark = options.pop("benchmark")
    # Torch and Ray take seconds to load.
    from vitray.bench import branches, finetune, ingest, networks, probes, train

    if benchmark in ("branches", "latency", "train"):
        names, size = options["models"].split(","), f"model.image_size={options['image_size']}"
        options["models"] = [load_run(None, [f"model.name={name}", size]).model.name for name in names]
    match benchmark:
        case "branches":
            return branches.measure_branches(**options)
        case "finetune":
            return finetune.measure_finetune(**options)
        case "ingest":
            return ingest.measure_ingest(**options)
        case "latency":
            return networks.measure_latency(**options)
        case "networks":
            return networks.measure_networks(**options)
        case _:
            if not options.pop("probes"):
                return train.measure_train(**options)
            del options["augment"], options["largest_batch"]
            return probes.measure_probes(**options)


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
