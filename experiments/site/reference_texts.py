"""Meanings of the environment variables, metrics and artifacts that the source names, for docs/reference/."""

import html
import re

VARIABLES = {
    "VITRAY_HOME": "folder of records that wait for MLflow (`spool/`), of downloaded models (`models/`) and of what"
    " torch.compile made (`compiled/`), both safe to remove; default `~/.vitray`",
    "TMPDIR": "folder of temporary files: checkpoints before their upload, outputs of an evaluation above 2 GiB",
    "VITRAY_SERVE_TOKEN": "bearer token of `vitray serve`; needed for an address beyond this machine",
    "RAY_SERVE_ENABLE_HA_PROXY": "`1`: Ray Serve listens on all interfaces, and `vitray serve` on Ray needs a token",
    "VITRAY_GROWS_WITHIN": "seconds that a run waits for an autoscaling cluster to add nodes; set by its cluster file",
    "VITRAY_GROWS_DEVICE": "`gpu` or `cpu`: the device of the nodes that the cluster adds",
    "RAY_ADDRESS": "the cluster: `host:6379` to drive a run from here, `http://...:8265` for `submit`, `jobs`, `stop`;"
    " without it, a local Ray starts",
    "RAY_API_SERVER_ADDRESS": "the dashboard that takes jobs; overrides `RAY_ADDRESS`",
    "RAY_AUTH_MODE": "`token` if the cluster asks for a token; a local Ray always does",
    "RAY_AUTH_TOKEN": "the token of the cluster; that of a local Ray is random without it",
    "RAY_AUTH_TOKEN_PATH": "file of the token; default `~/.ray/auth_token`",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "`0` ignores notices of preemption; a local Ray has `0`",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "seconds in which Ray Train places a group of workers before it tries"
    " again; default 10",
    "RAY_raylet_start_wait_time_s": "timeout of a local Ray's start, in seconds; default 180",
    "MLFLOW_TRACKING_URI": "the tracking store; default `mlruns.db` in the working folder; sent with a job,"
    " unless it is an address of this machine",
    "MLFLOW_TRACKING_USERNAME": "user of MLflow's server; not sent with a job",
    "MLFLOW_TRACKING_PASSWORD": "password of MLflow's server; not sent with a job",
    "MLFLOW_TRACKING_TOKEN": "token of MLflow's server; not sent with a job",
    "MLFLOW_S3_ENDPOINT_URL": "S3-compatible server of MLflow's artifacts; sent with a job",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "retries of a request to MLflow; default 0, as records wait on disk; sent with a"
    " job",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "timeout of a request to MLflow, in seconds; default 30, in `doctor` 20; with its"
    " retries it bounds the lookup of a model as a whole; sent with a job",
    "AWS_ENDPOINT_URL": "S3-compatible server; sent with a job",
    "AWS_ENDPOINT_URL_S3": "the same for S3 only; overrides `AWS_ENDPOINT_URL`; sent with a job",
    "AWS_REGION": "region of the bucket; sent with a job",
    "AWS_DEFAULT_REGION": "region where `AWS_REGION` is not set; sent with a job",
    "AWS_REQUEST_CHECKSUM_CALCULATION": "`when_required` for servers without checksums; sent with a job",
    "AWS_RESPONSE_CHECKSUM_VALIDATION": "`when_required` for servers without checksums; sent with a job",
    "AWS_ACCESS_KEY_ID": "key of the bucket; not sent with a job: nodes have a role or `~/.aws/credentials`",
    "AWS_SECRET_ACCESS_KEY": "secret of that key; not sent with a job",
    "AWS_SESSION_TOKEN": "token of a temporary key; not sent with a job",
    "AWS_PROFILE": "profile of `~/.aws/config` in place of a key; not sent with a job",
    "AWS_EC2_METADATA_SERVICE_ENDPOINT": "where a spot node hears of its end, if not at EC2's own address",
    "GLOO_SOCKET_IFNAME": "network interface of the workers on CPUs; `vitray doctor` checks it on each node",
    "NCCL_DEBUG": "`INFO` at `ray start`: NCCL logs which network the workers on GPUs use",
    "NCCL_SOCKET_IFNAME": "network interface of the workers on GPUs, set at `ray start` like the one before",
    "OMP_NUM_THREADS": "compute threads of `evaluate`, `inspect` and `predict` where they compute in their own process;"
    " in processes that decode, vitray sets 1",
    "RAY_health_check_period_ms": "milliseconds between two checks of a node; set by the cluster files",
    "RAY_health_check_timeout_ms": "timeout of such a check; after five failures Ray counts the node as dead",
    "RAY_grpc_client_keepalive_time_ms": "milliseconds of silence until a connection is checked; set by the cluster"
    " files",
    "RAY_grpc_client_keepalive_timeout_ms": "timeout of that check; after it, the node's tasks are retried elsewhere",
}
# {name: (value, meaning)} of those that vitray sets, or Ray.
SET_VARIABLES = {
    "MLFLOW_AUTH_CONFIG_PATH": ("`/etc/vitray/mlflow.ini`", "file of MLflow's users on the head"),
    "MLFLOW_FLASK_SERVER_SECRET_KEY": ("random", "key of MLflow's sessions on the head"),
    "MLFLOW_SERVER_ALLOWED_HOSTS": ("the head's names", "host names that MLflow on the head answers to"),
    "VITRAY_GIT_COMMIT": ("a hash", "commit of a job, whose files have no repository"),
    "VITRAY_GIT_DIRTY": ("`true` or `false`", "whether that commit had changes"),
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": ("0", "tasks without a GPU keep the list of GPUs"),
    "RAY_AIR_NEW_OUTPUT": ("0", "Tune prints nothing of its own"),
    "RAY_DATA_DISABLE_PROGRESS_BARS": ("1", "Ray Data shows no progress bars"),
    "RAY_DATA_EXECUTION_NO_PROGRESS_TIMEOUT_S": ("300", "seconds until Ray Data reports a lack of CPUs"),
    "RAY_DATA_USAGE_DISABLED": ("1", "Ray Data counts no usage in workers"),
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": ("0", "a local Ray listens on 127.0.0.1 alone"),
    "RAY_GCS_SERVER_PORT": ("a free port", "port of a local Ray, during its start"),
    "RAY_TMPDIR": ("a folder", "folder of the logs of a local Ray; default `TMPDIR`"),
    "RAY_HEAD_IP": ("an address", "address of the head in the commands of a cluster file; Ray sets it in `make up`"),
    "RAY_IGNORE_UNHANDLED_ERRORS": ("1", "workers log no errors of tasks that nobody waits for"),
    "RAY_JOB_CONFIG_JSON_ENV_VAR": ("JSON", "configuration of a submitted job; Ray sets it"),
    "RAY_JOB_STOP_WAIT_TIME_S": (
        "30",
        "seconds between the signal to a stopped job and its kill; `vitray submit` sends 30 in place of your value, and"
        " the value of a cluster file is for `ray job submit`",
    ),
    "RAY_TRAIN_ENABLE_PRINT_PATCH": ("0", "otherwise a print of a worker appears twice"),
    "RAY_TRAIN_ENABLE_STATE_TRACKING": ("1", "Ray's dashboard lists the run"),
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": ("0.5", "seconds between two checks of the workers"),
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": ("1", "seconds between two looks for a notice of preemption"),
    "RAY_UP_enable_autoscaler_v2": ("0 or 1", "version 2 of the autoscaler in `make up`; 0 for your own machines"),
    "RAY_USAGE_STATS_ENABLED": ("0", "Ray sends no statistics"),
    "TUNE_DISABLE_SIGINT_HANDLER": ("1", "a sweep handles Ctrl-C itself"),
    "TUNE_PRINT_ALL_TRIAL_ERRORS": ("0", "the sweep reports failed trials"),
    "KINETO_LOG_LEVEL": ("99", "torch's profiler prints nothing in `vitray bench finetune`"),
    "MLFLOW_BACKEND_STORE_URI": ("an address", "store of `vitray ui`, and of MLflow on the head"),
    "MLFLOW_DISABLE_TELEMETRY": ("true", "MLflow sends no statistics"),
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": ("false", "MLflow shows no progress bars"),
    "MLFLOW_LOGGING_LEVEL": ("WARNING", "MLflow logs warnings and errors"),
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": ("false", "MLflow's job runner, which takes a gigabyte, does not start"),
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": ("true", "MLflow prints no addresses"),
    "ORT_DISABLE_TELEMETRY": ("1", "onnxruntime stores no device id and sends no statistics"),
}

# {name or template in the source: (name on the page, meaning)}; "=" repeats the name, "" leaves the row out.
METRICS = {
    "train/loss": ("=", "mean training loss since the last record"),
    "train/lr": ("=", "learning rate of the step"),
    "train/images_per_second": ("=", "images per second of all workers since the last record"),
    "train/data_wait_share": ("=", "share of the time in which the worker waited for images, 0 to 1"),
    "train/grad_norm": ("=", "norm of the gradient before clipping"),
    "train/epoch": ("=", "epochs since the start"),
    "train/{name}": ("`train/perplexity`", "of a tokenizer: number of equally frequent codes with the same entropy"),
    "data/corrupt": ("=", "images that could not be decoded; others took their places"),
    "val/{name}{suffix}": (
        "`val/top1`, `val/top5`, `val/mean_per_class`, `val/map`, `val/loss`, `val/perplexity`",
        "scores of the evaluated split, shares from 0 to 1; with `_ema`, of the averaged weights",
    ),
    "val/loss": ("", ""),
    "val/{score}": ("", ""),
    "val/{score}_ema": ("", ""),
    "best/val_{score}": ("", ""),
    "val/": ("", ""),
    "best/": ("", ""),
    "best/val_{name}": (
        "`best/val_top1`, `best/val_map`, `best/val_loss`",
        "highest top-1 so far; of several labels an image, highest mAP; of tasks without labels, lowest loss",
    ),
    "best/{space.goal.metric.replace('/', '_')}": ("`best/GOAL`", "of a sweep: the best goal of its trials so far"),
    "probe/{name}": ("`probe/NAME`", "scores of `evaluate.probes`; [evaluation](../evaluation.md) explains them"),
    "{images.split}/{score}": (
        "`SPLIT/NAME`, `SPLIT/NAME_low`, `SPLIT/NAME_high`",
        "scores of `vitray evaluate` by their names in its JSON, with the bounds of their intervals of 95 %",
    ),
    "cost/device_seconds": (
        "=",
        "training time times workers, without start, evaluations and undone steps",
    ),
    "cost/images": ("=", "images seen in training"),
    "cost/flops": (
        "=",
        "operations of the training, of its matrix products in both passes; a multiply-add is two",
    ),
    "cost/teacher_flops": ("=", "operations of the teacher, part of `cost/flops`"),
    "cost/step_ms": ("=", "milliseconds of a step, from the median speed"),
    "cost/mfu": ("=", "share of the device's peak operations, for known GPUs"),
    "cost/{name}": (
        "`cost/NAME`",
        "measured at the end: {costs}; the latency is the fastest forward pass of one image; on a CPU, of one thread",
    ),
    "model/bytes": ("=", "bytes of the weights in the model folder"),
    "model/share": (
        "=",
        "share of the network's bytes in the model folder: 1 for a whole model, less for a delta",
    ),
    "start/{stage.replace(' ', '_')}_seconds": (
        "`start/ray_seconds`, `start/workers_seconds`, `start/first_step_seconds`",
        "seconds from the call to this stage",
    ),
    "system/": (
        "`system/NAME`",
        "load of the node, with MLflow's names: {load}; where a worker uses a GPU, for one GPU of each node also"
        " `gpu_N_memory_usage_megabytes`, `gpu_N_memory_usage_percentage` and, with the package nvidia-ml-py,"
        " `gpu_N_utilization_percentage`",
    ),
    "system/node_{node}/": ("`system/node_N/NAME`", "the same of each of several nodes"),
}
ARTIFACTS = {
    "run.yaml": ("=", "all settings of a run, as a recipe; of a sweep, its recipe"),
    "space.yaml": ("=", "the search space of a sweep"),
    "audit.md": ("=", "of a fine-tuning: trained and frozen parameters by part"),
    "curves.png": ("=", "curves of losses, scores, learning rate and speed"),
    "augmented.png": ("=", "augmented training images"),
    "confusion.png": ("=", "confusion matrix of the last evaluation"),
    "mistakes.png": ("=", "most confident mistakes of the last evaluation"),
    "reconstructed.png": ("=", "original, masked and reconstructed images of a run without labels"),
    "examples/predictions": ("=", "images by step: the same images with predictions at every evaluation"),
    "examples/reconstructed": ("=", "images by step: reconstructions"),
    "figures/{name}": ("`figures/NAME`", "images by step: `evaluate.figures`"),
    "evaluation/{name}": ("`evaluation/FILE`", "page and tables of `vitray evaluate`"),
    "inspection/{name}": ("`inspection/FILE`", "page and figures of `vitray inspect`"),
    "report/{path.name}": ("`report/FILE`", "report of a sweep: page, tables and figures"),
}


def prose(text: str) -> str:
    """Return a text as one paragraph of Markdown, which would read some signs outside code spans."""
    text = re.sub(r"\s+", " ", text).strip()
    return "`".join(
        part if index % 2 else re.sub(r"([*_\[{])", r"\\\1", part).replace("<", "&lt;")
        for index, part in enumerate(text.split("`"))
    )


def cell(text: str) -> str:
    """Return a text as the cell of a table, which a bar would end."""
    return prose(text).replace("|", "&#124;")


def code_cell(text: str) -> str:
    """Return code as the cell of a table. GitHub and the site read a bar in backticks in different ways."""
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"
