"""The settings of a served family, as the command line or a Serve config file gives them; nothing heavy."""

from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import Field, model_validator

from vitray.config.sections import Section
from vitray.errors import ConfigError, nearest

# The environment variable with the bearer token.
TOKEN_VARIABLE = "VITRAY_SERVE_TOKEN"  # noqa: S105
# The task of the base network itself.
BASE_TASK = "base"
LOOPBACK = ("127.0.0.1", "::1", "localhost")

Count = Annotated[int, Field(ge=1, le=10**9)]
Bytes = Annotated[int, Field(ge=1, le=2**40)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


class Limits(Section):
    """Bounds of a request and of the queue."""

    body_bytes: Bytes = 32 * 2**20
    """The largest body of a request."""
    memory_bytes: Bytes = 512 * 2**20
    """The largest sum of the bodies that the gateway holds; a request whose body exceeds it gets 503."""
    upload_seconds: Seconds = 60.0
    """The longest time in which a body arrives; a slow client would keep a place for itself."""
    images: Count = 64
    """The most images of a request."""
    pixels: Count = 40_000_000
    """The most pixels of an image."""
    queue: Count = 256
    """The most requests that wait for a replica; further ones get 503 at once."""

    @model_validator(mode="after")
    def _largest_body_fits(self) -> Self:
        if self.memory_bytes < self.body_bytes:
            raise ValueError(f"memory_bytes: got {self.memory_bytes}, expected at least body_bytes, {self.body_bytes}")
        return self


class Serving(Section):
    """A base network, its tasks, and their execution."""

    base: str
    """The address of the base network."""
    tasks: dict[str, str] = Field(default_factory=dict)
    """{task: address of a delta}; an alias such as models:/birds@champion is followed."""
    limits: Limits = Limits()
    batch: Count = 64
    """The most images of a batch: those that arrive while the one before is computed."""
    replicas: Annotated[tuple[Count, Count], Field(strict=False)] = (1, 1)
    """The fewest and the most replicas; Serve scales between them with the load."""
    cpus: Annotated[float, Field(gt=0, le=10_000)] = 1.0
    """CPUs of a replica; also its threads."""
    gpus: Annotated[float, Field(ge=0, le=8)] | None = None
    """GPUs of a replica; `vitray serve` chooses by default, a Serve config file means 0."""
    precision: Annotated[str, Field(pattern="^(fp32|bf16)$")] = "fp32"
    """bf16 computes under autocast."""
    graphs: bool = False
    """Computes the batches of one task as CUDA graphs on a GPU."""
    follow_seconds: Seconds = 10.0
    """Interval at which a replica checks the aliases that tasks follow."""
    token: bool = False
    """Whether a request needs the token in VITRAY_SERVE_TOKEN."""
    store: str | None = None
    """MLFLOW_TRACKING_URI of the replicas; null: that of their nodes."""


def parse_tasks(words: Sequence[str]) -> dict[str, str]:
    """Return {task: address} of words such as birds=models/birds."""
    tasks: dict[str, str] = {}
    for word in words:
        name, equals, url = word.partition("=")
        if not equals or not url or not is_task_name(name):
            raise ConfigError(
                f"{word}: expected TASK=DELTA, as in birds=models/birds; a task has letters, digits and _-."
            )
        if name == BASE_TASK:
            raise ConfigError(f"{word}: {BASE_TASK} is the task of MODEL itself; expected another name")
        if name in tasks:
            raise ConfigError(
                f"{word}: the task {name} is there already, as {name}={tasks[name]}; expected another name"
            )
        tasks[name] = url
    return tasks


def is_task_name(name: str) -> bool:
    """Whether a task may have this name."""
    return 0 < len(name) <= 100 and name.isascii() and all(c.isalnum() or c in "_-." for c in name)


def unknown_task(name: str, tasks: Sequence[str]) -> str:
    """Return the message about a task that is not served."""
    shown = ", ".join(tasks[:20]) + (f" and {len(tasks) - 20} others" if len(tasks) > 20 else "")
    return f"task: got {name[:100]!r}, expected one of {shown}{nearest(name[:100], tasks)}"


def default_task(tasks: Sequence[str]) -> str | None:
    """Return the task of a request that names none: the base, or the only task; None if there is no such."""
    return BASE_TASK if BASE_TASK in tasks else tasks[0] if len(tasks) == 1 else None


def check_address(host: str, token: str | None) -> None:
    """Refuse an address beyond this machine without a token in the environment, and a token that is too short."""
    if host not in LOOPBACK and not token:
        raise ConfigError(
            f"--host: got {host}, which other machines reach, and no token; set {TOKEN_VARIABLE} to a secret that"
            " requests then give as `Authorization: Bearer SECRET`, or keep --host 127.0.0.1"
        )
    if token is not None and (len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token):
        raise ConfigError(f"{TOKEN_VARIABLE}: got {len(token)} characters, expected at least 16, printable, no spaces")
