"""The report of a sweep: an HTML page and its pictures, drawn from plain values. No Ray, no MLflow."""

from vitray.sweep.report.papers import PaperPoint as PaperPoint
from vitray.sweep.report.papers import dataset_of as dataset_of
from vitray.sweep.report.papers import point_of as point_of
from vitray.sweep.report.trials import SweepResult as SweepResult
from vitray.sweep.report.trials import TrialResult as TrialResult
from vitray.sweep.report.writing import write_report as write_report
