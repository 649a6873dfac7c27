"""The report of a sweep: pure functions of numbers, and one folder that any browser reads. No Ray, no MLflow."""

from vitray.sweep.report.papers import Point as Point
from vitray.sweep.report.papers import dataset_of as dataset_of
from vitray.sweep.report.papers import point_of as point_of
from vitray.sweep.report.trials import Sweep as Sweep
from vitray.sweep.report.trials import Trial as Trial
from vitray.sweep.report.writing import write_report as write_report
