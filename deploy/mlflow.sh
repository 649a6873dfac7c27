#!/usr/bin/env bash
# Install MLflow's server as a service on the head node: mlflow.sh DESTINATION [ADDRESS]. DESTINATION stores artifacts
# (s3://bucket/mlflow, or a folder); ADDRESS is the head's private address.
#
# The server listens on 127.0.0.1:5000, the end of `make tunnel`; a systemd proxy listens on the private address, for
# jobs. Both require a user and password; jobs have those of ~/.mlflow/credentials. The script runs at each start of the
# cluster. `mlflow_users.py /etc/vitray/mlflow.ini NAME` makes a person's user.
set -euo pipefail
destination=$1
# Beside the artifacts, of which every user of MLflow may read each by its path.
backup=${destination%/}-server
home=/var/lib/vitray
settings=/etc/vitray
address=${2:-$(hostname -I | cut -d' ' -f1)}
python=$HOME/venv/bin/python

sudo install -d -m 700 -o "$USER" "$home" "$settings"

# ---- settings, in private files, because every user of the machine can list command lines --------------------------
umask 077
if ! test -e $settings/mlflow.env; then
  # For PostgreSQL set the store to postgresql+psycopg2://user:password@host/mlflow, and install psycopg2-binary.
  cat >$settings/mlflow.env <<END
MLFLOW_BACKEND_STORE_URI=sqlite:///$home/mlflow.db
MLFLOW_FLASK_SERVER_SECRET_KEY=$(openssl rand -hex 32)
MLFLOW_AUTH_CONFIG_PATH=$settings/mlflow.ini
MLFLOW_DISABLE_TELEMETRY=true
# MLflow's job runner takes seven processes and 1.2 GB, and vitray does not use it.
MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false
END
  # Of an S3-compatible server: AWS_ENDPOINT_URL=... mlflow.sh s3://bucket/mlflow. Keys are in ~/.aws/credentials.
  env | grep -E '^AWS_(ENDPOINT_URL(_S3)?|(DEFAULT_)?REGION|(REQUEST|RESPONSE)_CHECKSUM_[A-Z]+)=' >>$settings/mlflow.env || true
fi
# The administrator's password is made here and stays here; jobs and people are users without rights over others. Each
# head has an administrator of its own, because a new one restores the users of the last, whose password went with it.
# Users see all runs and change only their own. Authentication results are cached for 60 s: a check takes tens of
# milliseconds of CPU, and a call of MLflow makes several.
if ! grep -qs '^admin_username = admin-' $settings/mlflow.ini; then
  cat >$settings/mlflow.ini <<END
[mlflow]
default_permission = READ
database_uri = sqlite:///$home/auth.db
admin_username = admin-$(openssl rand -hex 4)
admin_password = $(openssl rand -hex 32)
auth_cache_ttl_seconds = 60
END
fi

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
# MLflow rejects requests for other host names with 403; its default allows only RFC 1918 addresses.
Environment=MLFLOW_SERVER_ALLOWED_HOSTS=localhost:*,127.0.0.1:*,$address:*,$(hostname):*
# A new head node starts with the databases of the previous one.
ExecStartPre=$python $HOME/vitray/deploy/mlflow_store.py restore $home $backup
# Uvicorn restarts workers that miss a health check of 5 s by default, which is too short for a busy machine.
ExecStart=$python -m mlflow server --app-name basic-auth --host 127.0.0.1 --port 5000 --workers 2 \\
  --uvicorn-opts "--timeout-worker-healthcheck 120" --artifacts-destination $destination
# The user of jobs, with the password that all nodes have.
ExecStartPost=$python $HOME/vitray/deploy/mlflow_users.py $settings/mlflow.ini
Restart=always
RestartSec=5
UMask=0077
NoNewPrivileges=true
PrivateTmp=true
ProtectSystem=full
# MLflow lets its users place the artifacts of an experiment in any folder of the server, and so read from it.
InaccessiblePaths=-$HOME/.ray -$HOME/.ssh -$HOME/.vitray
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

# The disk is lost with the head node, so the databases are backed up beside the artifacts.
unit vitray-mlflow-save.service <<END
[Unit]
Description=Back up the MLflow databases of vitray
[Service]
Type=oneshot
User=$USER
EnvironmentFile=$settings/mlflow.env
ExecStart=$python $HOME/vitray/deploy/mlflow_store.py save $home $backup
END

unit vitray-mlflow-save.timer <<END
[Unit]
Description=Back up the MLflow databases of vitray
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
