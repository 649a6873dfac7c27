"""The report of a sweep: an HTML page and its pictures, drawn from plain values. No Ray, no MLflow."""

from vitray.sweep.report.papers import is_imagenet as is_imagenet
from vitray.sweep.report.papers import paper_result as paper_result
from vitray.sweep.report.trials import Measure as Measure
from vitray.sweep.report.trials import SweepResult as SweepResult
from vitray.sweep.report.trials import TrialResult as TrialResult
from vitray.sweep.report.trials import leader as leader
from vitray.sweep.report.writing import write_report as write_report
