"""python experiments/golden.py [--write]: what a change of the code's structure leaves bit-equal, on small data.

It calls the verbs as a user does: a dataset, a run of each kind of task on one and on two workers, a sweep, and then
evaluate, inspect, predict, export and serve. `--write` records their results in experiments/golden.json, with the
machine; without it they are compared with that record, and the names of those that differ are printed. The last digits
depend on the processor and the versions, so a record of another machine says little: write one before a change.
"""

import csv
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipelines.__main__ import main as vitray
from vitray.cluster.session import ray_session
from vitray.system.host_facts import facts

RECORD = Path(__file__).with_name("golden.json")
STEPS = ["optim.batch=16", "optim.duration=60 steps", "optim.warmup=10 steps", "evaluate.every=30 steps"]
STEPS += ["checkpoint.every=30 steps", "tracking.every=10 steps", "data.url=data", "model.image_size=32"]
# All random parts of a step are on: drop path, dropout, mixing, erasing, repeated augmentation.
SUPERVISED = ["model.name=vit_u2x2_8", "model.drop_path=0.1", "model.dropout=0.1", "optim.rule=lamb"]
SUPERVISED += ["data.mix={mixup: 0.8, cutmix: 1.0}", "data.augment.erase=0.25", "data.repeats=2", "optim.ema.decay=0.9"]
LABEL_FREE = ["model={name: vit_u2x2_8_hmlp_ln, image_size: 32, num_classes: null, pool: mean_then_norm}"]
VIEWS = ["data.views={local: {count: 2, size: 16}}", "evaluate.probes=[knn, rank]"]
FINETUNE = "task={kind: finetune, weights: runs/supervised-1/model, mode: MODE}"
TASKS = {
    "supervised": SUPERVISED,
    "bce": ["model.name=vit_u2x1_16_conv_ln", "task.loss=bce", "model.registers=2", "optim.rule=sgd"],
    "cosub": ["model.name=vit_u2x2_8", "model.drop_path=0.2", "task.cosub={}"],
    "distilled": ["model={name: vit_u2x1_8, distillation_token: true}", "task.distill.teacher=runs/supervised-1/model"],
    **{mode: [FINETUNE.replace("MODE", mode)] for mode in ("full", "attn", "lora", "head")},
    "tokenizer": [*LABEL_FREE, "task={kind: tokenizer, levels: [4, 4, 4], decoder_width: 16, decoder_depth: 1, "
                  "decoder_heads: 2}"],
    "beit": [*LABEL_FREE, "task={kind: masked, mask: {kind: blocks, min_patches: 2}, "
             "objective: {kind: beit, tokenizer: runs/tokenizer-1/model}}", "evaluate.probes=[knn, rank]"],
    "mae": [*LABEL_FREE, "task={kind: masked, objective: {kind: mae, decoder_width: 64, decoder_depth: 1, "
            "decoder_heads: 2}}"],
    "lejepa": [*LABEL_FREE, *VIEWS, "task={kind: lejepa, slices: 16, projection: 8}"],
    "self_distillation": [*LABEL_FREE, *VIEWS, "task={kind: self_distillation, prototypes: 32, centering: center, "
                          "freeze_prototypes: 5 steps}"],
    "pixels": [*LABEL_FREE, "task={kind: masked, objective: pixels_l1}"],
}  # fmt: skip
SPACE = "space:\n  depth: {grid: [1, 2]}\n  model.name: vit_u{depth}x1_8\n  seed: {seeds: 2}\n"
CURVES = ("train/loss", "val/loss", "val/top1")
TIMES = ("seconds", "_ms", "images_per_second", "bytes", "command", "run", "page", "path", "out", "url")


def results(home: Path) -> Iterator[tuple[str, Any]]:
    """Yield names and results, computed in the working folder."""
    Path("recipe.yaml").write_text("seed: 1\n")
    yield "dataset", call("shard", "demo", "data", "images=200", "image_size=32")["identity"]
    for task, settings in TASKS.items():
        for workers in (1, 2):
            name = f"{task}-{workers}"
            call("train", "recipe.yaml", *STEPS, *settings, f"compute.workers={workers}", "--name", name)
            outcome = json.loads(Path("runs", name, "outcome.json").read_text())
            curves = {key: curve for key, curve in outcome["curves"].items() if key in CURVES}
            yield f"train {name}: weights", digest(Path("runs", name, "model", "model.safetensors").read_bytes())
            yield f"train {name}: curves", curves
    Path("space.yaml").write_text(SPACE)
    call("sweep", "recipe.yaml", "space.yaml", *STEPS, "compute.workers=1", "--name", "grid")
    yield "sweep: table", table(Path("sweeps/grid/report/results.csv"))
    yield "sweep: points", kept(json.loads(Path("sweeps/grid/points.json").read_text()))
    models = ["runs/supervised-1/model", "runs/attn-1/model"]
    scores = call("evaluate", *models, "data", "--out", "scores", "--probes", "knn", "few_shot", "linear")
    yield "evaluate", kept(scores)
    call("inspect", models[0], "data", "--compare", models[1], "--images", "16", "--out", "inside")
    for path in sorted(Path("inside").glob("*.csv")):
        yield f"inspect: {path.stem}", digest(path.read_bytes())
    call("predict", *models, "data", "predictions", "--logits", "--embedding", "--features", "block01")
    for path in sorted(Path("predictions").rglob("*.parquet")):
        rows = json.dumps(pq.read_table(path).to_pylist(), default=repr)
        yield f"predict: {path.relative_to('predictions')}", digest(rows)
    for target in ("onnx", "torch_export", "timm"):
        model = models[0] if target != "timm" else "runs/distilled-1/model"
        yield f"export {target}", kept(call("export", model, "--to", target, "--rounds", "1", "--images", "64"))
    yield "serve", served(models, home)


def call(*words: str) -> dict[str, Any]:
    """Return the JSON of a verb; what it prints is shown if it fails."""
    out, shown = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(shown):
        status = vitray([*words, "--json"])
    if status:
        sys.exit(f"vitray {' '.join(words)}: status {status}\n{shown.getvalue()}")
    return json.loads(out.getvalue().splitlines()[-1])


def digest(content: bytes | str) -> str:
    """Return a hash of bytes or a text."""
    return hashlib.sha256(content if isinstance(content, bytes) else content.encode()).hexdigest()[:24]


def kept(value: Any) -> Any:
    """Return a result without times and addresses."""
    if isinstance(value, dict):
        return {key: kept(below) for key, below in value.items() if not any(word in key for word in TIMES)}
    if isinstance(value, str):
        return re.sub(r"/\S*/vitray-golden-\w+", "", value)
    return [kept(below) for below in value] if isinstance(value, list) else value


def table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV without times and addresses."""
    with path.open() as lines:
        return [kept(dict(row)) for row in csv.DictReader(lines)]


def served(models: list[str], home: Path) -> Any:
    """Return the answers of `vitray serve` for a base and its delta."""
    from vitray.data.shards.demo import demo_item

    port, (image, _) = "8917", demo_item(7, 0, 32, "shape")
    command = [sys.executable, "-m", "pipelines.serve", models[0], f"tuned={models[1]}", "--port", port]
    with (home / "serve.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            address = f"http://127.0.0.1:{port}/v1/predict"
            for _ in range(600):
                if server.poll() is not None or "serving http" in (home / "serve.log").read_text():
                    break
                time.sleep(0.2)
            answers = []
            for query in ("", "?task=tuned"):
                request = urllib.request.Request(address + query, image, {"Content-Type": "image/jpeg"})
                answers.append(kept(json.load(urllib.request.urlopen(request, timeout=60))))
            return answers
        finally:
            server.send_signal(signal.SIGTERM)


def main(*options: str) -> None:
    """Record the results, or compare them with the record."""
    is_written, shown = (
        options == ("--write",),
        {name: value for name, value in facts().items() if name.startswith(("hardware.", "version."))},
    )
    record = {} if is_written else json.loads(RECORD.read_text())
    if record and record["machine"] != shown:
        print(f"the record is of another machine: {record['machine']}")
    here = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="vitray-golden-") as name:
        os.environ |= {"VITRAY_HOME": f"{name}/home", "PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}"}
        os.chdir(name)
        found: dict[str, Any] = {}
        # Four CPUs on every machine: the threads of a worker follow from them.
        with ray_session(cpus=4):
            for key, value in results(Path(name)):
                found[key] = json.loads(json.dumps(value))
                state = "" if is_written else "equal" if record["results"].get(key) == found[key] else "DIFFERS"
                print(f"{key}: {state}", flush=True)
        os.chdir(here)
    if is_written:
        RECORD.write_text(f"{json.dumps({'machine': shown, 'results': found}, indent=1)}\n")
    elif found != record["results"]:
        names = [key for key in {**record["results"], **found} if record["results"].get(key) != found.get(key)]
        sys.exit(f"{len(names)} of {len(found)} results differ: {', '.join(names)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
