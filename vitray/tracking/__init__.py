"""Experiment tracking with MLflow: records are spooled on the driver's disk and uploaded once, in order."""

from vitray.tracking.flush import FlushResult as FlushResult
from vitray.tracking.flush import flush_all as flush_all
from vitray.tracking.mlflow_client import artifact_root as artifact_root
from vitray.tracking.mlflow_client import tracking_uri as tracking_uri
from vitray.tracking.tracker import TrackedRun as TrackedRun
from vitray.tracking.tracker import Tracker as Tracker
