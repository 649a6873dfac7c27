"""Everything MLflow: a run's records wait on the driver's disk, and arrive once, in order, whatever happens."""

from vitray.registry import shown as shown
from vitray.registry import tracking_uri as tracking_uri
from vitray.tracking.machine import facts as facts
from vitray.tracking.machine import sample as sample
from vitray.tracking.shipping import artifacts_beside as artifacts_beside
from vitray.tracking.tracker import Flushed as Flushed
from vitray.tracking.tracker import Tracker as Tracker
from vitray.tracking.tracker import close_orphans as close_orphans
from vitray.tracking.tracker import flush_all as flush_all
