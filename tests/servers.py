"""Production servers on a test host: Ceph's S3 gateway, and MLflow on PostgreSQL."""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from hosts import Host, until

# Seconds for a server to listen.
START_TIMEOUT = 300

KEY, SECRET, USER = "vitraykey", secrets.token_urlsafe(24), "vitray"

CEPH = """
[global]
fsid = 2f7c0a52-6f0e-4b39-9a52-7d3c0e1b9a10
mon host = v2:{address}:3300
public network = 10.55.0.0/24
ms bind msgr1 = false
keyring = {own}/keys
run dir = {own}
admin socket = {own}/$name.sock
log file = {own}/$name.log
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
[osd]
osd data = {own}/osd
osd objectstore = memstore
memstore device bytes = 2147483648
[mon]
mon data = {own}/mon
[client.gateway]
rgw data = {own}
rgw frontends = beast endpoint={address}:8000
rgw dns name = {address}
"""

# One monitor, one in-memory store, and their keys; S3 needs no manager.
PREPARE = """
ceph-authtool --create-keyring {own}/keys --gen-key --name mon. --cap mon 'allow *'
ceph-authtool {own}/keys --gen-key --name client.admin --cap mon 'allow *' --cap osd 'allow *'
ceph-authtool {own}/keys --gen-key --name client.gateway --cap mon 'allow rwx' --cap osd 'allow rwx'
ceph-authtool {own}/keys --gen-key --name osd.0 --cap mon 'allow profile osd' --cap mgr 'allow profile osd' \\
  --cap osd 'allow *'
monmaptool --create --clobber --fsid 2f7c0a52-6f0e-4b39-9a52-7d3c0e1b9a10 --addv a v2:{address}:3300 {own}/map
mkdir -p {own}/mon {own}/osd
ceph-mon --id a --mkfs --monmap {own}/map --keyring {own}/keys
"""


def start_ceph(host: Host, logs: Path) -> dict[str, str]:
    """Start an S3 server with one user on this host; return the environment of its clients."""
    where = {"own": host.own, "address": host.address}
    conf = host.own / "ceph.conf"
    environment = {"CEPH_CONF": str(conf)}
    host.call(["sh", "-ec", f"cat > {conf}"], given=CEPH.format(**where))
    host.call(["sh", "-ec", PREPARE.format(**where)], environment)
    host.start(["ceph-mon", "--id", "a", "-f"], logs / "mon.log", environment)
    store = (
        "id=$(cat /proc/sys/kernel/random/uuid)\n"
        "key=$(ceph-authtool {own}/keys --name osd.0 --print-key)\n"
        'echo "{{\\"cephx_secret\\": \\"$key\\"}}" | ceph osd new $id -i -\n'
        "ceph-osd --id 0 --mkfs --osd-uuid $id\n"
    )
    host.call(["sh", "-ec", store.format(**where)], environment)
    host.start(["ceph-osd", "--id", "0", "-f"], logs / "osd.log", environment)
    _start_server(host, ["radosgw", "--name", "client.gateway", "-f"], logs / "gateway.log", environment, 8000)
    user = ["user", "create", f"--uid={USER}", f"--display-name={USER}", f"--access-key={KEY}", f"--secret={SECRET}"]
    host.call(["radosgw-admin", "--name", "client.gateway", *user], environment)
    return {
        "AWS_ENDPOINT_URL": f"http://{host.address}:8000",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        # Ceph 16 does not know the trailing checksums that clients of 2025 send by default.
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
    }


def start_mlflow(host: Host, logs: Path, python: str, artifacts: str) -> dict[str, str]:
    """Start MLflow's server, with a password and its own PostgreSQL; return the environment of its clients."""
    programs = max(Path("/usr/lib/postgresql").iterdir(), key=lambda folder: int(folder.name)) / "bin"  # the newest
    data, password = host.own / "postgres", secrets.token_urlsafe(24)
    as_postgres = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
    host.call(["sh", "-ec", f"cat > {data}.password && chmod 644 {data}.password"], given=password)
    access = ["-A", "scram-sha-256", f"--pwfile={data}.password", "-U", USER]
    host.call([*as_postgres, programs / "initdb", "-D", data, *access])
    listens = ["-c", f"listen_addresses={host.address}", "-c", f"unix_socket_directories={data}"]
    _start_server(host, [*as_postgres, programs / "postgres", "-D", data, *listens], logs / "postgres.log", {}, 5432)
    # Other hosts may connect with the password.
    rule = f"echo 'host all all 10.55.0.0/24 scram-sha-256' >> {data}/pg_hba.conf"
    host.call([*as_postgres, "sh", "-ec", f"{rule} && {programs}/pg_ctl reload -D {data}"])
    store = f"postgresql://{USER}:{password}@{host.address}/postgres"
    args = ["mlflow", "server", "--app-name", "basic-auth", "--host", host.address, "--port", "5000", "--workers", "1"]
    args += ["--artifacts-destination", artifacts]
    # The settings of deploy/mlflow.sh.
    settings, of_jobs, jobs = host.own / "mlflow.ini", host.own / ".mlflow" / "credentials", secrets.token_urlsafe(24)
    lines = ["[mlflow]", "default_permission = READ", f"database_uri = sqlite:///{host.own}/auth.db"]
    lines += ["admin_username = admin-0", f"admin_password = {secrets.token_hex(32)}", "auth_cache_ttl_seconds = 60"]
    write = "umask 077 && mkdir -p $(dirname $0) && cat > $0"
    host.call(["sh", "-ec", write, settings], given="\n".join(lines))
    lines = ["[mlflow]", f"mlflow_tracking_username = {USER}", f"mlflow_tracking_password = {jobs}"]
    host.call(["sh", "-ec", write, of_jobs], given="\n".join(lines))
    environment = {"MLFLOW_BACKEND_STORE_URI": store, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    environment |= {"MLFLOW_AUTH_CONFIG_PATH": str(settings), "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(32)}
    _start_server(host, [python, "-m", *args], logs / "mlflow.log", environment, 5000)
    address = {"MLFLOW_TRACKING_URI": f"http://{host.address}:5000"}
    set_mlflow_password(host, python, address)
    return address | {"MLFLOW_TRACKING_USERNAME": USER, "MLFLOW_TRACKING_PASSWORD": jobs}


def set_mlflow_password(host: Host, python: str, address: Mapping[str, str], *name: str) -> str:
    """Make a user of MLflow as on the head of a cluster: that of jobs, or a person's, whose password is returned."""
    script = Path(__file__).parents[1] / "deploy" / "mlflow_users.py"
    environment = {**address, "HOME": str(host.own)}
    return host.call([python, script, host.own / "mlflow.ini", *name], environment).rpartition(": ")[2].strip()


def dump_mlflow(host: Host) -> str:
    """Return all data of MLflow's database as text."""
    password = host.seen(host.own / "postgres.password").read_text()
    command = ["pg_dump", "-h", host.address, "-U", USER, "--data-only", "postgres"]
    return host.call(command, {"PGPASSWORD": password})


def _start_server(host: Host, command: Sequence[object], log: Path, environment: Mapping[str, str], port: int) -> None:
    """Start a server, and wait until it listens."""
    server = host.start(command, log, environment)

    def listens() -> bool:
        assert server.poll() is None, log.read_text()[-3000:]
        return f":{port} " in host.call(["ss", "-ltn"])

    until(listens, START_TIMEOUT, f"{command[0]} listens", log)
