"""Everything MLflow: a run's records wait on the driver's disk, and arrive once, in order, whatever happens."""

from vitray.errors import redact_uri as redact_uri
from vitray.tracking.mlflow_client import tracking_uri as tracking_uri
from vitray.tracking.system_info import facts as facts
from vitray.tracking.system_info import sample as sample
from vitray.tracking.tracker import Flushed as Flushed
from vitray.tracking.tracker import Tracker as Tracker
from vitray.tracking.tracker import close_orphans as close_orphans
from vitray.tracking.tracker import flush_all as flush_all
from vitray.tracking.uploader import artifacts_beside as artifacts_beside
