"""Make a user of MLflow's server, or give it another password: mlflow_users.py SETTINGS [NAME].

SETTINGS is the configuration of the server, with the administrator's password, which is on the head alone. Without a
name the user is that of jobs, in ~/.mlflow/credentials. For a person the password is new, and printed.
"""

import configparser
import os
import secrets
import sys
import time
import urllib.request

SERVER = os.environ.get("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
START_SECONDS = 80


def main(settings: str, name: str = "") -> None:
    administrator, jobs = read_ini(settings), read_ini(os.path.expanduser("~/.mlflow/credentials"))
    password = secrets.token_urlsafe(24) if name else jobs["mlflow_tracking_password"]
    await_server()
    os.environ["MLFLOW_TRACKING_USERNAME"] = administrator["admin_username"]
    os.environ["MLFLOW_TRACKING_PASSWORD"] = administrator["admin_password"]
    set_password(name or jobs["mlflow_tracking_username"], password)
    if name:
        print(f"{name}: {password}")


def read_ini(path: str) -> configparser.SectionProxy:
    parser = configparser.ConfigParser()
    with open(path) as file:
        parser.read_file(file)
    return parser["mlflow"]


def await_server() -> None:
    for _ in range(START_SECONDS):
        try:
            with urllib.request.urlopen(f"{SERVER}/health", timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise SystemExit(f"{SERVER}: no answer within {START_SECONDS} s")


def set_password(name: str, password: str) -> None:
    """Make a user without rights over others, or change its password."""
    from mlflow.exceptions import MlflowException
    from mlflow.server import get_app_client

    client = get_app_client("basic-auth", SERVER)
    try:
        user = client.get_user(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        client.create_user(name, password)
        return
    client.update_user_password(name, password)
    if user.is_admin:  # as the user of jobs was in earlier versions
        client.update_user_admin(name, is_admin=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
