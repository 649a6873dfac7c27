#!/usr/bin/env bash
# MLflow's server as a service of the head: mlflow.sh DESTINATION [ADDRESS]. The destination is of artifacts
# (s3://bucket/mlflow, or a folder), the address the head's private one.
#
# It listens on 127.0.0.1:5000, the far end of `make tunnel`; a proxy of systemd's listens on the head's private
# address, for jobs. Both ask for the user and password of ~/.mlflow/credentials. Runs at each start of the cluster.
set -euo pipefail
destination=$1
home=/var/lib/vitray
settings=/etc/vitray
address=${2:-$(hostname -I | cut -d' ' -f1)}
python=$HOME/venv/bin/python

~/venv/bin/uv pip install --quiet --compile-bytecode --python "$python" -c ~/vitray/constraints.txt -e ~/vitray"[server]"
sudo install -d -m 700 -o "$USER" "$home" "$settings"

# ---- settings, in files that one user may read: what stands in a command, every user of the machine can list -------
umask 077
if ! test -e $settings/mlflow.env; then
  # For PostgreSQL change the store there, postgresql+psycopg2://user:password@host/mlflow, and install psycopg2-binary.
  cat >$settings/mlflow.env <<END
MLFLOW_BACKEND_STORE_URI=sqlite:///$home/mlflow.db
MLFLOW_FLASK_SERVER_SECRET_KEY=$(openssl rand -hex 32)
MLFLOW_AUTH_CONFIG_PATH=$settings/mlflow.ini
MLFLOW_DISABLE_TELEMETRY=true
# Jobs of its own: seven processes and 1.2 GB that serve nothing here.
MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false
END
fi
credential() { sed -n "s/^mlflow_tracking_$1 *= *//p" ~/.mlflow/credentials; }
# Others that the owner lets in see what they are given, not everything. A password that was right stays so for a minute:
# to check one takes tens of milliseconds of a CPU, and a call of MLflow checks it several times.
cat >$settings/mlflow.ini <<END
[mlflow]
default_permission = NO_PERMISSIONS
database_uri = sqlite:///$home/auth.db
admin_username = $(credential username)
admin_password = $(credential password)
auth_cache_ttl_seconds = 60
END

# ---- services ------------------------------------------------------------------------------------------------------
unit() { sudo tee "/etc/systemd/system/$1" >/dev/null && sudo chmod 644 "/etc/systemd/system/$1"; }

unit vitray-mlflow.service <<END
[Unit]
Description=MLflow for vitray
Wants=network-online.target
After=network-online.target
[Service]
User=$USER
EnvironmentFile=$settings/mlflow.env
# MLflow answers to no other name (403), and by itself to none but those of RFC 1918.
Environment=MLFLOW_SERVER_ALLOWED_HOSTS=localhost:*,127.0.0.1:*,$address:*,$(hostname):*
# A head that is new finds the records of the one before.
ExecStartPre=$python $HOME/vitray/deploy/mlflow_store.py restore $home $destination/server
# The health check of workers: five seconds are few for a busy machine, on which they would be started again and again.
ExecStart=$python -m mlflow server --app-name basic-auth --host 127.0.0.1 --port 5000 --workers 2 \\
  --uvicorn-opts "--timeout-worker-healthcheck 120" --artifacts-destination $destination
Restart=always
RestartSec=5
UMask=0077
NoNewPrivileges=true
PrivateTmp=true
ProtectSystem=full
[Install]
WantedBy=multi-user.target
END

unit vitray-mlflow-private.socket <<END
[Unit]
Description=MLflow for vitray, on the private address
[Socket]
ListenStream=$address:5000
FreeBind=true
[Install]
WantedBy=sockets.target
END

unit vitray-mlflow-private.service <<END
[Unit]
Description=MLflow for vitray, on the private address
Requires=vitray-mlflow-private.socket
After=vitray-mlflow-private.socket
[Service]
DynamicUser=true
ExecStart=/usr/lib/systemd/systemd-socket-proxyd 127.0.0.1:5000
END

# The disk ends with the head: the databases are kept where the artifacts are.
unit vitray-mlflow-save.service <<END
[Unit]
Description=Keep the records of MLflow for vitray
[Service]
Type=oneshot
User=$USER
ExecStart=$python $HOME/vitray/deploy/mlflow_store.py save $home $destination/server
END

unit vitray-mlflow-save.timer <<END
[Unit]
Description=Keep the records of MLflow for vitray
[Timer]
OnUnitActiveSec=15min
OnActiveSec=15min
[Install]
WantedBy=timers.target
END

sudo systemctl daemon-reload
sudo systemctl enable --quiet vitray-mlflow.service
sudo systemctl restart vitray-mlflow.service
sudo systemctl enable --quiet --now vitray-mlflow-private.socket vitray-mlflow-save.timer
